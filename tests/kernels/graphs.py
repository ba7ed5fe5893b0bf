"""Recorded decodes say what computed ones say, whoever is in the batch and wherever their blocks lie."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.kernels.device import DEVICE
from tests.kernels.recordings import Forget, Refuse, Repeat
from tests.worker.pools import extents_of, slots_of
from worker.attention import FixingWindows, TwoPools
from worker.attention.base import Scores
from worker.attention.gathered import GatheredAttention
from worker.attention.paged import TritonAttention
from worker.attention.windowed import FULL, WINDOWED
from worker.graphs import StepGraphs
from worker.inputs import Span, lay_out, planned
from worker.kv_cache import KVCache, KVShape, KVType
from worker.models import Decoder, TorchOps
from worker.models.architecture import Architecture, Mixture, Rope
from worker.models.fused import WAYS, FusedDecoder
from worker.models.load import build_decoder
from worker.models.shard import Shard
from worker.models.sources import PlainSource
from worker.models.triton_ops import TritonOps
from worker.recording import CudaRecord

BLOCK_SIZE, MAX_TOKENS, NUM_BLOCKS, WINDOW = 16, 96, 64, 20
NUM_STEPS_BEFORE, NUM_MIXED_BEFORE = 1, 2
ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=128,
    norm_eps=1e-6,
    attention_scale=0.25,
    ropes=(Rope(rotary_dim=16, max_positions=128),),
    layer_ropes=(0, 0),
    windows=(0, WINDOW),
    tied=True,
)


@pytest.fixture(autouse=True)
def buckets_recur_soon(monkeypatch):
    """What is computed before a recording takes the interpreter as long as what is looked at behind it."""
    monkeypatch.setattr("worker.graphs.NUM_STEPS_BEFORE", NUM_STEPS_BEFORE)
    monkeypatch.setattr("worker.graphs.NUM_MIXED_BEFORE", NUM_MIXED_BEFORE)


@pytest.fixture(autouse=True)
def products_of_few_rows_are_not_tried(monkeypatch):
    """That takes longer than all that they are for here. See streamed.py."""
    monkeypatch.setattr("worker.models.fused.FusedDecoder.agrees", lambda self: True)


MIXTURE = replace(ARCHITECTURE, mixture=Mixture(6, 2, True), intermediate_size=40)


def decoder(architecture: Architecture = ARCHITECTURE) -> Decoder:
    generator = torch.Generator().manual_seed(3)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape).to(DEVICE)
        return (torch.randn(shape, generator=generator) * 0.2).to(DEVICE)

    return build_decoder(Shard.of(architecture), PlainSource(take), torch.float32, DEVICE, MAX_TOKENS)


class Pair:
    """The same model over two pools of the same content: one computes, one replays. ``apart``: this one's layer with a
    window has a pool of its own. ``few``: few rows are fused, too."""

    def __init__(self, record, max_sequences=5, max_verified=0, apart=False, architecture=ARCHITECTURE, few=False):
        self.model, self.plain_model = decoder(architecture), decoder(architecture)
        self.ops, self.apart = TritonOps(), apart
        for layer in self.plain_model.layers:
            layer.experts = layer.experts and replace(layer.experts, together=None)
        shape = KVShape(2, 2, 16)
        self.plain = KVCache(shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, DEVICE)
        self.graphed = KVCache(shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, DEVICE)
        if apart:
            nums, kv_type = (NUM_BLOCKS, NUM_BLOCKS), KVType(torch.float32)
            self.graphed = TwoPools(shape, ARCHITECTURE.windows, nums, BLOCK_SIZE, kv_type, DEVICE)
        for tensor, other in zip(self.tensors(self.plain), self.tensors(self.graphed), strict=True):
            other.copy_(tensor.normal_())
        scores = Scores(ARCHITECTURE.attention_scale, ARCHITECTURE.windows)
        self.plain_attention = GatheredAttention(self.plain, scores)
        heads, processors = ARCHITECTURE.num_heads, 4
        if apart:
            parts = zip(self.graphed.caches, ([0], [1]), strict=True)
            each = [TritonAttention(pool, scores.of(own), heads, num_processors=processors) for pool, own in parts]
            self.attention = FixingWindows(*each, self.graphed)
        else:
            self.attention = TritonAttention(self.graphed, scores, heads, num_processors=processors)
        ways = FusedDecoder.all_of(self.model, self.ops) if few else ()
        assert len(ways) == (len(WAYS) if few else 0)
        self.graphs = StepGraphs(
            self.model, self.ops, self.attention, MAX_TOKENS // BLOCK_SIZE, max_sequences, max_verified, record, ways
        )  # fmt: skip

    @staticmethod
    def tensors(cache):
        return [*cache.keys, *cache.values]

    def move(self, extents, chance):
        """What windows show lies elsewhere in their pool now; what they do not show lies nowhere."""
        firsts = [max(0, extent.start - WINDOW + 1) // BLOCK_SIZE for extent in extents]
        held = [extent.block_ids[first:] for extent, first in zip(extents, firsts, strict=True)]
        self.shown = torch.tensor([block_id for each in held for block_id in each])
        self.graphed.companions.fill_(-1)
        self.graphed.companions[self.shown] = torch.tensor(chance.sample(range(NUM_BLOCKS), len(self.shown)))
        for theirs, ours in self.blocks(WINDOWED):
            ours.fill_(float("nan"))
            ours[:, self.graphed.companions[self.shown]] = theirs[:, self.shown]

    def blocks(self, layer):
        """Of keys and of values, on both sides: [num_kv_heads, NUM_BLOCKS, BLOCK_SIZE, head_dim]."""
        for pair in ((self.plain.keys, self.graphed.keys), (self.plain.values, self.graphed.values)):
            yield [each[layer].unflatten(1, (NUM_BLOCKS, BLOCK_SIZE)) for each in pair]

    def assert_same(self):
        """What is in both sides' pools."""
        for layer in (FULL, WINDOWED):
            for theirs, ours in self.blocks(layer):
                if self.apart and layer == WINDOWED:
                    theirs, ours = theirs[:, self.shown], ours[:, self.graphed.companions[self.shown]]
                torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-5)

    def compute(self, model, attention, laid, ops, before):
        inputs, plan = planned(laid, attention, DEVICE, before)
        return model.forward(inputs.token_ids, inputs.positions, inputs.rows, plan, ops)

    @torch.inference_mode()
    def step(self, lengths, seed, drafts=None, chunks=()):
        """One decode a length, with so many tokens of a draft each, and among them chunks (start, tokens, logits?) of
        prompts; what each side says. The second is None where there was no graph."""
        chance = random.Random(seed)
        counts = [1 + num for num in drafts or [0] * len(lengths)]
        each = [(length, count, count) for length, count in zip(lengths, counts, strict=True)]
        each += [(start, count, int(is_last)) for start, count, is_last in chunks]
        if chunks:
            chance.shuffle(each)
        extents, _ = extents_of([(*span[:2], False) for span in each], BLOCK_SIZE, chance, NUM_BLOCKS)
        # Of some the last token is the one that was sampled a step ago, in a batch of another order.
        before = torch.tensor([chance.randrange(61) for _ in extents], device=DEVICE)
        before[0] = -1
        spans = []
        for at, (extent, (_, count, num_logits)) in enumerate(zip(extents, each, strict=True)):
            source = len(extents) - 1 - at if count == 1 and chance.random() < 0.7 else -1
            token_ids = [chance.randrange(61) for _ in range(count)]
            spans.append(Span(token_ids, extent.start, extent.block_ids, num_logits, source))
        laid = lay_out(spans, BLOCK_SIZE)
        if self.apart:
            self.move(extents, chance)
        assert laid.slots.tolist() == slots_of(extents, BLOCK_SIZE).tolist()
        expected = self.compute(self.plain_model, self.plain_attention, laid, TorchOps(), before)
        got = self.graphs.run(laid, before)
        if got is None:
            self.compute(self.model, self.attention, laid, self.ops, before)
        self.assert_same()
        return expected, got


def record():
    return Repeat() if DEVICE.type == "cpu" else CudaRecord()


def test_a_bucket_is_recorded_once_it_recurs_and_says_the_same():
    pair = Pair(record())
    chance = random.Random(1)
    for step in range(NUM_STEPS_BEFORE + 3):
        expected, got = pair.step([chance.randrange(80) for _ in range(3)], step)
        assert (got is None) == (step < NUM_STEPS_BEFORE)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [(4, 1, 4)]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device says itself what it takes")
@pytest.mark.parametrize("took_s", [(1.0, 3.0, 2.0), (3.0, 2.0, 1.0)])
def test_of_several_ways_to_compute_few_rows_the_fastest_is_kept(took_s):
    """Of the way in between, see below."""
    record = Repeat(*took_s)
    pair = Pair(record, few=True, apart=True)
    chance = random.Random(4)
    for step in range(NUM_STEPS_BEFORE + 2):
        expected, got = pair.step([chance.randrange(90) for _ in range(chance.choice([3, 4]))], step)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        if step > NUM_STEPS_BEFORE:
            assert record.last == took_s.index(min(took_s))
    assert record.num_replays == 3 + 3 + 1  # the first step by each way, twice, and the step behind it


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device counts no calls")
@pytest.mark.parametrize(
    ("owner", "name", "nth"), [("model", "forward", NUM_STEPS_BEFORE + 3), ("attention", "fixed", 1)]
)
def test_a_first_step_without_memory_is_computed_and_its_graph_tried_again_later(caplog, monkeypatch, owner, name, nth):
    """The model is called for what comes before, for the recording, for its replay, and for the step as ever."""
    monkeypatch.setattr("worker.graphs.NUM_STEPS_WITHOUT", 2)
    pair = Pair(Repeat())
    usual, calls = getattr(getattr(pair, owner), name), []

    def scarce(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth:
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        return usual(*args, **kwargs)

    monkeypatch.setattr(getattr(pair, owner), name, scarce)
    graphed = []
    for step in range(2 * NUM_STEPS_BEFORE + 5):
        expected, got = pair.step([5], step)
        graphed.append(got is not None)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert graphed == [step >= 2 * NUM_STEPS_BEFORE + 3 for step in range(len(graphed))]
    (record,) = caplog.records
    assert record.message == "steps of 1 rows go without a graph for now: CUDA out of memory"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device refuses nothing here")
def test_a_way_that_cannot_be_recorded_is_left_out_and_the_others_are_tried(caplog):
    pair = Pair(Refuse(OutOfResources(1, 0, "shared memory"), 1, (3.0, 1.0, 2.0)), few=True)
    for step in range(NUM_STEPS_BEFORE + 2):
        expected, got = pair.step([20], step)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.tried_s == {(1, 1, 1): {"as ever": 3.0, "fused, 3 at once": 2.0}}
    assert "steps of 1 rows, fused, 1 at once: out of resource" in caplog.text


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device does not forget")
def test_a_graph_that_says_something_else_is_found_at_its_first_step(caplog):
    pair = Pair(Forget({1}, 3.0, 1.0, 2.0), few=True)
    for step in range(NUM_STEPS_BEFORE + 2):
        expected, got = pair.step([20], step)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.tried_s == {(1, 1, 1): {"as ever": 3.0, "fused, 3 at once": 2.0}}
    (record,) = caplog.records
    assert record.message == "steps of 1 rows, fused, 1 at once, say something else as a graph, and go without"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device does not forget")
def test_where_no_graph_says_the_same_steps_are_computed_and_leave_what_they_always_leave(caplog):
    pair = Pair(Forget({1}))
    for step in range(NUM_STEPS_BEFORE + NUM_MIXED_BEFORE + 6):
        chunks = [(16, 13, True)] if step % 2 else []
        expected, got = pair.step([20, 7, 30], step, chunks=chunks)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [(4, 1, 4)]
    (record,) = caplog.records
    assert record.message.startswith("steps of 16 rows with chunks and 5 logits, as ever, say something else")


def test_few_rows_and_drafts_of_few_are_replayed_as_they_are_fastest():
    pair = Pair(record() if DEVICE.type != "cpu" else Repeat(*(3.0, 1.0, 2.0) * 9), max_verified=8, few=True)
    chance = random.Random(5)
    for step in range(2 * NUM_STEPS_BEFORE + 4):
        drafts = [[0], [2, 0]][step % 2]
        expected, got = pair.step([chance.randrange(80) for _ in drafts], step, drafts)
        assert (got is None) == (step < 2 * NUM_STEPS_BEFORE)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [(1, 1, 1), (4, 4, 4)]


def test_sizes_of_one_bucket_share_its_recording_and_padding_is_never_seen():
    pair = Pair(record(), apart=True)
    chance = random.Random(2)
    for step in range(NUM_STEPS_BEFORE + 4):
        num = chance.choice([3, 4])
        expected, got = pair.step([chance.randrange(90) for _ in range(num)], step)
        if got is not None:
            assert got.shape == (num, 61)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [(4, 1, 4)]


def test_experts_are_recorded_whoever_is_chosen(monkeypatch):
    """What fills up a bucket goes through experts as well, beside rows that are somebody's."""
    monkeypatch.setattr("worker.models.load.goes_together", lambda device: True)
    pair = Pair(record(), architecture=MIXTURE)
    assert all(layer.experts.together is not None for layer in pair.model.layers)
    chance = random.Random(6)
    for step in range(NUM_STEPS_BEFORE + 4):
        expected, got = pair.step([chance.randrange(90) for _ in range(chance.choice([3, 4]))], step)
        assert (got is None) == (step < NUM_STEPS_BEFORE)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [(4, 1, 4)]


def test_drafts_to_verify_are_replayed_too_whoever_has_one():
    pair = Pair(record(), max_verified=8, apart=True)
    chance = random.Random(3)
    for step in range(NUM_STEPS_BEFORE + 3):
        # Of one bucket, its rows dealt out otherwise each time.
        drafts = [[0, 3, 1], [2, 0, 2], [3, 3]][step % 3]
        expected, got = pair.step([chance.randrange(80) for _ in drafts], step, drafts)
        assert (got is None) == (step < NUM_STEPS_BEFORE)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [(8, 4, 8)]


@pytest.mark.parametrize("apart", [False, True])
def test_chunks_of_prompts_are_replayed_beside_decodes_and_drafts(apart):
    pair = Pair(record(), max_sequences=6, max_verified=8, apart=apart)
    chance = random.Random(7)
    for step in range(NUM_MIXED_BEFORE + 5):
        # Of one bucket, whoever is in it.
        lengths, drafts, chunks = [
            ([40, 3], [0, 0], [(0, 20, True)]),
            ([70, 9, 0], [0, 3, 0], [(16, 13, False), (0, 11, True)]),
            ([90, 80, 3, 4], [0, 0, 0, 0], [(0, 14, False)]),
            ([5], [6], [(33, 17, True)]),
            ([], [], [(64, 30, False)]),
        ][step % 5]
        lengths = [max(0, length - chance.randrange(3)) for length in lengths]
        expected, got = pair.step(lengths, step, drafts, chunks)
        assert (got is None) == (step < NUM_MIXED_BEFORE)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [(32, 0, 8)]


def test_a_chunk_that_wants_nothing_is_replayed_too_and_experts_are_recorded_beside_it(monkeypatch):
    monkeypatch.setattr("worker.models.load.goes_together", lambda device: True)
    pair = Pair(record(), architecture=MIXTURE)
    for step in range(NUM_MIXED_BEFORE + 3):
        expected, got = pair.step([30, 7][: step % 3], step, chunks=[(0, 9, step % 2)])
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [(16, 0, 5)]


@torch.inference_mode()
def test_too_many_sequences_and_long_chunks_are_not_replayed():
    pair = Pair(record())
    pair.attention.max_mixed_tokens = 30
    for _ in range(2 * NUM_MIXED_BEFORE):
        chunk = lay_out([Span([1] * 31, 0, [4, 5], 1)], BLOCK_SIZE)
        assert pair.graphs.run(chunk) is None
        too_many = lay_out([Span([1], 0, [block], block % 2) for block in range(6)], BLOCK_SIZE)
        assert pair.graphs.run(too_many) is None
    assert pair.graphs.recorded == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("not permitted when stream is capturing\nand more"), "not permitted when stream is capturing"),
        (OutOfResources(200_000, 101_376, "shared memory"), "out of resource: shared memory"),
    ],
    ids=["torch", "Triton"],
)
def test_a_step_that_cannot_be_recorded_is_computed_and_no_other_is_tried(caplog, error, said):
    pair = Pair(Refuse(error, None))
    for step in range(4 * NUM_STEPS_BEFORE):
        _, got = pair.step([5, 7][: 1 + step % 2], step)
        assert got is None
    (record,) = caplog.records
    assert record.message.startswith(f"steps of 1 rows go without a graph: {said}")


def test_a_step_for_whose_graph_there_is_no_memory_is_tried_again_later(caplog, monkeypatch):
    monkeypatch.setattr("worker.graphs.NUM_STEPS_WITHOUT", 3)

    pair = Pair(Refuse(torch.OutOfMemoryError("CUDA out of memory\nand more")))
    graphed = [pair.step([5], step)[1] is not None for step in range(2 * NUM_STEPS_BEFORE + 6)]
    assert graphed == [step >= 2 * NUM_STEPS_BEFORE + 4 for step in range(len(graphed))]
    (record,) = caplog.records
    assert record.message == "steps of 1 rows go without a graph for now: CUDA out of memory"


@pytest.mark.skipif(DEVICE.type == "cpu", reason="recording is the device's")
def test_a_recording_waits_for_nobody():
    pair = Pair(CudaRecord())
    for step in range(NUM_STEPS_BEFORE + 3):
        pair.step([5, 9], step)
    torch.cuda.synchronize()
