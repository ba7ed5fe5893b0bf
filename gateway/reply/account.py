"""What one request owes: its ledger row, written once, however it ends."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

import msgspec
from aiohttp import web

from gateway import errors, head
from gateway.auth import Caller
from gateway.flights import Source
from gateway.ledger import Entry, Ledger
from gateway.ledger.marks import Mark, Progress
from gateway.limits import Ticket
from gateway.reply.answers import Answer
from gateway.telemetry import tell
from policies import terms

HUNG_UP = 499
"""The status, nginx's own, of a request whose client went away; nobody sees it but the ledger."""


class Account:
    """An async context manager: whoever leaves it without having settled, settles with what was delivered until
    then."""

    def __init__(
        self,
        ledger: Ledger,
        request: web.Request,
        caller: Caller,
        answer: Answer,
        flights: Source,
        ticket: Ticket,
        sla_class: str,
    ) -> None:
        """``sla_class``: the one that serves it."""
        self.request_id = request[head.REQUEST_ID]
        self._ledger = ledger
        self._started_at = request[head.STARTED_AT]
        self._caller = caller
        self._answer = answer
        self._flights = flights
        self._ticket = ticket
        self._sla_class = sla_class
        self.num_delivered = 0
        """Completion tokens of a stream that were handed to its client's connection."""
        self._mark: Mark | None = None
        self._settled = False

    async def __aenter__(self) -> Account:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            assert self._settled
            return
        # First the sequences leave the batch; the row can wait for its commit.
        self._flights.close()
        match error:
            case errors.LedgerBehind():  # whose row could be long in coming, and owes nothing
                if not self._settled:
                    self._ledger.put(self._closing(error.status), self._mark)
            case errors.GatewayError():
                await self.settle(error.status)
            case asyncio.CancelledError() | ConnectionResetError():
                await self.settle(HUNG_UP)
            case _:
                await self.settle(errors.InternalError.status)

    def open_mark(self) -> Mark | None:
        """Before a stream's first byte: from now on what was delivered of it is owed whatever becomes of this process.

        None where nothing is delivered before the row is durable: an answer that is there already leaves at once.
        Raises LedgerBehind.
        """
        marks = self._ledger.marks
        if marks is not None and self._flights.outcome != "hit":
            entry = self._entry(errors.InternalError.status, self._answer.usage(), 0)
            self._mark = marks.open(entry, self._ticket.rates, self._progress)
        return self._mark

    async def settle(self, status: int) -> None:
        """Returns when the row is durable; it will be, also when the client hangs up meanwhile. The first call
        counts."""
        if not self._settled:
            await self._ledger.settle(self._closing(status), self._mark)

    def _closing(self, status: int) -> Entry:
        """The row; from here on it counts as written."""
        self._settled = True
        usage, cost_micros = terms.Usage(0, 0, 0), 0
        if self._is_owed(status):
            usage = self._answer.usage()
            if status != 200 and self._answer.call.stream:
                usage = msgspec.structs.replace(usage, num_completion_tokens=self.num_delivered)
            cost_micros = self._ticket.settle(usage, self._flights.outcome)
        entry = self._entry(status, usage, cost_micros)
        tell(entry)
        return entry

    def _entry(self, status: int, usage: terms.Usage, cost_micros: int) -> Entry:
        answer, flights, caller = self._answer, self._flights, self._caller
        finish_reason = {200: answer.finish_reason(), HUNG_UP: "cancelled"}.get(status, "error")
        return Entry(
            request_id=self.request_id,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            model=answer.call.model,
            endpoint=answer.endpoint,
            status=status,
            finish_reason=finish_reason,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_completion_tokens=usage.num_completion_tokens,
            num_sequences=len(answer.choices),
            created_at=answer.created,
            queue_ms=1e3 * flights.queue_s,
            ttft_ms=self._ttft_ms(),
            duration_ms=self._duration_ms(),
            sla_class=self._sla_class,
            service_tier=answer.service_tier,
            cache=flights.outcome,
            policy_name=caller.policy_name,
            policy_version=caller.policy_version,
            cost_micros=cost_micros,
            price_version=self._ticket.price_version,
        )

    def _progress(self) -> Progress:
        flights, num_cached_tokens = self._flights, self._answer.usage().num_cached_tokens
        return Progress(num_cached_tokens, flights.outcome, self._ttft_ms(), 1e3 * flights.queue_s, self._duration_ms())

    def _ttft_ms(self) -> float | None:
        first_token_at = self._flights.first_token_at
        return None if first_token_at is None else 1e3 * (first_token_at - self._started_at)

    def _duration_ms(self) -> float:
        return 1e3 * (time.monotonic() - self._started_at)

    def _is_owed(self, status: int) -> bool:
        """A client owes what it was sent, and what it gave up itself; not what failed here before it saw any of it."""
        if status == HUNG_UP:
            return self._flights.were_sent
        return status == 200 or self.num_delivered > 0
