"""One model's upstreams: the line in front of them, and the workers of this gateway that may answer in their place.

The line is that of workers: by class, fair between tenants, by deadline. Each upstream is sent no more than its terms
say at a time, and one whose breaker is open nothing. Workers of this gateway may come before them all, or after them
(``here``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from gateway import errors, telemetry
from gateway.clock import Clock
from gateway.flight import Flight
from gateway.lanes import LaneView, WaitingLine
from gateway.upstreams.answering import Answering, end
from gateway.upstreams.asking import Asked
from gateway.upstreams.call import Call
from gateway.upstreams.client import Client
from gateway.upstreams.here import TO_UPSTREAMS, Here
from gateway.upstreams.server import LOOK_S, Server
from gateway.upstreams.servers import Servers
from policies import settings, wire
from policies.priority import Order
from policies.promise import Pace

if TYPE_CHECKING:
    from gateway.text import Text

log = logging.getLogger(__name__)

UNKNOWN_SHARE = 0.25
"""Of the time until a first token is due: what an upstream may take for it as long as nobody knows."""


class Pool(Servers):
    """The ``CallKeeper`` of its calls."""

    def __init__(
        self,
        model: str,
        classes: Mapping[str, settings.SlaClass],
        clock: Clock,
        client: Client,
        of: Callable[[str], Pool | None],
        text: Callable[[str], Text | None],
    ) -> None:
        """``of`` finds the pool of another model, ``text`` the tokenizer of one."""
        super().__init__(model, of)
        self._clock = clock
        self._client = client
        self._text = text
        self._waiting = WaitingLine(model, classes, clock, self._advance, _unpaced)
        self._open: set[Call] = set()
        """Those that an upstream is asked for, or workers are."""
        self._num_leaving = 0
        """Calls that are on their way from the workers' line to an upstream."""

    @property
    def text(self) -> Text | None:
        """The model's own tokenizer, where it is known here."""
        return self._text(self.model)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waits_since(self) -> float:
        """When the one came that has waited longest; somebody waits."""
        oldest: list[Flight] = [next(iter(lane.waiting)).item for lane in self._waiting.lanes if lane.waiting]
        return min([flight.submitted_at for flight in oldest])

    @property
    def num_open(self) -> int:
        return len(self._open)

    def views(self) -> list[LaneView]:
        """Each class as it stands."""
        views = self._waiting.views(None, 1.0, 0.0)
        return [msgspec.structs.replace(view, served_by="upstreams") for view in views]

    def flights(self) -> list[Call]:
        """All that have not ended, but those that workers have."""
        waiting = [turn.item for lane in self._waiting.lanes for turn in lane.waiting]
        return [*waiting, *[call for call in self._open if call.source is None]]

    def submit(
        self,
        asked: Asked,
        request: wire.Submit,
        order: Order,
        here: Here | None = None,
        is_first_here: bool = False,
        is_let_in: bool = False,
    ) -> Call:
        """Sends it, or lets it wait in line: where ``is_first_here``, in that of the workers, for as long as it may
        come in time there. ``is_let_in``: with an earlier prompt of the request. Raises QueueFull and
        UpstreamUnavailable."""
        call = Call(self, request, order, self._clock.now(), asked, here)
        call.is_let_in = is_let_in
        if here is not None and is_first_here:
            with contextlib.suppress(errors.ServiceUnavailable):
                here.launch(call)
                self._begin(call, here.bring(call, self._clock), self._left)
                self._leave_later(call, self._leaves_after_s(order))
                return call
        self._join(call)
        return call

    def _join(self, call: Call) -> None:
        """As ``submit``, without the workers' line."""
        asked = call.asked
        if not self.is_up(asked.kind):
            if call.here is None or not self.serves(asked.kind):
                raise self.unavailable(asked.kind)
            return self._begin(call, self._answer_here(call, self.unavailable(asked.kind)), self._ended)
        server = None if len(self._waiting) else self.pick(asked)
        if server is not None:
            self._send(call, server)
        else:
            self._waiting.enter(call, None, 1.0, 0.0)
            self._advance()
        return None

    def abandon(self, flight: Flight) -> None:
        """Nobody reads this call any more."""
        assert isinstance(flight, Call)
        if flight.task is not None:
            flight.task.cancel()
        elif not flight.finished:
            self._waiting.leave(flight)
            flight.fail(_cancelled())
            self._advance()

    def stopped(self, call: Call, index: int) -> None:
        if call.source is not None:  # workers look for the same stop strings
            return
        end(call, index, "cancelled", self._clock.now())
        if call.finished and call.task is not None:
            call.task.cancel()

    def ended_between(self, flight: Flight) -> None:
        """It never is: no call moves from one to another in the middle."""
        raise AssertionError("a call has no worker to lose")

    def cut(self, error: errors.GatewayError) -> None:
        """Every call ends here."""
        for call in list(self._open):
            call.cut(error)
            if call.task is not None:
                call.task.cancel()
        self._waiting.fail(error)

    def changed(self) -> None:
        """Something about its upstreams is other than it was."""
        self._advance()

    # The line

    def _advance(self) -> None:
        """Sends whose turn it is while there is room; where nobody is left to ask, nobody waits."""
        while (turn := self._waiting.next()) is not None:
            call: Call = turn[0].item
            server = self.pick(call.asked)
            if server is None:
                if self.is_up(call.asked.kind):
                    return
                self._waiting.leave(call)
                if call.here is None or not self.serves(call.asked.kind):
                    call.fail(self.unavailable(call.asked.kind))
                else:
                    self._begin(call, self._answer_here(call, self.unavailable(call.asked.kind)), self._ended)
                continue
            self._waiting.take(*turn)
            self._send(call, server)

    def _send(self, call: Call, server: Server) -> None:
        call.sent(self._clock.now())
        self._waiting.sent(call)
        answering = Answering(call, server, self, self._client, self._clock, self.text)
        self._begin(call, self._answer(call, answering), self._ended)

    def _begin(
        self, call: Call, work: Coroutine[Any, Any, None], ended: Callable[[Call, asyncio.Task[None]], None]
    ) -> None:
        self._open.add(call)
        call.task = asyncio.create_task(work)
        call.task.add_done_callback(partial(ended, call))

    def _ended(self, call: Call, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("failed on its way to an upstream", exc_info=error, extra=telemetry.about_sent(call.request))
            call.fail(errors.InternalError())
        if call.asking is not None:
            call.asking.drop()
        if not call.is_over:
            call.fail(_cancelled())
        self._open.discard(call)
        self._waiting.ended(call)

    async def _answer(self, call: Call, answering: Answering) -> None:
        trouble = await answering.trouble()
        if trouble is None:
            return None
        if call.here is None or call.first_token_at is not None or not trouble.elsewhere:
            return call.fail(trouble.error)
        return await self._answer_here(call, trouble.error)

    # The workers here

    async def _answer_here(self, call: Call, failure: errors.GatewayError) -> None:
        """By them, since no upstream answers, as ``failure`` says."""
        assert call.here is not None
        try:
            await call.here.prepare()
            call.here.launch(call)
            await call.here.bring(call, self._clock)
        except errors.GatewayError as error:
            # What they cannot do at all is not what the client asked of them.
            call.fail(failure if call.source is None and error.status < 429 else error)

    def _leaves_after_s(self, order: Order) -> float:
        """So long a request may wait for the workers here and still have its first token in time elsewhere."""
        left_s = order.deadline_at - self._clock.now()
        known_s = self.first_word_s
        return left_s - (UNKNOWN_SHARE * left_s if known_s is None else known_s)

    def _leave_later(self, call: Call, delay_s: float) -> None:
        call.timer = self._clock.call_later(max(0.0, delay_s), partial(self._leave, call))

    def _leave(self, call: Call) -> None:
        """Its turn has not come; an upstream can still answer in time, if one has room."""
        assert call.source is not None
        assert call.task is not None
        if not call.source.were_sent:
            if self.num_free(call.asked.kind) <= self._num_leaving + len(self._waiting):
                self._leave_later(call, LOOK_S)
            elif call.task.cancel():
                call.is_leaving = True
                self._num_leaving += 1

    def _left(self, call: Call, task: asyncio.Task[None]) -> None:
        """Workers have answered it, or will not."""
        assert call.timer is not None
        assert call.source is not None
        call.timer.cancel()
        call.source.close()  # a task that is cancelled before its first step has not
        self._open.discard(call)
        self._num_leaving -= call.is_leaving
        error = None if task.cancelled() else task.exception()
        goes_on = call.is_leaving if task.cancelled() else isinstance(error, TO_UPSTREAMS)
        if goes_on and call.is_wanted and call.first_token_at is None:
            call.source = call.task = None
            try:
                return self._join(call)
            except errors.GatewayError as refused:
                return call.fail(refused)
        if error is not None and not isinstance(error, errors.GatewayError):
            log.error("failed on its way from the workers", exc_info=error, extra=telemetry.about_sent(call.request))
            error = errors.InternalError()
        if not call.is_over:
            call.fail(error or _cancelled())
        return None


def _unpaced() -> tuple[Pace | None, float]:
    """What an upstream's steps cost nobody here knows, so nothing is predicted of its line."""
    return None, 1.0


def _cancelled() -> errors.GatewayError:
    return errors.RequestFailed("The request was cancelled.")
