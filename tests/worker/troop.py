"""Real ranks for tests: processes that compute one tiny model after another without being started anew.

python -m tests.worker.troop '{"name": "/directory of the models", ...}': the rank that is not 0, as a Duty says.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import msgspec
import torch

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
        self._ranks = Ranks(layout.num_ranks, self._command)
        meeting = store(num_ranks=layout.num_ranks)
        self._ranks.tell(Meet(meeting.port))
        self._ranks.watch(self.lost.append)
        self._link = ProcessLink.between(layout, 0, CPU, meeting)
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

    def close(self) -> None:
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
