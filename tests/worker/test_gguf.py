"""A GGUF file says what llama.cpp's own package reads in it, and what transformers computes from that."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from itertools import accumulate
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import gguf
import hypothesis
import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from policies import settings
from policies.gguf import KINDS, Header, TensorPlace
from tests.builders import PATIENCE_S, ROOT
from tests.worker import gguf_files
from tests.worker.gguf_models import MODELS
from tests.worker.tiny import BLOCK_SIZE, oracle_logits
from worker.inputs import Span
from worker.models import ModelError
from worker.models.fitting import MAX_ERROR, fitted
from worker.models.forms import Int4, Int8, Plain
from worker.models.gguf import blocks
from worker.native import library
from worker.runner import Runner

ENGINE = settings.Engine(
    device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_kv_bytes=8 << 20, attention="reference"
)
"""Without the kernels, which round activations to eight bits as well."""
TOKEN_IDS = [(7 * place + 3) % 96 for place in range(30)]


def logits_of(path: Path, engine: settings.Engine = ENGINE) -> torch.Tensor:
    return Runner.load(str(path), engine).forward([Span(TOKEN_IDS, 0, [4, 1, 2, 9], len(TOKEN_IDS))])


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_computes_what_transformers_does(tmp_path, name):
    architecture, changes = MODELS[name]
    model = gguf_files.write(tmp_path / "model.gguf", architecture, gguf_files.a_model(architecture, **changes))
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_transformers_own_reader_of_gguf_agrees(tmp_path, architecture):
    gguf_files.write(
        tmp_path / "model.gguf", architecture, gguf_files.a_model(architecture), "Q8_0", {"general.name": "x"}
    )
    kind = getattr(transformers, gguf_files.KINDS[architecture])
    model = kind.from_pretrained(tmp_path, gguf_file="model.gguf", attn_implementation="eager").eval()
    near, exact = logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS)
    assert (near - exact).std() < 0.05 * exact.std()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q4_K"])
def test_these_kinds_are_read_without_a_loss(tmp_path, kind):
    model = gguf_files.write(tmp_path / "model.gguf", "llama", gguf_files.a_model("llama"), kind)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS"])
def test_these_kinds_lose_little(tmp_path, kind):
    model = gguf_files.write(
        tmp_path / "model.gguf", "qwen2", gguf_files.a_model("qwen2"), {"": kind, "token_embd": "F32"}
    )
    near, exact = logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS)
    assert (near - exact).std() < 0.05 * exact.std()
    assert (near.argmax(1) == exact.argmax(1)).float().mean() > 0.9


def test_parts_of_one_matrix_may_be_of_different_kinds(tmp_path):
    kinds = {
        "attn_v": "Q6_K",
        "attn_q": "Q4_K",
        "attn_k": "Q5_0",
        "ffn_gate": "Q4_K",
        "ffn_up": "F16",
        "ffn_down": "Q6_K",
    }
    model = gguf_files.write(tmp_path / "model.gguf", "qwen2", gguf_files.a_model("qwen2"), kinds)
    near, exact = logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS)
    assert (near - exact).std() < 0.05 * exact.std()


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_blocks_mean_what_the_package_reads_in_them(kind):
    weight = np.random.default_rng(1).standard_normal((7, 512)).astype(np.float32)
    raw, meant = gguf_files.blocks(weight, kind)
    bytes_of_rows = torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(7, -1).copy())
    assert np.array_equal(blocks.values_of(kind, bytes_of_rows).numpy(), meant)
    form = blocks.form_of(kind, bytes_of_rows, (7, 512), torch.float32)
    are_floats = kind in blocks.FLOATS or kind in blocks.SMALL_FLOATS
    assert isinstance(form, Plain if are_floats else Int4 if kind in blocks.FOUR_BITS else Int8)
    lost = (form.dense(torch.float32) - torch.from_numpy(meant)).norm() / np.linalg.norm(meant)
    assert lost <= (MAX_ERROR if isinstance(form, Int8) else 0)
    number = next(each for each in KINDS.values() if each.name == kind)
    header = Header(3, {}, {"a.weight": TensorPlace("a.weight", (7, 512), number, 0, raw.nbytes)}, memoryview(b""))
    assert header.loaded_bytes(4, 4) == pytest.approx(form.num_bytes, rel=0.01)


def test_rows_with_outliers_stay_floats():
    weight = torch.randn(64, 256)
    weight[:, 3] *= 60
    assert isinstance(fitted((64, 256), lambda start, stop: weight[start:stop].clone(), torch.bfloat16), Plain)


def test_the_head_of_a_tied_model_is_quantised_as_its_embedding_is(tmp_path):
    model = gguf_files.a_model("qwen2", tie_word_embeddings=True)
    gguf_files.write(tmp_path / "model.gguf", "qwen2", model, {"token_embd": "Q8_0"})
    near, exact = logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS)
    assert 0 < (near - exact).std() < 0.02 * exact.std()


@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        ),
        ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scale_linear": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
        ),
    ],
)
def test_ropes_are_stretched_as_the_metadata_says(tmp_path, scaling, metadata):
    model = gguf_files.a_model("llama", rope_parameters={**scaling, "rope_theta": 1e4})
    gguf_files.write(tmp_path / "model.gguf", "llama", model, metadata=metadata)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


def test_llama_3_1_brings_its_ramp_as_divisors(tmp_path):
    ramp = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = gguf_files.a_model(
        "llama", rope_parameters={**ramp, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    )
    plain = 1.0 / 1e4 ** (np.arange(0, 64, 2) / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    gguf_files.write(tmp_path / "model.gguf", "llama", model, extra={"rope_freqs.weight": divisors})
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


def test_phi_3_brings_its_long_and_short_factors(tmp_path):
    factors = {f"{name}_factor": [least + 0.1 * i for i in range(32)] for name, least in (("short", 1), ("long", 2))}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    model = gguf_files.a_model("phi3", original_max_position_embeddings=16, rope_parameters=rope)
    gguf_files.write(
        tmp_path / "model.gguf",
        "phi3",
        model,
        metadata={
            "phi3.rope.scaling.original_context_length": 16,
            "phi3.rope.scaling.attn_factor": float(np.sqrt(1 + np.log(8) / np.log(16))),
        },
        extra={
            f"rope_factors_{name}.weight": np.array(factors[f"{name}_factor"], np.float32) for name in ("long", "short")
        },
    )
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


def test_every_way_to_end_an_answer_is_known(tmp_path):
    tokens = ["a", "<|endoftext|>", "b", "<|im_end|>", "<|im_end|>!", "<end_of_turn>"] + [f"t{i}" for i in range(90)]
    kinds = [1, 3, 1, 3, 3, 1] + [1] * 90
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eot_token_id": 7}
    gguf_files.write(tmp_path / "model.gguf", "llama", gguf_files.a_model("llama", eos_token_id=3), metadata=metadata)
    assert Runner.load(str(tmp_path / "model.gguf"), ENGINE).eos_token_ids == (3, 7, 1)


def test_a_directory_with_one_gguf_is_that_model(tmp_path):
    model = gguf_files.write(tmp_path / "tiny-Q8_0.gguf", "llama", gguf_files.a_model("llama"))
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files; name one of them, such as other\.gguf"):
        Runner.load(str(tmp_path), ENGINE)


def test_the_second_version_of_the_format_is_read_alike(tmp_path):
    path = tmp_path / "model.gguf"
    model = gguf_files.write(path, "llama", gguf_files.a_model("llama"))
    content = bytearray(path.read_bytes())
    assert content[4] == gguf.GGUF_VERSION == 3
    content[4] = 2
    path.write_bytes(content)
    torch.testing.assert_close(logits_of(path), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


@cache
def a_small_file() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        gguf_files.write(path, "llama", gguf_files.a_model("llama", num_hidden_layers=1), "Q8_0")
        return path.read_bytes()


def refusal_of(path: Path) -> str:
    """Empty where it is served."""
    try:
        Runner.load(str(path), ENGINE)
    except ModelError as error:
        return str(error)
    return ""


@given(at=st.floats(0, 1), value=st.integers(0, 255), num_bytes=st.integers(0, 8))
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_damaged_or_cut_file_is_refused_in_one_sentence_or_read(at, value, num_bytes):
    content = bytearray(a_small_file())
    begin = int(at * 3000) if num_bytes else int(at * len(content))
    content[begin : begin + num_bytes] = bytes([value]) * num_bytes
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content if num_bytes else content[:begin])
        said = refusal_of(path)
        assert said.isprintable()
        assert said or num_bytes or begin > len(content) - 32


REFUSED = {
    "an architecture that is not served": (
        lambda at: at.write_bytes(at.read_bytes().replace(b"llama", b"mamba")),
        "the GGUF architecture mamba is not supported; supported are chatglm, deepseek2, ernie4_5, exaone, exaone4, ",
    ),
    "a missing tensor": (
        lambda at: at.write_bytes(at.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_um")),
        "has no tensor blk.1.ffn_up.weight",
    ),
    "a tensor too many": (
        lambda at: gguf_files.write(at, "llama", gguf_files.a_model("llama"), extra={"x.weight": np.ones(3, "f4")}),
        "holds tensor x.weight, which this architecture does not use",
    ),
    "a tensor of another shape": (
        lambda at: gguf_files.write(
            at, "llama", gguf_files.a_model("llama"), metadata={"llama.feed_forward_length": 128}
        ),
        "tensor blk.0.ffn_gate.weight of .* is 256x256, not 128x256",
    ),
    "a kind that is not read": (
        lambda at: gguf_files.write(at, "llama", gguf_files.a_model("llama"), {"ffn_up": "TQ1_0"}),
        "tensor blk.0.ffn_up.weight of .* is stored as TQ1_0, which is not supported; supported are F32, ",
    ),
    "a factor of nothing": (
        lambda at: gguf_files.write(
            at,
            "granite",
            gguf_files.a_model("granite", residual_multiplier=0.0),
        ),
        "has an impossible residual scale: 0.0",
    ),
    "a missing size": (
        lambda at: at.write_bytes(at.read_bytes().replace(b"llama.block_count", b"llama.block_cound")),
        "cannot be read as GGUF: it lacks llama.block_count",
    ),
    "a mixture of experts": (
        lambda at: gguf_files.write(at, "qwen2", gguf_files.a_model("qwen2"), metadata={"qwen2.expert_count": 8}),
        "is a mixture of experts of the architecture qwen2; mixtures of deepseek2, gpt-oss, granitemoe, llama, ",
    ),
    "a mixture without its experts": (
        lambda at: gguf_files.write(
            at, "llama", gguf_files.a_model("llama"), metadata={"llama.expert_count": 8, "llama.expert_used_count": 2}
        ),
        "has no tensor blk.0.ffn_gate_inp.weight",
    ),
    "experts too few": (
        lambda at: gguf_files.write(
            at, "mixtral", gguf_files.a_model("mixtral", num_local_experts=4), metadata={"llama.expert_count": 3}
        ),
        "tensor blk.0.ffn_gate_inp.weight of .* is 4x256, not 3x256",
    ),
    "a billion experts": (
        lambda at: gguf_files.write(
            at, "mixtral", gguf_files.a_model("mixtral", num_local_experts=4), metadata={"llama.expert_count": 10**9}
        ),
        "tensor blk.0.ffn_gate_inp.weight of .* is 4x256, not 1000000000x256",
    ),
    "a billion layers, of which each has its kind": (
        lambda at: gguf_files.write(
            at,
            "olmo2",
            gguf_files.a_model("olmo2"),
            metadata={"olmo2.block_count": 10**9, "olmo2.attention.sliding_window_pattern": 4},
        ),
        "it has an impossible olmo2.block_count: 1000000000",
    ),
    "a number of layers that is none": (
        lambda at: gguf_files.write(
            at, "llama", gguf_files.a_model("llama"), metadata={"llama.attention.head_count_kv": [float("inf")]}
        ),
        "the layers of .* have an impossible llama.attention.head_count_kv: inf",
    ),
    "a part of a file": (
        lambda at: gguf_files.write(at, "llama", gguf_files.a_model("llama"), metadata={"split.count": 3}),
        "it says that it is part 1 of 3, and by its name it is a whole file",
    ),
    "a rope that nobody knows": (
        lambda at: gguf_files.write(
            at, "llama", gguf_files.a_model("llama"), metadata={"llama.rope.scaling.type": "spiral"}
        ),
        "the RoPE scaling spiral of",
    ),
    "no bytes": (lambda at: at.write_bytes(b""), "cannot be read"),
    "no GGUF": (lambda at: at.write_bytes(b"a" * 5000), "cannot be read as GGUF: it does not begin as one"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_sentence(tmp_path, what):
    spoil, sentence = REFUSED[what]
    path = tmp_path / "model.gguf"
    gguf_files.write(path, "llama", gguf_files.a_model("llama"))
    before = path.read_bytes()
    spoil(path)
    assert path.read_bytes() != before
    with pytest.raises(ModelError, match=sentence) as refusal:
        Runner.load(str(path), ENGINE)
    assert "\n" not in str(refusal.value)


def test_a_worker_leaves_with_2_where_its_file_is_cut_short(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(a_small_file()[:-5000])
    told = settings.WorkerSettings("w", "m", str(path), f"unix:{tmp_path}/socket", engine=ENGINE)
    done = subprocess.run(
        [sys.executable, "-m", "worker", msgspec.json.encode(told).decode()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "it is cut short: its tensor" in done.stderr


@pytest.mark.skipif(library() is None, reason="only a step in one native call has tables of all angles")
def test_a_context_that_memory_has_no_room_for_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "model.gguf"
    model = gguf_files.a_model("llama", num_hidden_layers=1)
    gguf_files.write(path, "llama", model, "Q8_0", metadata={"llama.context_length": 2**31 - 1})
    engine = msgspec.structs.replace(ENGINE, dtype="auto", attention="auto", max_kv_bytes=8 << 20)
    told = settings.WorkerSettings("w", "m", str(path), f"unix:{tmp_path}/socket", engine=engine)
    command = [sys.executable, "-m", "worker", msgspec.json.encode(told).decode()]
    limited = ["prlimit", f"--data={12 << 30}", *command] if which("prlimit") else pytest.skip("there is no prlimit")
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"there is no memory to start {path} with: " in done.stderr


def test_a_model_is_never_whole_in_floats_while_it_is_loaded(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
    model = gguf_files.a_model("llama", **sizes)
    num_values = sum(parameter.numel() for parameter in model.parameters())
    path = tmp_path / "model.gguf"
    gguf_files.write(path, "llama", model, {"": "Q8_0", "token_embd": "F16"})
    engine = msgspec.structs.replace(ENGINE, dtype="bfloat16", max_kv_bytes=1 << 20, max_model_tokens=64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        Runner.load(str(path), engine)
    # What tensors take: what the process does is also its allocator's doing, and its imports'.
    events = profile.profiler.kineto_results.events()
    taken = [event.nbytes() for event in events if event.name() == "[memory]"]
    # A byte each, and what is in work; floats alone would be two bytes each.
    assert num_values < max(accumulate(taken)) < 1.5 * num_values
