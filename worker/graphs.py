"""Steps as CUDA graphs, of decodes, of drafts to verify, and of these beside short chunks of prompts: launched as one,
where launching each kernel would take the host longer than the device takes to compute it.

A graph is recorded for a bucket, so many rows and so many of them of one sequence or so many logits, once that bucket
has been met a few times, between two steps, so a worker serves from its first second and the sizes that matter come
first. It reads and writes the same memory each time; a step is copied in, once, and replayed, and its logits lie where
the last ones lay. Where a bucket's rows are few there are other ways to compute them (``worker.models.fused``): all are
recorded, and the one that the device is through with first is kept. The first step of a bucket is computed both ways,
and a graph that says something else than the step as ever is not used again. Whatever else there is, or has no graph
yet, is computed as ever.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from policies import settings
from worker.attention import Backend, Fixed, Fixing, Plan, Shape
from worker.device import is_out_of_memory
from worker.inputs import Laid, fill_in, lay_out, planned
from worker.models import Decoder, Ops
from worker.recording import CudaRecord, Record, Replay
from worker.transfer import send_into

NUM_STEPS_BEFORE = 4
"""Of a bucket, computed as ever before it is worth a graph."""
NUM_MIXED_BEFORE = 10
"""The same of steps with chunks of prompts, of which there are many sizes: recording one takes as long as so many of
its replays save."""
NUM_STEPS_WITHOUT = 1000
"""Of a bucket for which there was no memory, before it is tried again."""
_SIZES = (1, 2, 4, 8, 12, *range(16, 257, 16), *range(288, 1025, 32))
"""Rows of steps of decodes."""
_VERIFIED = (2, 4, 8, 16, 32, 64, 128, 256)
"""Of steps with drafts: fewer, as each is one for every size of draft as well."""
_EACH = (4, 16, 64)
"""Rows of one sequence that has a draft."""
_MIXED = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
"""Rows of steps with chunks of prompts; of longer ones the device has more to do than the host."""
_LOGITS = (8, 32, 128, 256)
"""That these may want; or as many as steps of decodes."""
FARTHEST = 0.5
"""Of logits that a graph says from those of the same step as ever, in standard deviations of these: rounding leaves
some hundredths, an expert chosen otherwise some tenths, and logits that have nothing to do with each other lie 1.4
apart."""
_WIDE = 5
"""Numbers of 64 bits a row: token, position and slot, and where it comes from if it is not known yet."""

_NOBODYS = lay_out((), block_size=1)

log = logging.getLogger(__name__)


class Bucket(NamedTuple):
    """Steps that one graph serves."""

    num_rows: int
    each: int
    """Rows of one sequence, at most; 0: any."""
    num_logits: int
    """At most."""

    @property
    def has_chunks(self) -> bool:
        return not self.each

    def __str__(self) -> str:
        return f"{self.num_rows} rows" + (f" with chunks and {self.num_logits} logits" if self.has_chunks else "")


class FewRows(Protocol):
    """A FusedDecoder."""

    @property
    def rows(self) -> Sequence[int]: ...

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Plan, logits: Tensor) -> None: ...


@dataclass(slots=True)
class _Recording:
    wide: Tensor
    """[_WIDE, rows] i64"""
    plan: Fixed
    replays: dict[str, Replay]
    """By the way that it is computed in."""


class StepGraphs:
    """For one model; ``run`` in place of its ``forward``."""

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        attention: Fixing,
        max_blocks: int,
        max_sequences: int,
        max_verified: int,
        record: Record,
        few: Sequence[FewRows] = (),
    ) -> None:
        """``max_blocks``: of one sequence. ``max_verified``: rows of a step that has drafts; 0: none has. ``few``:
        other ways to compute so few rows."""
        self._model, self._ops, self._attention, self._record = model, ops, attention, record
        self._few = few
        self._max_sequences = max_sequences
        most_decoded = min(max_sequences, _SIZES[-1])
        self._decoded = [*(size for size in _SIZES if size < most_decoded), most_decoded]
        self._verified = [size for size in _VERIFIED if size <= max_verified]
        # One for all: each is read before the next step is replayed.
        largest, device = max(self._decoded + self._verified), model.device
        self._logits = torch.empty((largest, model.architecture.vocab_size), device=device)
        self._num_logits = [*(num for num in _LOGITS if num < largest), largest]
        widest = [Bucket(largest, 1, largest), *(Bucket(size, 0, self._num_logits[-1]) for size in _MIXED)]
        num_blocks = max_sequences * max_blocks
        most = max(_num_wide(each) + attention.num_places(self._shape(each), num_blocks) for each in widest)
        self._step = torch.zeros(most, dtype=torch.int32, device=device)
        self._num_met: Counter[Bucket] = Counter()
        self._recordings: dict[Bucket, _Recording] = {}
        self.tried_s: dict[Bucket, dict[str, float]] = {}
        """What a step took in each of several ways."""
        self._gives_up: set[bool] = set()
        """Kinds of buckets, with chunks or without, of which one could not be recorded."""

    @classmethod
    def of(
        cls, engine: settings.Engine, model: Decoder, attention: Backend, ops: Ops, max_model_tokens: int
    ) -> StepGraphs | None:
        """Where the device is CUDA, its attention and its experts can be recorded, and no other process is waited for
        in between."""
        if model.device.type != "cuda" or not engine.cuda_graphs or model.shard.layout.num_ranks > 1:
            return None
        if any(layer.experts is not None and layer.experts.together is None for layer in model.layers):
            return None  # which tokens an expert has is read by the host
        if not isinstance(attention, Fixing):
            return None
        speculation, most = engine.speculation, engine.max_sequences
        max_verified = most * (1 + speculation.max_draft_tokens) if speculation.enabled else 0
        max_blocks = 1 + max_model_tokens // engine.block_size
        # Imported here: there is Triton, as its attention is.
        from worker.models.fused import FusedDecoder

        few = () if engine.deterministic else FusedDecoder.all_of(model, ops)
        return cls(model, ops, attention, max_blocks, most, max_verified, CudaRecord(), few)

    @property
    def recorded(self) -> list[Bucket]:
        """The buckets that have a graph."""
        return sorted(self._recordings)

    def run(self, laid: Laid, sampled_before: Tensor | None = None) -> Tensor | None:
        """[num_logits, vocab_size] f32, until the next call; None where there is no graph for such a step.
        ``sampled_before`` as for ``Laid.sent``."""
        bucket = self._bucket(laid)
        if bucket is None:
            return None
        recording = self._recordings.get(bucket)
        if recording is None:
            return self._begin(bucket, laid, sampled_before) if self._is_due(bucket, laid) else None
        self._lay_in(laid, bucket, recording, sampled_before)
        (replay,) = recording.replays.values()
        replay()
        return self._logits[: len(laid.rows)]

    def _is_due(self, bucket: Bucket, laid: Laid) -> bool:
        """To be recorded, with this step as its first. One that wants no logits would show nothing."""
        self._num_met[bucket] += 1
        num_before = NUM_MIXED_BEFORE if bucket.has_chunks else NUM_STEPS_BEFORE
        is_known = self._num_met[bucket] > num_before and len(laid.rows) > 0
        return is_known and bucket.has_chunks not in self._gives_up

    def _begin(self, bucket: Bucket, laid: Laid, sampled_before: Tensor | None) -> Tensor | None:
        """A bucket's first step, see ``_try``. None where it could not be recorded, or there was no memory for it: then
        it is tried again later."""
        try:
            recording = self._make(bucket)
            return None if recording is None else self._try(bucket, recording, laid, sampled_before)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).partition("\n")[0]
        # Nothing of the recording is left by now, so the step as ever may have its memory.
        self._num_met[bucket] = -NUM_STEPS_WITHOUT
        log.warning("steps of %s go without a graph for now: %s", bucket, said)
        return None

    def _try(self, bucket: Bucket, recording: _Recording, laid: Laid, sampled_before: Tensor | None) -> Tensor:
        """A bucket's first step, by every way that it could be recorded in and as ever, which leaves its keys and
        values; what agrees and is fastest is kept."""
        self._lay_in(laid, bucket, recording, sampled_before)
        said: dict[str, Tensor] = {}
        logits = self._logits[: len(laid.rows)]
        for way, replay in recording.replays.items():
            logits.fill_(math.nan)
            replay()
            said[way] = logits.clone() if len(recording.replays) > 1 else logits
        inputs, plan = planned(laid, self._attention, self._model.device, sampled_before)
        expected = self._model.forward(inputs.token_ids, inputs.positions, inputs.rows, plan, self._ops)
        for way, got in said.items():
            if not _agree(got, expected):
                log.warning("steps of %s, %s, say something else as a graph, and go without", bucket, way)
                del recording.replays[way]
        if not recording.replays:
            self._gives_up.add(bucket.has_chunks)
            return expected
        if len(recording.replays) > 1:
            self._keep_fastest(bucket, recording)
        self._recordings[bucket] = recording
        return expected

    def _lay_in(self, laid: Laid, bucket: Bucket, recording: _Recording, sampled_before: Tensor | None) -> None:
        self._put(laid, bucket, recording.plan)
        num_unknown = len(laid.unknown)
        if num_unknown:
            token_ids, _, _, unknown, sources = recording.wide
            fill_in(token_ids, unknown[:num_unknown], sources[:num_unknown], sampled_before)

    def _bucket(self, laid: Laid) -> Bucket | None:
        num, num_extents = len(laid.token_ids), len(laid.extents)
        if num_extents > self._max_sequences:
            return None
        if len(laid.rows) < num:
            return self._mixed(num, len(laid.rows))
        sizes, each = self._decoded, 1
        if num > num_extents:
            most = max(extent.num_tokens for extent in laid.extents)
            sizes, each = self._verified, next((each for each in _EACH if each >= most), 0)
        size = next((size for size in sizes if size >= num), 0)
        return Bucket(size, each, size) if size and each else None

    def _mixed(self, num: int, num_logits: int) -> Bucket | None:
        if num > self._attention.max_mixed_tokens:
            return None
        most = next((most for most in self._num_logits if most >= num_logits), 0)
        # More than have logits, or the model would take each row for one of these.
        size = next((size for size in _MIXED if size >= num and size > most), 0)
        return Bucket(size, 0, most) if size and most else None

    def _shape(self, bucket: Bucket) -> Shape:
        num_rows, each, _ = bucket
        # There may be as many decodes as rows.
        return Shape(num_rows, num_rows if each else min(num_rows, self._max_sequences), each)

    def _put(self, laid: Laid, bucket: Bucket, plan: Fixed) -> None:
        """In its places; rows that it does not have are padding."""
        num_rows, num, num_unknown = bucket.num_rows, len(laid.token_ids), len(laid.unknown)
        numbers = np.zeros(_num_wide(bucket) // 2, dtype=np.int64)
        wide, rows = numbers[: _WIDE * num_rows].reshape(_WIDE, num_rows), numbers[_WIDE * num_rows :]
        wide[0, :num], wide[1, :num] = laid.token_ids, laid.positions
        wide[2, :num], wide[2, num:] = laid.slots, -1
        wide[3, :num_unknown], wide[4, :num_unknown] = laid.unknown, laid.sources
        if bucket.has_chunks:
            rows[: len(laid.rows)] = laid.rows
        step = np.concatenate((numbers.view(np.int32), *plan.numbers(laid.extents)))
        send_into(self._step[: len(step)], step)

    def _make(self, bucket: Bucket) -> _Recording | None:
        """None where it cannot be recorded; serving goes on without, and nothing more of its kind is recorded. Raises
        what ``is_out_of_memory``."""
        num_rows, num_wide = bucket.num_rows, _num_wide(bucket)
        numbers = self._step[:num_wide].view(torch.int64)
        wide, rows = numbers[: _WIDE * num_rows].view(_WIDE, num_rows), numbers[_WIDE * num_rows :]
        plan = self._attention.fixed(self._shape(bucket), wide[2], self._step[num_wide:])
        if not bucket.has_chunks:
            rows = torch.arange(num_rows, device=self._model.device)
        self._put(_NOBODYS, bucket, plan)  # for the first runs

        logits = self._logits[: bucket.num_logits]

        def run() -> None:
            logits.copy_(self._model.forward(wide[0], wide[1], rows, plan, self._ops))

        def run_few(few: FewRows) -> None:
            few.forward(wide[0], wide[1], plan, logits)

        try:
            replay = self._record(run)
        except AssertionError:
            raise
        except Exception as error:  # Triton's own are no RuntimeErrors, and would come again at each such step
            if is_out_of_memory(error):
                raise
            self._gives_up.add(bucket.has_chunks)
            log.warning("steps of %s go without a graph: %s", bucket, str(error).partition("\n")[0])
            return None
        replays = {"as ever": replay}
        for few in self._few:
            if not bucket.has_chunks and num_rows in few.rows:
                try:
                    replays[str(few)] = self._record(partial(run_few, few))
                except Exception as error:
                    log.warning("steps of %s, %s: %s", bucket, few, str(error).partition("\n")[0])
        return _Recording(wide, plan, replays)

    def _keep_fastest(self, bucket: Bucket, recording: _Recording) -> None:
        """Of several recordings, by a step that lies ready: to compute it more than once changes nothing."""
        replays = recording.replays
        took_s = self.tried_s[bucket] = {way: self._record.seconds(replay) for way, replay in replays.items()}
        log.info("seconds of a step of %s: %s", bucket, took_s)
        fastest = min(took_s, key=lambda way: took_s[way])
        recording.replays = {fastest: replays[fastest]}


def _agree(said: Tensor, expected: Tensor) -> bool:
    """Every row of one with that of the other ([rows, vocab_size] f32), but for rows that are no numbers as ever
    either."""
    for got, usual in zip(torch.split(said, 16), torch.split(expected, 16), strict=True):
        apart, wide = (got - usual).square().mean(dim=-1).sqrt(), usual.std(dim=-1)
        if not bool(((apart <= FARTHEST * wide) | ~usual.isfinite().all(dim=-1)).all()):
            return False
    return True


def _num_wide(bucket: Bucket) -> int:
    """Numbers of 32 bits, in front of what attention wants: of each row, and where there are chunks of each row whose
    logits are wanted."""
    return 2 * (_WIDE * bucket.num_rows + (bucket.num_logits if bucket.has_chunks else 0))
