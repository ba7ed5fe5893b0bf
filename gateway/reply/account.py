"""What one request owes: its ledger row, written once, however it ends."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

import msgspec

from gateway import errors, openai
from gateway.auth import Caller
from gateway.flights import Source
from gateway.head import HUNG_UP, Head
from gateway.ledger import Entry, Ledger
from gateway.ledger.marks import Mark, Progress
from gateway.limits import Ticket
from gateway.reply.answers import Answer
from gateway.reply.receipt import receipt
from gateway.spent import Spent
from gateway.telemetry import tell
from policies import terms
from policies.pricelist import OF_BATCH

LAST_WORD_S = 3.0
"""So long the row of an answer that was broken off waits for the worker to say what it had taken until then, which is
mostly a step. Whoever has hung up does not wait for it, and a worker that is lost is not waited for."""
NOTHING = terms.Usage(0, 0, 0)
UNSPENT = Spent()


class Keeper:
    """Who keeps an answer: what is not kept is not owed, so that whoever finds the answer again after a crash finds the
    row that it may lack."""

    batch_id = ""
    """That it is of."""

    def begun(self) -> None:
        """It was let in, and is on its way to a worker."""

    async def keep(self, entry: Entry, body: bytes) -> None:
        """Done when it is durable; only then the row is written, which is this."""
        raise NotImplementedError


class Account:
    """An async context manager: whoever leaves it without having settled, settles with what was delivered until
    then."""

    def __init__(
        self,
        ledger: Ledger,
        noted: Head,
        caller: Caller,
        answer: Answer,
        flights: Source,
        ticket: Ticket,
        sla_class: str,
    ) -> None:
        """``sla_class``: the one that serves it."""
        self.noted = noted
        self.request_id = noted.request_id
        self._ledger = ledger
        self._started_at = noted.started_at
        self._caller = caller
        self._answer = answer
        self._flights = flights
        self._ticket = ticket
        self._sla_class = sla_class
        self.keeper = noted.keeper
        of_batch = OF_BATCH if self.keeper is not None and self.keeper.batch_id else ""
        self._price_version = ticket.price_version + of_batch
        self.num_delivered = 0
        """Completion tokens of a stream that were handed to its client's connection."""
        self._mark: Mark | None = None
        self._settled = False
        self._spent = UNSPENT
        self._written: Entry | None = None
        """The row, once it is settled."""

    async def __aenter__(self) -> Account:
        if self.keeper is not None:
            self.keeper.begun()
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
            case errors.GatewayError():
                await self.settle_failure(error)
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
            entry = self._entry(errors.InternalError.status, self._answer.usage(), time.monotonic())
            self._mark = marks.open(entry, self._ticket.rates, self._progress)
        return self._mark

    async def settle_failure(self, error: errors.GatewayError) -> None:
        """As ``settle``, except that a refusal for want of room in the ledger does not wait for a row that could be
        long in coming, and owes nothing."""
        self.noted.failed(error)
        if not isinstance(error, errors.LedgerBehind) or self.num_delivered:
            await self.settle(error.status)
        elif not self._settled:
            self._settled = True
            self._ledger.put(self._row(error.status, None, time.monotonic()), self._mark)

    async def settle(self, status: int, body: bytes = b"") -> None:
        """Returns when the row is durable; it will be, also when the client hangs up meanwhile. The first call
        counts. ``body``: of a whole answer, for whoever keeps it."""
        if self._settled:
            return
        self._settled = True
        # What was delivered until now is what is owed, however long the worker's last word takes.
        flights, usage, at = self._flights, self._owed(status), time.monotonic()
        self.noted.settle_at = at
        try:
            if not flights.is_over:
                await self._last_word()
        finally:
            self._written = self._row(status, usage, at)
            if self.keeper is not None and status == 200:
                await self.keeper.keep(self._written, body)
            await self._ledger.settle(self._written, self._mark)
            self._ledger.recent.note(self._written, self._spent, self.noted, time.monotonic())

    def _row(self, status: int, usage: terms.Usage | None, at: float) -> Entry:
        """``usage``: what is owed; None: nothing."""
        spent = self._spent = self._flights.spent
        cost_micros = 0
        if usage is not None:
            cost_micros = self._ticket.settle(usage, self._flights.outcome, _engine_us(spent))
        entry, noted = self._entry(status, usage or NOTHING, at, spent, cost_micros), self.noted
        keeping = noted.keeping
        # Most are quick where a call of a function is a part of what they cost.
        if keeping is not None and (status >= 400 or entry.duration_ms * (entry.num_sequences or 1) > keeping.quick_ms):
            noted.keep(keeping.became(entry))
            if noted.trace_id != entry.trace_id:
                entry = msgspec.structs.replace(entry, trace_id=noted.trace_id)
        tell(entry)
        noted.is_told, noted.entry = True, entry
        return entry

    def receipt(self, currency: str) -> openai.PenstockExtras:
        """Of a request that is settled, up to now."""
        assert self._written is not None
        total_s = time.monotonic() - self._started_at
        return openai.PenstockExtras(receipt(self._written, self._flights.spent, total_s, currency))

    async def _last_word(self) -> None:
        told = asyncio.create_task(self._flights.over())
        try:
            await asyncio.wait([told], timeout=LAST_WORD_S)
        except asyncio.CancelledError:  # only now is it certain that the client is gone, and it is waited for no less
            await asyncio.wait([told], timeout=LAST_WORD_S)
            raise
        finally:
            told.cancel()

    def _entry(self, status: int, usage: terms.Usage, at: float, spent: Spent = UNSPENT, cost_micros: int = 0) -> Entry:
        """``at``: when it ended, in monotonic seconds."""
        answer, flights, caller = self._answer, self._flights, self._caller
        call = answer.call
        first_token_at = flights.first_token_at
        if first_token_at is not None and first_token_at > at:
            first_token_at = None
        finish_reason = answer.finish_reason() if status == 200 else "cancelled" if status == HUNG_UP else "error"
        return Entry(
            request_id=self.request_id,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            model=call.model,
            endpoint=answer.endpoint,
            status=status,
            finish_reason=finish_reason,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_completion_tokens=usage.num_completion_tokens,
            num_reasoning_tokens=usage.num_reasoning_tokens,
            num_sequences=len(answer.choices),
            created_at=answer.created,
            queue_ms=1e3 * flights.queue_s,
            ttft_ms=None if first_token_at is None else 1e3 * (first_token_at - self._started_at),
            duration_ms=1e3 * (at - self._started_at),
            sla_class=self._sla_class,
            service_tier=answer.service_tier,
            cache=flights.outcome,
            policy_name=caller.policy_name,
            policy_version=caller.policy_version,
            cost_micros=cost_micros,
            price_version=self._price_version,
            num_drafted_tokens=spent.num_drafted_tokens,
            num_accepted_tokens=spent.num_accepted_tokens,
            engine_us=_engine_us(spent),
            kv_block_ms=round(1e3 * spent.kv_block_s),
            end_user=_storable(call.user),
            safety_identifier=_storable(call.safety_identifier),
            metadata=_as_json(call.metadata) if call.metadata else None,
            trace_id=self.noted.trace_id,
            upstream=answer.upstream,
            counted_by=answer.counted_by,
        )

    def _progress(self) -> Progress:
        entry = self._entry(errors.InternalError.status, self._answer.usage(), time.monotonic())
        return Progress(
            *(entry.num_cached_tokens, entry.cache, entry.ttft_ms, entry.queue_ms, entry.duration_ms),
            num_reasoning_tokens=entry.num_reasoning_tokens,
        )

    def _owed(self, status: int) -> terms.Usage | None:
        """A client owes what it was sent, and what it gave up itself; not what failed here before it saw any of it."""
        if self.keeper is not None and status != 200:
            return None
        if not (self._flights.were_sent if status == HUNG_UP else status == 200 or self.num_delivered > 0):
            return None
        answer, usage = self._answer, self._answer.usage()
        if status != 200 and (num_unsent := answer.num_unsent_prompt_tokens):
            usage = msgspec.structs.replace(usage, num_prompt_tokens=usage.num_prompt_tokens - num_unsent)
        if status != 200 and answer.call.stream:
            num_reasoning_tokens = min(usage.num_reasoning_tokens, self.num_delivered)
            usage = msgspec.structs.replace(
                usage, num_completion_tokens=self.num_delivered, num_reasoning_tokens=num_reasoning_tokens
            )
        return usage


def _engine_us(spent: Spent) -> int:
    return round(1e6 * spent.engine_s)


def _storable(text: str | None) -> str | None:
    """What a client sent, as any database takes it: PostgreSQL has no NUL, and would refuse all rows of a commit."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}") if text is not None and "\0" in text else text


def _as_json(metadata: dict[str, str]) -> str:
    return msgspec.json.encode({_storable(key): _storable(value) for key, value in metadata.items()}).decode()
