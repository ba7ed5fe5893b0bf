"""One batch on its way, from wherever it stands to its end.

What is guaranteed. A line whose result is on the disk is never asked again, and its result is in exactly one of the two
files. Its row is in the ledger once, with the numbers of that very result: it is written after the result, and again,
under the same request id, when a crash came between. A line that was under way at a crash has left no row that costs
anything, and is asked again. What lines ask in vain (a queue that is full, a limit) leaves no result and is no failure
of theirs: they wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import sqlalchemy as sa

from gateway import errors, openai, store
from gateway.auth import Caller
from gateway.background import to_its_end
from gateway.batches import journal as journals
from gateway.batches import outputs
from gateway.batches.asking import Asked, ask
from gateway.batches.book import Batch, Book, Counts, Lost
from gateway.batches.journal import WAITING, Journal, Record
from gateway.batches.outputs import Ending
from gateway.batches.pace import TICK_S, Course, Pace
from gateway.batches.reading import Index, LostIndex, read
from gateway.entrance import Endpoint
from gateway.files import DAMAGED
from gateway.house import Gateway
from gateway.ledger import Entry
from gateway.reply import Keeper
from gateway.transactions import reading
from policies.lines import policy_for_lines
from policies.policy import Policy

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""So often a batch says how far it has come, and looks whether it is to stop."""
LAST_LINES_S = 60.0
"""How long the lines under way may take when a batch ends before its time; what they would have said is lost then, and
not owed, unless it was being written."""
MAX_LOSSES = 3
"""Workers that may be lost with one line, beyond those that others go on for, before it fails."""
LONGEST_WAIT_S = 30.0
STUCK_S = 600.0
"""After so long without a result or a line under way, as where a budget is spent until tomorrow, a batch makes room for
one that waits for a place, and goes on where it was when it is its turn again."""
LOOK_UP = 500
"""Rows of the ledger that are looked for at once, and results that are written."""
LINE_ROOM_BYTES = 4096
"""Of a line, around its body."""
ANY_BYTES = 1 << 62
"""More than a line has."""


class BrokenOff(Exception):
    """Lines were, and what is in the journal of them is to be found again, as after a crash."""


class Line(Keeper):
    """One line under way, and whoever keeps its answer."""

    def __init__(self, run: Run, course: Course, number: int, custom_id: str) -> None:
        self._run = run
        self.batch_id = run.batch.id
        self._course = course
        self.number = number
        self.custom_id = custom_id
        self.is_kept = False
        self._is_coming = True
        course.num_coming += 1

    def begun(self) -> None:
        if self._is_coming:
            self._is_coming = False
            self._course.num_coming -= 1
            self._run.pace.moved()

    async def keep(self, entry: Entry, body: bytes) -> None:
        await self._add(True, entry, 200, entry.request_id, body)

    async def note(self, asked: Asked) -> None:
        """What came of it, unless that is kept already."""
        if not self.is_kept:
            await self._add(asked.status == 200, None, asked.status, asked.request_id, asked.body)

    async def _add(self, is_answered: bool, entry: Entry | None, status: int, request_id: str, body: bytes) -> None:
        response = openai.LineResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body))
        output = outputs.line(self._run.batch.id, self.number, self.custom_id, response=response)
        await self._run.journal.add(Record(self.number, is_answered, entry, msgspec.Raw(output)))
        self.is_kept = True


class Run:
    """Whoever works on it must be its owner."""

    def __init__(
        self,
        gw: Gateway,
        book: Book,
        batch: Batch,
        pace: Pace,
        endpoints: Mapping[str, Endpoint],
        inside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``inside``: a line is inside the house as a request is, so that nothing closes around it."""
        self.batch = batch
        self.journal: Journal
        self.pace = pace
        self.look = asyncio.Event()
        """It may have been cancelled."""
        self._gw = gw
        self._book = book
        self._endpoints = endpoints
        self._inside = inside
        self._key_hash: bytes | None = None
        self._policy: tuple[Policy, Policy] | None = None
        """As the tenant has it, and as its lines do."""
        self._index: Index
        self._todo: deque[int] = deque()
        self._read: deque[tuple[int, openai.BatchLine]] = deque()
        """The next ones, as they stand in the file; then those in ``_todo``."""
        self._num_losses: dict[int, int] = {}
        self._not_before = 0.0
        """No line before this instant: one was told to wait."""
        self._heard_at = gw.clock.now()
        """When the store last said that the batch is ours."""
        self._is_recovered = False
        """The journal's counts are whole."""
        self._counts: Counts | None = None
        self._moved_at = gw.clock.now()
        """When there was a result last, or a line under way."""
        self._lost: Lost | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def work(self) -> None:
        """Until it is over, or this gateway goes down. Raises Lost, Busy, BrokenOff, OSError and GatewayError; then it
        may be begun again."""
        beating = asyncio.create_task(self._beat_forever())
        try:
            ended = await self._work()
        finally:
            beating.cancel()
            await asyncio.wait([beating])
        if ended is not None:
            self.batch = ended

    async def _work(self) -> Batch | None:
        """The batch as it was when it was over."""
        gw, book, batch = self._gw, self._book, self.batch
        self._key_hash = await book.key_hash(batch.key_id)
        if not await book.has_input(batch):
            return await self._refuse("invalid_file", "The input file has been deleted, or has expired.")
        if self._caller() is None and batch.status == "validating":
            return await self._refuse(*outputs.REASONS["failed"])
        try:
            self._index = await self._read_file(gw.files.path(batch.input_file_id))
        except OSError:  # where it lies may come back as long as the batch has time
            if batch.status != "cancelling" and book.wall() < batch.expires_at:
                raise
            if batch.in_progress_at is None:
                return await self._refuse("invalid_file", "The input file cannot be read.")
            self._index = LostIndex(gw.files.path(batch.input_file_id), batch.num_lines)
        if self._index.errors:
            return await self._fail(self._index.errors, len(self._index))
        path = gw.files.directory / f"{batch.id}.journal"
        async with journals.opened(path, gw.clock, len(self._index)) as self.journal:
            try:
                await self._recover()
            except msgspec.DecodeError as error:
                log.critical("batch %s: %s is damaged and was left as it is: %s", batch.id, path, error)
                return await self._refuse(DAMAGED, "What had become of its lines cannot be read any more.")
            self._is_recovered = True
            if batch.in_progress_at is None:
                models = self._index.models
                model = next(iter(models)) if len(models) == 1 else None
                self.batch = await book.begin(batch.id, num_lines=len(self._index), model=model)
            await self._note_unread()
            states = self.journal.states
            self._todo.extend(number for number in self._index.order if states[number] == WAITING)
            ending = await self._all_lines()
            if ending is None:
                await book.release(batch.id)
                return None
            return await outputs.finish(gw, book, self.batch, self.journal, self._index, ending)

    async def _read_file(self, path: Path) -> Index:
        """Raises OSError. What was found good once is not asked again whether it is."""
        gw, config, caller = self._gw, self._book.config, self._caller()
        served = {model.name for model in (*gw.upstreams.models(), *gw.dispatch.adapters())}
        is_new = self.batch.status == "validating"

        def may_use(model: str) -> bool:
            return not is_new or (caller is not None and model in served and caller.policy.may_use(model))

        most_lines, most_bytes = config.max_lines, gw.settings.server.max_body_bytes + LINE_ROOM_BYTES
        if self.batch.in_progress_at is not None:
            most_lines, most_bytes = self.batch.num_lines, ANY_BYTES
        groups = config.group_by_prefix
        return await asyncio.to_thread(read, path, self.batch.endpoint, most_lines, most_bytes, may_use, groups)

    async def _refuse(self, code: str, message: str) -> Batch:
        return await self._fail([openai.BatchError(code=code, message=message)], self.batch.num_lines)

    async def _fail(self, wrong: list[openai.BatchError], num_lines: int) -> Batch:
        """No line was asked."""
        return await self._book.fail(self.batch.id, errors=outputs.as_text(wrong), num_lines=num_lines)

    async def _recover(self) -> None:
        """What was written before counts, and has its rows."""
        entries = await to_its_end(asyncio.to_thread(self.journal.read))  # which cuts off what is behind the last
        ids = store.ledger.c.request_id
        for start in range(0, len(entries), LOOK_UP):
            some = entries[start : start + LOOK_UP]
            async with reading(self._gw.store) as connection:
                query = sa.select(ids).where(ids.in_([entry.request_id for entry in some]))
                known = set((await connection.execute(query)).scalars())
            lacking = [entry for entry in some if entry.request_id not in known]
            await asyncio.gather(*map(self._gw.ledger.settle, lacking))
            if lacking:
                self._gw.ledger.came_late.set()

    async def _note_unread(self) -> None:
        """Lines that could not be read fail before the others begin."""
        failed = [
            Record(number, False, None, msgspec.Raw(outputs.line(self.batch.id, number, custom_id, error=error)))
            for number, custom_id, error in self._index.unread
            if self.journal.states[number] == WAITING
        ]
        for start in range(0, len(failed), LOOK_UP):
            await asyncio.gather(*map(self.journal.add, failed[start : start + LOOK_UP]))

    # Lines

    async def _all_lines(self) -> Ending | None:
        """Asks them, many at a time, until there are none or it is over for another reason; None: this gateway is going
        down."""
        try:
            with self.pace.course() as course:
                ending = await self._give(course)
                late = (await asyncio.wait(self._tasks, timeout=LAST_LINES_S))[1] if self._tasks else None
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if late:
            raise BrokenOff(f"{len(late)} lines were broken off, whose results may have been written meanwhile")
        return "completed" if ending == "expired" and not self.journal.num_waiting else ending

    async def _give(self, course: Course) -> Ending | None:
        """As ``_all_lines``; some may be under way when it is over before its time. None also where another batch is to
        have its place."""
        while True:
            course.wants_more = False
            caller = self._caller()
            if self._lost is not None:
                raise self._lost
            if self._gw.dispatch.draining:
                return None
            if self.batch.status == "cancelling":
                return "cancelled"
            if self._book.wall() >= self.batch.expires_at:
                return "expired"
            if caller is None:
                return "failed"
            if self._is_stuck() and self._book.others_wait:
                self._book.make_room(self.batch.id)
                return None
            if not self._read and self._todo:
                self._read.extend(await asyncio.to_thread(self._index.lines, self._todo))
                for _ in self._read:
                    self._todo.popleft()
            if not self._read:
                if not self._tasks:
                    return "completed"
                await self.pace.wait()
            elif wait_s := await self._held_back_s(course, caller, self._index.model_of(self._read[0][0])):
                await self.pace.wait(wait_s)
            elif self.pace.has_room(course, self._index.model_of(self._read[0][0])):
                self._start(course, caller, *self._read.popleft())
            else:
                course.wants_more = True
                await self.pace.wait()

    def _is_stuck(self) -> bool:
        now = self._gw.clock.now()
        if self._tasks or self.journal.counts != self._counts:
            self._counts, self._moved_at = self.journal.counts, now
        return now > self._moved_at + STUCK_S

    async def _held_back_s(self, course: Course, caller: Caller, model: str) -> float:
        """By the batch's own limits, whatever the others do; 0: not at all."""
        now = self._gw.clock.now()
        if self.journal.is_stuck or now - self._heard_at > self._book.config.lease_s:
            return BEAT_S
        if now < self._not_before:
            return min(BEAT_S, self._not_before - now)
        try:
            return await self.pace.limited_s(course, caller, model)
        except errors.LimitsUnavailable:
            return BEAT_S

    def _start(self, course: Course, caller: Caller, number: int, line: openai.BatchLine) -> None:
        keeper = Line(self, course, number, line.custom_id)

        def over(task: asyncio.Task[None]) -> None:
            keeper.begun()
            self._tasks.discard(task)
            course.num_under_way -= 1
            self.pace.moved()
            if not task.cancelled() and (error := task.exception()) is not None:
                log.critical("batch %s: line %d ended by a failure", self.batch.id, number, exc_info=error)
                self._lost = Lost(self.batch.id)

        course.num_under_way += 1
        task = asyncio.create_task(self._one(keeper, caller, number, line))
        self._tasks.add(task)
        task.add_done_callback(over)

    async def _one(self, keeper: Line, caller: Caller, number: int, line: openai.BatchLine) -> None:
        with self._inside():
            asked = await ask(self._gw, self._endpoints, self.batch.endpoint, bytes(line.body), caller, keeper)
            if keeper.is_kept:
                return
            if asked.failure is not None and (wait_s := self._wait_s(number, asked.failure)) is not None:
                self._not_before = max(self._not_before, self._gw.clock.now() + min(wait_s, LONGEST_WAIT_S))
                self._read.appendleft((number, line))
            else:
                await keeper.note(asked)

    def _wait_s(self, number: int, failure: errors.GatewayError) -> float | None:
        """How long until the line is worth another try; None: this is what it is answered."""
        match failure:
            case errors.BudgetSpent():
                return LONGEST_WAIT_S if failure.ends_at < self.batch.expires_at else None
            case errors.RateLimited() if failure.should_retry is not False:
                return failure.retry_after_s or BEAT_S
            case errors.QueueTimeout() | errors.ServiceUnavailable():
                return failure.retry_after_s or BEAT_S
            case errors.WorkerLost():
                self._num_losses[number] = self._num_losses.get(number, 0) + 1
                return TICK_S if self._num_losses[number] <= MAX_LOSSES else None
        return None

    def _caller(self) -> Caller | None:
        """Whoever made it, as they would be let in now; None: not at all."""
        caller = None if self._key_hash is None else self._gw.auth.caller_again(self._key_hash)
        if caller is None:
            return None
        if self._policy is None or self._policy[0] is not caller.policy:
            self._policy = caller.policy, policy_for_lines(caller.policy, self._gw.settings.classes)
        return msgspec.structs.replace(caller, policy=self._policy[1])

    async def _beat_forever(self) -> None:
        """Says how far it has come, and hears whether it is to stop."""
        said, said_at = None, self._heard_at
        while self._lost is None:
            counts, now = self.journal.counts if self._is_recovered else None, self._gw.clock.now()
            try:
                if counts != said or now - said_at > self._book.config.lease_s / 3:
                    values = {} if counts is None else msgspec.structs.asdict(counts)
                    self.batch = await self._book.note(self.batch.id, **values)
                    said, said_at = counts, now
                else:
                    self.batch = await self._book.look(self.batch.id)
                self._heard_at = now
            except Lost as error:
                self._lost = error
            except errors.StoreUnavailable as error:
                log.warning("batch %s: %s", self.batch.id, error)
            except Exception:
                log.exception("batch %s: how far it has come cannot be said", self.batch.id)
            self.pace.moved()
            self.look.clear()
            timer = self._gw.clock.call_later(BEAT_S, self.look.set)
            await self.look.wait()
            timer.cancel()
