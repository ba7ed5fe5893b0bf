"""Receive, step, send, until drained: one thread, no event loop, no queue between the wire and the engine.

While there is work the sockets are looked at between steps and nothing waits; while there is none the loop sleeps in
the selector, waking once a second to say that it is alive. A gateway's faults end its own channel and its own
requests; an error in the engine itself ends the process.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from policies import wire
from worker.adapters.store import Store
from worker.boarding import Boarding
from worker.channel import Channel, ChannelClosed
from worker.engine import Engine

if TYPE_CHECKING:
    from worker.grammar.store import Grammars

HEARTBEAT_S = 1.0
MAX_TOLD_BLOCKS = 65_536
"""In one message, of those that came and of those that went: a megabyte each."""
MIN_STATS_GAP_S = 0.1
GREETING_TIMEOUT_S = 10.0
"""A peer that has not said Hello by then is no gateway."""
FLUSH_TIMEOUT_S = 5.0
"""After the last sequence of a drain: how long a gateway may take to read what is left for it."""
MAX_CHANNELS = 64

log = logging.getLogger("penstock.worker")


class Loop:
    """``hello`` and ``ready`` open every channel."""

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        hello: wire.Hello,
        ready: wire.Ready,
        now: Callable[[], float],
        adapters: Store | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """``adapters`` None: none are taken; ``grammars`` None: answers are held to none."""
        self._engine = engine
        self._boarding = Boarding(engine, adapters, now, grammars)
        self._hello, self._ready = hello, ready
        self._now = now
        self._channels: set[Channel] = set()
        self._owners: dict[str, Channel] = {}
        self._wanted_adapters: dict[str, set[Channel]] = {}
        """Each with the channels whose requests may ask for it."""
        self._num_channels = 0
        self._stopped = False
        self._told_load = engine.load()
        self._told_at = now()
        self._needs_audit = False
        self._rested = False
        """No step since the last Stats: time for an audit, which a large pool makes long enough to be noticed."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, lambda events: self._accept(listener))

    # Said to the loop; safe in a signal handler

    def drain(self) -> None:
        """Take nothing new, finish what runs, return."""
        self._engine.draining = True

    def stop(self) -> None:
        """Return at the next turn; what runs is dropped."""
        self._stopped = True

    def wake_on(self, wakeup: socket.socket) -> None:
        """Turn whenever this socket has something to read (signal.set_wakeup_fd)."""
        self._selector.register(wakeup, selectors.EVENT_READ, lambda events: wakeup.recv(4096))

    def stop_at_end_of(self, fd: int) -> None:
        """Stop when this file ends: whoever held its other end is gone."""

        def read(events: int) -> None:
            if not os.read(fd, 4096):
                log.info("the parent is gone")
                self._selector.unregister(fd)
                self.stop()

        try:
            self._selector.register(fd, selectors.EVENT_READ, read)
        except OSError:  # closed, a plain file or /dev/null: there is nobody at its other end
            self.stop()

    def run(self) -> None:
        """Until drained or stopped. Whatever it raises is a broken invariant."""
        engine = self._engine
        drained_at: float | None = None
        while not self._stopped:
            for key, events in self._selector.select(self._patience(drained_at)):
                key.data(events)
            self._tell_adapters()
            if engine.has_work:
                self._step()
            now = self._now()
            self._tell_stats(now)
            self._close_silent(now)
            if engine.draining and not engine.has_work and not self._boarding.has_waiting:
                drained_at = drained_at if drained_at is not None else now
                waits = any(channel.num_outgoing_bytes for channel in self._channels)
                if not waits or now - drained_at > FLUSH_TIMEOUT_S:
                    break
        for channel in list(self._channels):
            self._close(channel, None)
        engine.audit()
        self._selector.close()

    def _patience(self, drained_at: float | None) -> float | None:
        """Seconds to wait for something to happen; None: for ever."""
        engine = self._engine
        is_drained = engine.draining and not self._boarding.has_waiting and not engine.has_work
        if (engine.has_work and not engine.rests) or self._stopped or (is_drained and drained_at is None):
            return 0.0
        if not self._channels:
            return None
        gap = MIN_STATS_GAP_S if self._engine.load() != self._told_load else HEARTBEAT_S
        return max(0.0, self._told_at + gap - self._now())

    # Steps

    def _step(self) -> None:
        deltas, failed = self._engine.step()
        self._needs_audit, self._rested = True, False
        if deltas:
            by_channel: dict[Channel, list[wire.Delta]] = {}
            owners = self._owners
            for delta in deltas:
                by_channel.setdefault(owners[delta.request_id], []).append(delta)
            for channel, own in by_channel.items():
                self._tell_step(channel, own)
            self._let_go(delta.request_id for delta in deltas if delta.finish is not None)
        self._tell_failed(failed)

    def _tell_step(self, channel: Channel, deltas: list[wire.Delta]) -> None:
        """The log-probabilities of one prompt may fill half a frame, so no two prompts' are told in one."""
        message: list[wire.Delta] = []
        for delta in deltas:
            if delta.prompt_logprobs is not None and message:
                self._tell(channel, wire.StepOutput(message))
                message = []
            message.append(delta)
        self._tell(channel, wire.StepOutput(message))

    def _tell_failed(self, failed: list[wire.Failed]) -> None:
        for failure in failed:
            owner = self._owners.get(failure.request_id)
            if owner is not None:
                self._tell(owner, failure)
        self._let_go(failure.request_id for failure in failed)

    def _let_go(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if not self._boarding.holds(request_id):
                self._boarding.let_go(request_id)
                owner = self._owners.pop(request_id, None)
                if owner is not None:
                    owner.request_ids.discard(request_id)

    def _tell_stats(self, now: float) -> None:
        gap = now - self._told_at
        load = self._engine.load()
        if gap < HEARTBEAT_S and (gap < MIN_STATS_GAP_S or load == self._told_load):
            return
        if self._rested and self._needs_audit:
            self._engine.audit()
            self._boarding.audit()
            self._needs_audit = False
        self._rested = True
        self._told_at, self._told_load = now, load
        stored, evicted = self._engine.take_moved_blocks()
        stats = self._boarding.stats(sum(channel.asks for channel in self._channels))
        for channel in list(self._channels):
            if channel.greeted:
                if not channel.knows_blocks:
                    channel.knows_blocks = True
                    self._tell_blocks(channel, self._engine.kept_blocks(), [])
                else:
                    self._tell_blocks(channel, stored, evicted)
                self._tell(channel, stats)

    def _tell_blocks(self, channel: Channel, stored: list[bytes], evicted: list[bytes]) -> None:
        for start in range(0, max(len(stored), len(evicted)), MAX_TOLD_BLOCKS):
            end = start + MAX_TOLD_BLOCKS
            self._tell(channel, wire.KvEvents(stored[start:end], evicted[start:end]))

    # Adapters

    def _tell_adapters(self) -> None:
        answers, failed = self._boarding.turn()
        self._tell_failed(failed)
        for answer in answers:
            self._tell_adapter(answer)

    def _tell_adapter(self, answer: wire.AdapterLoaded | wire.AdapterRefused) -> None:
        channels = list(self._wanted_adapters.get(answer.adapter, ()))
        if isinstance(answer, wire.AdapterRefused):
            log.warning("adapter %s is refused: %s", answer.adapter, answer.reason)
            self._wanted_adapters.pop(answer.adapter, None)
        for channel in channels:
            self._tell(channel, answer)

    def _unload(self, channel: Channel, adapter_id: str) -> None:
        channels = self._wanted_adapters.get(adapter_id)
        if channels is None:
            return
        channels.discard(channel)
        if not channels:
            del self._wanted_adapters[adapter_id]
            self._boarding.unload(adapter_id)

    # Channels

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            log.warning("a connection was not accepted: %s", error.strerror or error)
            return
        if len(self._channels) >= MAX_CHANNELS:
            log.warning("a connection was refused: %d are open", len(self._channels))
            connection.close()
            return
        self._num_channels += 1
        channel = Channel(connection, self._num_channels, self._now())
        self._channels.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda events: self._serve(channel, events))
        log.info("channel %d: connected", channel.number)
        self._tell(channel, self._hello)
        self._tell(channel, self._ready)

    def _serve(self, channel: Channel, events: int) -> None:
        if channel not in self._channels:
            return  # closed by what another one had to say in the same turn
        try:
            if events & selectors.EVENT_WRITE:
                channel.flush()
                if not channel.num_outgoing_bytes:
                    self._selector.modify(channel, selectors.EVENT_READ, self._selector.get_key(channel).data)
            if events & selectors.EVENT_READ:
                for message in channel.receive():
                    if channel in self._channels:  # an answer to an earlier one may have ended it
                        self._hear(channel, message)
        except ChannelClosed as closed:
            self._close(channel, str(closed))

    def _hear(self, channel: Channel, message: wire.ToWorker) -> None:
        match message:
            case wire.Submit(request_id=request_id):
                if self._owners.get(request_id, channel) is channel:
                    refusal = self._boarding.add(message)
                else:  # a gateway that was cut off, and is back before its old connection is seen to have ended
                    refusal = wire.Failed(request_id, "overloaded", "it is being answered on another connection")
                if refusal is None:
                    self._owners[request_id] = channel
                    channel.request_ids.add(request_id)
                else:
                    self._tell(channel, refusal)
            case wire.Cancel(request_id, index):
                if request_id in channel.request_ids:  # a gateway speaks for its own requests only
                    deltas = self._boarding.cancel(request_id, index)
                    if deltas:
                        self._tell(channel, wire.StepOutput(deltas))
                        self._let_go((request_id,))
            case wire.LoadAdapter(adapter=adapter_id):
                self._wanted_adapters.setdefault(adapter_id, set()).add(channel)
                answer = self._boarding.load(message)
                if answer is not None:
                    self._tell_adapter(answer)
            case wire.UnloadAdapter(adapter_id):
                self._unload(channel, adapter_id)
            case wire.Drain():
                log.info("channel %d: drain", channel.number)
                self.drain()
            case wire.Hello():
                raise AssertionError("the channel keeps Hello to itself")

    def _tell(self, channel: Channel, message: wire.Message) -> None:
        if channel not in self._channels:
            return
        try:
            channel.send(message)
        except ChannelClosed as closed:
            self._close(channel, str(closed))
            return
        if channel.num_outgoing_bytes:
            key = self._selector.get_key(channel)
            if not key.events & selectors.EVENT_WRITE:
                self._selector.modify(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, key.data)

    def _close(self, channel: Channel, reason: str | None) -> None:
        """Ends a channel; nobody waits for its requests any more. ``reason`` None: it is the loop that ends."""
        self._channels.discard(channel)
        self._selector.unregister(channel)
        channel.close()
        for request_id in list(channel.request_ids):
            self._boarding.cancel(request_id)
            self._boarding.let_go(request_id)
            self._owners.pop(request_id, None)
        for adapter_id in [id for id, channels in self._wanted_adapters.items() if channel in channels]:
            self._unload(channel, adapter_id)
        if reason is not None:
            num_dropped = len(channel.request_ids)
            dropped = f"; {num_dropped} requests cancelled" if num_dropped else ""
            log.info("channel %d: %s%s", channel.number, reason, dropped)
        channel.request_ids.clear()

    def _close_silent(self, now: float) -> None:
        for channel in list(self._channels):
            if not channel.greeted and now - channel.connected_at > GREETING_TIMEOUT_S:
                self._close(channel, f"said no Hello within {GREETING_TIMEOUT_S:g} s")
