"""What the engine computes with where a model has several ranks: in place of worker.runner's Runner, on rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from policies.engine import Engine
from policies.settings import WorkerSettings
from worker.adapters import Adapter
from worker.attention.windowed import FULL, WINDOWED
from worker.budget import OutOfMemory
from worker.devices import own_turn
from worker.inputs import Span
from worker.loading import load_model
from worker.models import (
    Decoder,
    Layout,
    ModelError,
    Shard,
    path_of,
    read_architecture,
    refuse_encoder,
    refuse_foreign,
)
from worker.parallel.adapters import Shared
from worker.parallel.control import Begin, Loaded, Meet, Room, Step, Unable
from worker.parallel.duty import Duty
from worker.parallel.link import ProcessLink, store
from worker.parallel.plan import Companion, Copy, encoded
from worker.parallel.rank import Rank, layout_of
from worker.parallel.ranks import Lost, Ranks
from worker.room import larger, room, rooms_apart


class RanksParted(AssertionError):
    """A step broke off: ranks are in the middle of it, so no later one can be computed."""


class StepFailed(Exception):
    """Some rank could not compute its part of a step; all of them are ready for the next one."""


class ParallelRunner:
    """One model on several ranks; not safe for two threads."""

    writes, scores, scores_prompts = True, False, False
    pooling, num_dimensions = None, 0
    """Hidden states stay on their ranks: it gives no vectors."""

    def __init__(self, rank: Rank, ranks: Ranks, link: ProcessLink) -> None:
        self._rank, self._ranks, self._link = rank, ranks, link
        self._parted = False
        self._copies: list[Copy] = []
        """Since the last step."""
        runner = rank.runner
        self._adapters = Shared(runner, ranks)
        self.takes_adapters = runner.takes_adapters
        self.overlaps = False
        """Sampled tokens travel with the next plan, so they are read before it is made."""
        self.max_model_tokens = runner.max_model_tokens
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.vocab_size, self.eos_token_ids = runner.vocab_size, runner.eos_token_ids
        self.window, self.apart = runner.window, runner.apart
        self._known_companions = None if runner.apart is None else runner.apart.companions.copy()
        """By all ranks."""
        self.device, self.dtype = runner.device, runner.dtype

    @classmethod
    def load(cls, settings: WorkerSettings, lost: Lost) -> ParallelRunner:
        """As ``Runner.load``, with all ranks started and connected; ``lost``: see Ranks.watch. Raises ModelError and
        RankEnded, one sentence.
        """
        layout = layout_of(settings.engine)
        # Found once, so that nothing is downloaded several times at once.
        path = path_of(settings.source)
        refuse_encoder(path)
        refuse_foreign(path)
        architecture = read_architecture(path)
        for rank in range(layout.num_ranks):
            Shard.of(architecture, layout, rank)
        found = msgspec.structs.replace(settings, source=str(path))
        ranks = Ranks(layout.num_ranks, lambda rank, *files: Duty(found, rank, *files).command())
        try:
            with ranks.watched(lost):
                model = load_model(found.source, found.engine, layout, turn=own_turn(found))
            return cls._joined(model, found.engine, layout, ranks, lost)
        except BaseException:
            ranks.close()
            raise

    @classmethod
    def _joined(cls, model: Decoder, engine: Engine, layout: Layout, ranks: Ranks, lost: Lost) -> ParallelRunner:
        try:
            ranks.hear(Loaded)
            meeting = store(num_ranks=layout.num_ranks)
            ranks.tell(Meet(meeting.port))
            with ranks.watched(lost):
                link = ProcessLink.between(layout, 0, model.device, meeting)
                link.rehearse(engine.max_step_tokens, model.architecture.hidden_size, model.dtype)
            rooms = [Room(room(model, engine), rooms_apart(model, engine)), *ranks.hear(Room)]
            nums = larger(min(each.num_blocks for each in rooms), min(each.apart for each in rooms))
            ranks.tell(Begin(*nums))
            ranks.watch(lost)
        except (OSError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"the ranks of the model cannot be connected: {reason}") from None
        return cls(Rank(model, engine, *nums, link), ranks, link)

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return self._ranks.pids

    def forward(self, spans: Sequence[Span], sampled_before: Tensor | None = None) -> Tensor:
        """As ``Runner.forward``; all tokens are known.

        Raises OutOfMemory or StepFailed where some rank could not compute, and RanksParted where they have parted.
        """
        assert sampled_before is None
        copies, self._copies = self._copies, []
        try:
            self._ranks.tell(Step(encoded(copies, spans, self._new_companions()), self._adapters.gone()))
            made = self._rank.step(copies, spans)
            unable = self._ranks.unable()
        except Exception as error:
            self._parted = True
            if not isinstance(error, AssertionError):
                self._ranks.missed()
            raise RanksParted(f"a step on several ranks failed: {type(error).__name__}: {error}") from error
        if isinstance(made, Unable):
            unable.append(made)
        elif not unable:
            return made
        for each in unable:
            if not each.is_out_of_memory:
                raise StepFailed(each.reason)
        raise OutOfMemory(unable[0].reason)

    def load_adapter(self, adapter_id: str, source: str, max_bytes: int, digest: str = "") -> Adapter:
        """As ``Runner.load_adapter``, on all ranks; ``max_bytes``: of each. May run beside a step, one at a time."""
        return self._adapters.load(adapter_id, source, max_bytes, digest)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """None are asked for."""
        raise AssertionError("hidden states stay on their ranks")

    def take_hidden(self, spans: Sequence[Span]) -> Sequence[Tensor]:
        """None are asked for."""
        raise AssertionError("hidden states stay on their ranks")

    def maxima_of(self, logits: Tensor) -> Tensor | None:
        """As ``Runner.maxima_of``: no rank has all of them."""
        return None

    def copy_block(self, source: int, target: int) -> None:
        """Keys and values of all layers: before the next step, on all ranks."""
        self._copies.append((FULL, source, target))
        if self.apart is not None:
            # Until then their blocks may have others.
            own, others = self.apart.companions[[source, target]].tolist()
            self._copies.append((WINDOWED, own, others))

    def have_pages_ready(self) -> None:
        """The ranks have: their models are large, and what it costs is little beside them."""

    def _new_companions(self) -> list[Companion]:
        """What the other ranks do not know yet."""
        if self.apart is None:
            return []
        companions = self.apart.companions
        (changed,) = (companions != self._known_companions).nonzero()
        self._known_companions = companions.copy()
        return list(zip(changed.tolist(), companions[changed].tolist(), strict=True))

    def close(self) -> None:
        """Ends the other ranks."""
        self._ranks.leave()
        if not self._parted:
            self._link.close()
        self._ranks.close()
