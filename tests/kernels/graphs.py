"""Recorded decodes say what computed ones say, whoever is in the batch and wherever their blocks lie."""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.worker.pools import extents_of, slots_of
from worker.attention.base import Scores
from worker.attention.gathered import GatheredAttention
from worker.attention.paged import TritonAttention
from worker.graphs import NUM_STEPS_BEFORE, CudaRecord, DecodeGraphs
from worker.inputs import Span, flatten
from worker.kv_cache import KVCache, KVShape
from worker.models import Decoder, TorchOps
from worker.models.architecture import Architecture, Rope
from worker.models.load import build_decoder
from worker.models.shard import Shard
from worker.models.sources import PlainSource
from worker.models.triton_ops import TritonOps

BLOCK_SIZE, MAX_TOKENS, NUM_BLOCKS = 16, 96, 64
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
    windows=(0, 20),
    tied=True,
)


class Repeat:
    """What a device records, the CPU does again."""

    def __init__(self):
        self.num_replays = 0

    def __call__(self, run):
        run()

        def replay():
            self.num_replays += 1
            run()

        return replay


class Refuse:
    def __call__(self, run):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def decoder() -> Decoder:
    generator = torch.Generator().manual_seed(3)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape).to(DEVICE)
        return (torch.randn(shape, generator=generator) * 0.2).to(DEVICE)

    return build_decoder(Shard.of(ARCHITECTURE), PlainSource(take), torch.float32, DEVICE, MAX_TOKENS)


class Pair:
    """The same model over two pools of the same content: one computes, one replays."""

    def __init__(self, record, max_sequences=5):
        self.model, self.ops = decoder(), TritonOps()
        shape = KVShape(2, 2, 16)
        self.plain, self.graphed = (KVCache(shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, DEVICE) for _ in range(2))
        for tensor, other in zip(self.tensors(self.plain), self.tensors(self.graphed), strict=True):
            other.copy_(tensor.normal_())
        scores = Scores(ARCHITECTURE.attention_scale, ARCHITECTURE.windows)
        self.plain_attention = GatheredAttention(self.plain, scores)
        self.attention = attention = TritonAttention(self.graphed, scores, ARCHITECTURE.num_heads, num_processors=8)
        self.graphs = DecodeGraphs(self.model, self.ops, attention, MAX_TOKENS, max_sequences, record)

    @staticmethod
    def tensors(cache):
        return [*cache.keys, *cache.values]

    def compute(self, attention, inputs, ops):
        plan = attention.plan(inputs.extents, inputs.slots)
        return self.model.forward(inputs.token_ids, inputs.positions, inputs.rows, plan, ops)

    @torch.inference_mode()
    def step(self, lengths, seed):
        """One decode a length; what each side says. The second is None where there was no graph."""
        chance = random.Random(seed)
        extents, _ = extents_of([(length, 1, False) for length in lengths], BLOCK_SIZE, chance, NUM_BLOCKS)
        spans = [Span([chance.randrange(61)], extent.start, extent.block_ids, 1) for extent in extents]
        inputs = flatten(spans, BLOCK_SIZE, DEVICE)
        assert inputs.slots.tolist() == slots_of(extents, BLOCK_SIZE).tolist()
        expected = self.compute(self.plain_attention, inputs, TorchOps())
        got = self.graphs.run(inputs)
        if got is None:
            self.compute(self.attention, inputs, self.ops)
        for tensor, other in zip(self.tensors(self.plain), self.tensors(self.graphed), strict=True):
            torch.testing.assert_close(tensor, other, atol=2e-5, rtol=2e-5)
        return expected, got


def record():
    return Repeat() if DEVICE.type == "cpu" else CudaRecord()


def test_a_bucket_is_recorded_once_it_recurs_and_says_the_same():
    pair = Pair(record())
    chance = random.Random(1)
    for step in range(NUM_STEPS_BEFORE + 6):
        expected, got = pair.step([chance.randrange(80) for _ in range(3)], step)
        assert (got is None) == (step < NUM_STEPS_BEFORE)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [4]


def test_sizes_of_one_bucket_share_its_recording_and_padding_is_never_seen():
    pair = Pair(record())
    chance = random.Random(2)
    for step in range(NUM_STEPS_BEFORE + 8):
        num = chance.choice([3, 4])
        expected, got = pair.step([chance.randrange(90) for _ in range(num)], step)
        if got is not None:
            assert got.shape == (num, 61)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert pair.graphs.recorded == [4]


@torch.inference_mode()
def test_whatever_is_no_pure_decode_is_not_replayed():
    pair = Pair(record())
    for _ in range(2 * NUM_STEPS_BEFORE):
        chunk = flatten([Span([1, 2, 3], 0, [4], 1)], BLOCK_SIZE, DEVICE)
        assert pair.graphs.run(chunk) is None
        unsampled = flatten([Span([1], 0, [4], 0)], BLOCK_SIZE, DEVICE)
        assert pair.graphs.run(unsampled) is None
        too_many = flatten([Span([1], 0, [block], 1) for block in range(5)], BLOCK_SIZE, DEVICE)
        assert pair.graphs.run(too_many) is None
    assert pair.graphs.recorded == []


def test_a_step_that_cannot_be_recorded_is_computed(caplog):
    pair = Pair(Refuse())
    for step in range(2 * NUM_STEPS_BEFORE):
        _, got = pair.step([5], step)
        assert got is None
    assert [record.message for record in caplog.records] == [
        "steps of 1 decodes go without a graph: operation not permitted when stream is capturing"
    ]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="recording is the device's")
def test_a_recording_waits_for_nobody():
    pair = Pair(CudaRecord())
    for step in range(NUM_STEPS_BEFORE + 3):
        pair.step([5, 9], step)
    torch.cuda.synchronize()
