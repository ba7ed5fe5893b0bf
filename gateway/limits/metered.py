"""An answer that ends where its ticket does: at a ceiling on tokens, or where a hard budget is spent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.flights import Source
from gateway.limits.ticket import Ticket
from gateway.pieces import Piece
from gateway.spent import Spent
from policies import wire
from policies.admission import NO_CEILING
from policies.answers import Outcome
from policies.pricing import FROM_CACHE


def metered(source: Source, ticket: Ticket, submits: Sequence[wire.Submit]) -> Source:
    """``source`` as far as the ticket covers it; itself where nothing limits it. See ``Metered``."""
    if ticket.num_covered == NO_CEILING:
        return source
    return Metered(source, ticket, submits)


class Metered:
    """A ``Source`` whose tokens are covered by a ticket before anybody reads them.

    The ticket is topped up as the answer grows. Where there is no more, every sequence that is still being written ends
    with what is covered, as at its own token limit, and the rest is neither delivered nor owed.
    """

    def __init__(self, source: Source, ticket: Ticket, submits: Sequence[wire.Submit]) -> None:
        self._source = source
        self._ticket = ticket
        self._num_tokens = 0
        """Of the completion so far; the ticket has to cover them."""
        self._open = dict.fromkeys(
            (submit.request_id, index) for submit in submits for index in range(submit.num_sequences)
        )
        """Sequences without an end."""
        self._num_cached_tokens: dict[str, int] = {}
        """Of each prompt, the fewest that were found for one of its sequences."""
        self._arrived: list[wire.Delta] = []
        """Read from the source, and not given out."""
        self._num_covered = 0
        """Of those, the ones whose tokens are covered."""

    async def deltas(self) -> list[wire.Delta]:
        """As ``Flight.deltas``: what a reader loses patience over while the ticket is topped up is there at its next
        call. Raises LimitsUnavailable besides."""
        if not self._arrived:
            self._arrived, self._num_covered = await self._source.deltas(), 0
        found = self._num_cached_tokens
        for place in range(self._num_covered, len(self._arrived)):
            delta = self._arrived[place]
            if (num_cached_tokens := delta.num_cached_tokens) is not None:
                found[delta.request_id] = min(num_cached_tokens, found.get(delta.request_id, num_cached_tokens))
            num_tokens = self._num_tokens + len(delta.token_ids)
            # Whoever reads along may become the one who pays, and owes the tokens from then on.
            if not (
                self._ticket.covers(num_tokens)
                or await self._ticket.top_up(num_tokens, self._source.outcome in FROM_CACHE)
            ):
                covered, self._arrived = self._arrived[:place], []
                return [*covered, *self._cut(delta)]
            self._num_tokens, self._num_covered = num_tokens, place + 1
            if delta.finish is not None:
                self._open.pop((delta.request_id, delta.index), None)
        deltas, self._arrived = self._arrived, []
        return deltas

    def cancel(self, request_id: str, index: int) -> None:
        self._source.cancel(request_id, index)

    def close(self) -> None:
        self._source.close()

    @property
    def outcome(self) -> Outcome:
        return self._source.outcome

    @property
    def were_sent(self) -> bool:
        return self._source.were_sent

    @property
    def queue_s(self) -> float:
        return self._source.queue_s

    @property
    def first_token_at(self) -> float | None:
        return self._source.first_token_at

    @property
    def spent(self) -> Spent:
        return self._source.spent

    @property
    def is_over(self) -> bool:
        return self._source.is_over

    async def over(self) -> None:
        await self._source.over()

    def _cut(self, delta: wire.Delta) -> list[wire.Delta]:
        """As much of ``delta`` as is covered, and the end of all sequences."""
        self._source.close()
        ticket = self._ticket
        num_covered = ticket.num_paid if self._source.outcome in FROM_CACHE else ticket.num_covered
        room = max(0, num_covered - self._num_tokens)
        deltas: list[wire.Delta] = []
        for request_id, index in self._open:
            finish = wire.Finish("length", self._num_cached_tokens.get(request_id, 0), 0, 0.0, 0.0, 0.0)
            if (request_id, index) == (delta.request_id, delta.index):
                if isinstance(delta, Piece):
                    deltas.append(msgspec.structs.replace(delta, finish=finish, counted=None, **delta.first(room)))
                    continue
                told, logprobs = delta.token_ids[:room], delta.logprobs and delta.logprobs[:room]
                deltas.append(msgspec.structs.replace(delta, token_ids=told, logprobs=logprobs, finish=finish))
            else:
                deltas.append(type(delta)(request_id, index, [], None, finish))  # an upstream's has its own kind
        return deltas
