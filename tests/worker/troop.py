"""Real ranks for tests: processes that compute one tiny model after another without being started anew.

python -m tests.worker.troop '{"name": "/directory of the models", ...}': the rank that is not 0, as a Duty says.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from policies.settings import Engine, WorkerSettings
from worker.loading import load_model
from worker.models import Layout, TorchOps
from worker.parallel.adapters import Shelf, read_beside
from worker.parallel.control import Begin, Control, Kept, Meet, Read, Refused, Step
from worker.parallel.duty import Duty
from worker.parallel.link import ProcessLink, store
from worker.parallel.plan import decoded
from worker.parallel.rank import Rank, layout_of
from worker.parallel.ranks import Ranks
from worker.parallel.runner import ParallelRunner
from worker.room import rooms_apart

NUM_BLOCKS = 64
LEAST_PART_TOKENS = 5
"""Few enough for most steps to be cut among the stages."""
CPU = torch.device("cpu")


class Memory(msgspec.Struct, frozen=True):
    """How much of it there is, on which rank: from its ``call``-th norm on, a pass of more tokens runs out of it."""

    rank: int = -1
    num_tokens: int = 0
    call: int = 0


class ScarceOps(TorchOps):
    """Looks into a file what memory there is."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank, self._call = path, rank, 0

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        post: torch.Tensor | None,
        pre: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """See Ops."""
        self._call = 0 if delta is None else self._call + 1
        memory = msgspec.json.decode(self._path.read_bytes(), type=Memory)
        if memory.rank == self._rank and memory.call == self._call and len(x) > memory.num_tokens:
            raise MemoryError
        return super().add_norm(x, delta, post, pre, eps)


Call = tuple[str, list[int], list[int], str]
"""What it is, of which ranks, from the one that sends on, and what of: a shape and a type."""


def note_calls(path: Path, rank: int) -> Callable[[], None]:
    """From now on each thing that this rank says to others is noted there, before it is said; until what is returned is
    called."""
    notes = path.open("a", buffering=1)
    plain = {name: getattr(dist, name) for name in ("all_reduce", "gather", "isend", "recv")}

    def noting(name: str, x: torch.Tensor, *others: Any, **said: Any) -> Any:
        if name == "isend":
            kind, ranks = "send", [rank, others[0]]
        elif name == "recv":
            kind, ranks = "send", [others[0], rank]
        else:
            kind, ranks = name, dist.get_process_group_ranks(said.get("group") or dist.group.WORLD)
        notes.write(msgspec.json.encode((kind, ranks, list(x.shape), str(x.dtype))).decode() + "\n")
        return plain[name](x, *others, **said)

    for name in plain:
        setattr(dist, name, partial(noting, name))

    def leave() -> None:
        notes.close()
        for name, function in plain.items():
            setattr(dist, name, function)

    return leave


class Troop:
    """All ranks of a layout, connected; the models are in numbered directories under ``directory``."""

    def __init__(self, layout: Layout, directory: Path, **engine: object) -> None:
        self.engine = Engine(
            device="cpu",
            dtype="float32",
            num_threads=1,
            tensor_parallel=layout.tensor,
            pipeline_parallel=layout.pipeline,
            **engine,  # type: ignore[arg-type]
        )
        self.layout, self.num_ranks = layout, layout.num_ranks
        self.lost: list[Exception] = []
        self._memory = directory / "memory.json"
        self.limit(Memory())
        self._directory = directory
        for path in directory.glob("calls*"):  # of another troop
            path.unlink()
        self._ranks = Ranks(layout.num_ranks, self._command)
        meeting = store(num_ranks=layout.num_ranks)
        self._ranks.tell(Meet(meeting.port))
        self._ranks.watch(self.lost.append)
        self._link = ProcessLink.between(layout, 0, CPU, meeting)
        self._leave = note_calls(directory / "calls0", 0)
        self._begun: Begin | None = None

    def runner(self, number: int, may_part: bool = False) -> ParallelRunner:
        """Of model ``number``; the one before is no more. ``may_part``: see Runner.load."""
        begin = Begin(number, NUM_BLOCKS if may_part else 0)
        if self._begun != begin:
            self._ranks.tell(begin)
            rank = rank_of(self._directory, begin, self.engine, 0, self._link)
            self._begun, self._runner = begin, ParallelRunner(rank, self._ranks, self._link)
        return self._runner

    def limit(self, memory: Memory) -> None:
        """From the next pass on."""
        self._memory.write_bytes(msgspec.json.encode(memory))

    def calls(self) -> list[list[Call]]:
        """Of each rank, all that it has said so far, in order."""
        decode = msgspec.json.Decoder(Call).decode
        paths = [self._directory / f"calls{rank}" for rank in range(self.num_ranks)]
        return [[decode(line) for line in path.read_text().splitlines()] for path in paths]

    def close(self) -> None:
        self._leave()
        self._ranks.leave()
        self._link.close()
        self._ranks.close()

    def _command(self, rank: int, *files: int) -> list[str]:
        settings = WorkerSettings("troop", "tiny", str(self._directory), "nowhere", engine=self.engine)
        duty = Duty(settings, rank, *files)
        return [sys.executable, "-m", "tests.worker.troop", msgspec.json.encode(duty).decode()]


def rank_of(directory: Path, begin: Begin, engine: Engine, rank: int, link: ProcessLink) -> Rank:
    """Any rank, of the model whose number stands for that of its blocks."""
    model = load_model(str(directory / str(begin.num_blocks)), engine, layout_of(engine), rank)
    num_windowed_blocks = begin.num_windowed_blocks if any(rooms_apart(model, engine)) else 0
    found = Rank(model, engine, NUM_BLOCKS, num_windowed_blocks, link, LEAST_PART_TOKENS)
    found.runner._ops = ScarceOps(directory / "memory.json", rank)
    return found


def main() -> None:
    """A rank that is not 0: loads what it is told to, steps as it is told, ends with rank 0."""
    duty = msgspec.json.decode(sys.argv[1], type=Duty)
    engine, directory = duty.settings.engine, Path(duty.settings.source)
    control = Control(socket.socket(fileno=duty.control))
    met = control.hear()
    assert isinstance(met, Meet)
    link = ProcessLink.between(layout_of(engine), duty.rank, CPU, store(met.port))
    note_calls(directory / f"calls{duty.rank}", duty.rank)
    rank: Rank | None = None
    shelf: Shelf | None = None

    def read(message: Read) -> Kept | Refused:
        assert shelf is not None
        return shelf.read(message)

    reading = Control(socket.socket(fileno=duty.reading))
    threading.Thread(target=read_beside, args=(reading, read), daemon=True).start()
    while (message := control.hear()) is not None:
        if isinstance(message, Begin):
            rank = rank_of(directory, message, engine, duty.rank, link)
            shelf = Shelf(rank.runner)
        else:
            assert isinstance(message, Step)
            assert rank is not None
            assert shelf is not None
            shelf.drop(message.gone)
            rank.step(*decoded(message.numbers, shelf.adapters), tell=control.tell)
    link.close()


if __name__ == "__main__":
    main()
