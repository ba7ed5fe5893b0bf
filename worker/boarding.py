"""Between the wire and the engine: a request with a grammar goes in when that is compiled, and one with an adapter when
the adapter is in memory.

Requests of the base pass. Whoever waits for an adapter that has no room, since all are in use, is not overtaken by
others with adapters, so that room comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from policies import wire
from worker.adapters.store import Refused, Store
from worker.engine import Engine
from worker.grammar.errors import Unguided

if TYPE_CHECKING:
    from worker.grammar.guide import Guide
    from worker.grammar.store import Grammars

CODE = "adapter_unavailable"
MAX_KNOWN = 65_536
TAKES_NONE = "this worker takes no adapters"


@dataclass(slots=True)
class _Waiting:
    submit: wire.Submit
    since: float
    """When it came."""
    indices: list[int]
    """Of the sequences that nobody has cancelled."""
    guides: Mapping[int, Guide] | None = None
    """Where it has a grammar, as soon as that is compiled."""

    @property
    def left(self) -> wire.Submit:
        """With those of its sequences that nobody has cancelled."""
        submit = self.submit
        if len(self.indices) == len(submit.indices):
            return submit
        emitted = {index: submit.emitted_token_ids.get(index, []) for index in self.indices}
        return msgspec.structs.replace(submit, emitted_token_ids=emitted)


class Boarding:
    """Adapters and requests of one engine."""

    def __init__(
        self, engine: Engine, store: Store | None, now: Callable[[], float], grammars: Grammars | None = None
    ) -> None:
        """``store`` None: there are no adapters; ``grammars`` None: answers are held to none."""
        self._engine, self._store, self._now, self._grammars = engine, store, now, grammars
        self._unguided: dict[str, _Waiting] = {}
        """By request id: those that wait for their grammar."""
        self._waiting: dict[str, _Waiting] = {}
        """By request id, in order: those that wait for their adapter."""
        self._taken: dict[str, str] = {}
        """The adapter of each request that the engine has."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting or self._unguided)

    def holds(self, request_id: str) -> bool:
        """Whether it waits here or any of its sequences has not ended."""
        return request_id in self._waiting or request_id in self._unguided or self._engine.holds(request_id)

    def add(self, submit: wire.Submit) -> wire.Failed | None:
        """Take a request in, or say why not."""
        request_id, grammars = submit.request_id, self._grammars
        if self.holds(request_id):
            return wire.Failed(request_id, "invalid_request", "a request of this id is being answered")
        if submit.num_sequences > self._engine.max_waiting:  # before anything is made for each of them
            return wire.Failed(request_id, "overloaded", f"{submit.num_sequences} sequences are more than may wait")
        if submit.grammar is None:
            return self._add_guided(submit, None, self._now())
        if grammars is None:
            return wire.Failed(request_id, "invalid_request", "this worker does not hold answers to a grammar")
        guides = grammars.find(submit)
        if guides is not None:
            return self._add_guided(submit, guides, self._now())
        if self._engine.draining or len(self._unguided) >= self._engine.max_waiting:
            code = "draining" if self._engine.draining else "overloaded"
            return wire.Failed(request_id, code, f"{len(self._unguided)} requests wait for grammars already")
        self._unguided[request_id] = _Waiting(submit, self._now(), list(submit.indices))
        grammars.begin(submit)
        return None

    def _add_guided(
        self, submit: wire.Submit, guides: Mapping[int, Guide] | None, came_at: float
    ) -> wire.Failed | None:
        request_id, adapter_id, store = submit.request_id, submit.adapter, self._store
        if not adapter_id:
            return self._engine.add(submit, None, guides, came_at)
        if store is None or not store.knows(adapter_id):
            return wire.Failed(request_id, CODE, f"this worker has no adapter {adapter_id}")
        if self._engine.draining or len(self._waiting) >= self._engine.max_waiting:
            code = "draining" if self._engine.draining else "overloaded"
            return wire.Failed(request_id, code, f"{len(self._waiting)} requests wait for adapters already")
        if not store.lacks_room and store.is_in_memory(adapter_id):
            return self._board(submit, guides, came_at)
        store.wait_for(adapter_id)
        self._waiting[request_id] = _Waiting(submit, came_at, list(submit.indices), guides)
        return None

    def cancel(self, request_id: str, index: int | None = None) -> list[wire.Delta]:
        """As ``Engine.cancel``."""
        waiting = self._waiting.get(request_id) or self._unguided.get(request_id)
        if waiting is None:
            return self._engine.cancel(request_id, index)
        gone = [own for own in waiting.indices if index is None or own == index]
        waiting.indices = [own for own in waiting.indices if own not in gone]
        if not waiting.indices:
            self._leave(request_id)
        queue_s = self._now() - waiting.since
        finish = wire.Finish("cancelled", 0, 0, queue_s, 0.0, 0.0)
        return [wire.Delta(request_id, own, [], None, finish) for own in gone]

    def let_go(self, request_id: str) -> None:
        """The engine has it no more."""
        adapter_id = self._taken.pop(request_id, None)
        if adapter_id is not None and self._store is not None:
            self._store.give_back(adapter_id)

    def load(self, message: wire.LoadAdapter) -> wire.AdapterLoaded | wire.AdapterRefused | None:
        """What is known at once; else ``turn`` will say it."""
        if self._store is None:
            return wire.AdapterRefused(message.adapter, TAKES_NONE)
        if len(self._store) >= MAX_KNOWN and not self._store.knows(message.adapter):
            return wire.AdapterRefused(message.adapter, f"this worker knows {MAX_KNOWN} adapters already")
        told = self._store.want(message.adapter, message.source, message.digest)
        return None if told is None else wire.AdapterLoaded(told.adapter_id, told.digest, told.rank, told.num_bytes)

    def unload(self, adapter_id: str) -> None:
        """Nobody new will ask for it."""
        if self._store is not None:
            self._store.forget(adapter_id)

    def turn(self) -> tuple[list[wire.AdapterLoaded | wire.AdapterRefused], list[wire.Failed]]:
        """What became of adapters since the last call, and the requests that fail; the others go in that can."""
        answers: list[wire.AdapterLoaded | wire.AdapterRefused] = []
        failed: list[wire.Failed] = []
        for request_id, guides in self._grammars.turn() if self._grammars is not None else ():
            waiting = self._unguided.pop(request_id)
            if isinstance(guides, Unguided):
                failed.append(wire.Failed(request_id, "invalid_request", str(guides)))
            elif (refused := self._add_guided(waiting.left, guides, waiting.since)) is not None:
                failed.append(refused)
        if self._store is None:
            return answers, failed
        told = self._store.turn()
        if isinstance(told, Refused):
            answers.append(wire.AdapterRefused(told.adapter_id, told.reason))
            lost = [id for id, each in self._waiting.items() if each.submit.adapter == told.adapter_id]
            for request_id in lost:
                self._leave(request_id)
                failed.append(wire.Failed(request_id, CODE, told.reason))
        elif told is not None:
            answers.append(wire.AdapterLoaded(told.adapter_id, told.digest, told.rank, told.num_bytes))
        for request_id, waiting in list(self._waiting.items()):
            if self._store.is_in_memory(waiting.submit.adapter):
                refused = self._board(waiting.left, waiting.guides, waiting.since)
                self._leave(request_id)
                if refused is not None:
                    failed.append(refused)
            elif self._store.lacks_room:
                break
        self._store.go_on()
        return answers, failed

    def stats(self, num_gateways: int) -> wire.Stats:
        """As ``Engine.stats``, with those who wait here and the adapters."""
        stats = self._engine.stats(num_gateways)
        if self._unguided:
            num_unguided = sum(len(waiting.indices) for waiting in self._unguided.values())
            stats = msgspec.structs.replace(stats, num_waiting=stats.num_waiting + num_unguided)
        if self._grammars is not None:
            stats = msgspec.structs.replace(stats, **self._grammars.counts())
        if self._store is None:
            return stats
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + sum(len(waiting.indices) for waiting in self._waiting.values()),
            num_adapters=self._store.num_in_memory,
        )

    def audit(self) -> None:
        """Raises AssertionError."""
        if self._store is not None:
            self._store.audit()
        for request_id in self._taken:
            assert self._engine.holds(request_id), "an adapter is kept for a request that has ended"

    def _board(self, submit: wire.Submit, guides: Mapping[int, Guide] | None, came_at: float) -> wire.Failed | None:
        assert self._store is not None
        adapter = self._store.take(submit.adapter)
        assert adapter is not None
        refused = self._engine.add(submit, adapter, guides, came_at)
        if refused is None:
            self._taken[submit.request_id] = submit.adapter
        else:
            self._store.give_back(submit.adapter)
        return refused

    def _leave(self, request_id: str) -> None:
        if self._unguided.pop(request_id, None) is not None:
            assert self._grammars is not None
            self._grammars.forget(request_id)
            return
        assert self._store is not None
        self._store.stop_waiting(self._waiting.pop(request_id).submit.adapter)
