"""engine.kv_dtype: what a model says over KV in few bits, what it takes in memory, and what there is none of."""

from __future__ import annotations

import itertools

import pytest
import torch

from policies.settings import Engine
from tests.worker.tiny import checkpoint
from worker.inputs import Span
from worker.models import ModelError
from worker.room import kv_type_of
from worker.runner import Runner

TOLERANCE_NATS = 0.05
"""Between the distributions over the next token, the mean over tokens. The model's weights are larger than a trained
one's, so that attention is far from uniform: to compute in bfloat16 takes 0.015 of it alone, int8 KV 0.016.
"""
SAME_NATS = 1e-5
"""Between ways to compute the same in float32."""
SIZES = {"hidden_size": 192, "num_attention_heads": 6, "num_hidden_layers": 3, "head_dim": 32}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    checkpoint(path, "LlamaForCausalLM", **SIZES)
    return str(path)


def runner_of(directory, **changes):
    asked = {"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 8, "max_kv_bytes": 8 << 20}
    return Runner.load(directory, Engine(**{**asked, **changes}))


def distributions(runner):
    """After each token of a text that comes in a chunk, another one, and single tokens: log probabilities."""
    source = torch.Generator().manual_seed(4)
    ids = torch.randint(3, runner.vocab_size, (90,), generator=source).tolist()
    table = [7, 3, *range(20, 9, -1)]
    cuts = [0, 50, 80, *range(81, 91)]
    parts = [
        runner.forward([Span(ids[start:stop], start, table, stop - start)]) for start, stop in itertools.pairwise(cuts)
    ]
    return torch.cat(parts).log_softmax(-1)


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
@pytest.mark.parametrize("attention", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_over_kv_in_few_bits_says_nearly_what_it_says_in_float32(directory, dtype, attention, kv_dtype):
    plain = distributions(runner_of(directory, attention="reference"))
    other = distributions(runner_of(directory, dtype=dtype, attention=attention, kv_dtype=kv_dtype))
    assert float((plain.exp() * (plain - other)).sum(-1).mean()) < TOLERANCE_NATS
    assert not torch.equal(plain, other)


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_every_way_to_attend_says_what_the_plain_one_does_over_the_same_kv(directory, attention, kv_dtype):
    plain = distributions(runner_of(directory, attention="reference", kv_dtype=kv_dtype))
    other = distributions(runner_of(directory, attention=attention, kv_dtype=kv_dtype))
    assert float((plain.exp() * (plain - other)).sum(-1).mean()) < SAME_NATS


def test_twice_as_many_tokens_fit_nearly(directory):
    few, many = (
        runner_of(directory, dtype="bfloat16", kv_dtype=kv_dtype, max_kv_bytes=1 << 20) for kv_dtype in ("auto", "int8")
    )
    num_layers, num_kv_heads = 3, many.cache.keys[0].shape[0]
    assert many.num_blocks == (1 << 20) // (2 * num_layers * num_kv_heads * 8 * (32 + 4))
    assert 1.7 * few.num_blocks < many.num_blocks < 2 * few.num_blocks


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "device"),
    [("fp8", torch.bfloat16, "cpu"), ("bf16", torch.float16, "cuda")],
)
def test_what_there_is_none_of_is_refused_by_name(kv_dtype, dtype, device):
    with pytest.raises(ModelError, match=rf"^engine\.kv_dtype is {kv_dtype},"):
        kv_type_of(Engine(kv_dtype=kv_dtype), dtype, torch.device(device))


def test_fp8_is_for_cuda_devices():
    found = kv_type_of(Engine(kv_dtype="fp8"), torch.bfloat16, torch.device("cuda"))
    assert found.dtype is torch.float8_e4m3fn
    assert found.is_scaled


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_int8_is_for_all(device):
    found = kv_type_of(Engine(kv_dtype="int8"), torch.bfloat16, torch.device(device))
    assert found.dtype is torch.int8
    assert found.is_scaled


def test_it_is_refused_before_anything_is_loaded(directory):
    with pytest.raises(ModelError, match=r"engine\.kv_dtype is fp8"):
        runner_of(directory, kv_dtype="fp8")
