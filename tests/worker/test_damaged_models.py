"""Whatever is done to a model's files, it is served or refused in one sentence: by hand, and by chance."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as of_transformers

from policies import settings
from tests.builders import PATIENCE_S
from tests.worker import gguf_files
from tests.worker.quantised_files import logits_of, write_mxfp4
from tests.worker.tiny import checkpoint
from worker.models import ModelError, not_finite
from worker.models.fitting import VALUES_AT_ONCE
from worker.models.gguf import GgufFile
from worker.models.quantize import fp8_of, int4_of, int8_of
from worker.runner import Runner

ROOT = Path(__file__).parents[2]
ENGINE = settings.Engine(device="cpu", dtype="float32", num_threads=1, max_kv_bytes=8 << 20, attention="reference")
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"head_dim": 16, "sliding_window": 9},
    "Phi3ForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
ODD = (0, -1, 1, 3, 7, 2**31 - 1, 2**31, 10**18, 10**400, -(10**400), 1.5, 1e308, 0.0, -0.5, 1e-320, float("nan"))
ODD += ("x", "", None, True, [], {}, [1], [None], {"a": 1}, float("inf"))  # type: ignore[assignment]
TYPES = ("F32", "F16", "BF16", "I8", "I64", "BOOL", "F8_E4M3", "X9", "", 5, None, "C64")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint of each family."""
    directory = tmp_path_factory.mktemp("whole")
    for family, changes in FAMILIES.items():
        checkpoint(directory / family, family, num_hidden_layers=1, **changes)
    return directory


def refusal_of(directory: Path) -> str:
    """Empty where it is served; anything but a ModelError is the test's failure."""
    said = ""
    try:
        Runner.load(str(directory), ENGINE)
    except ModelError as error:
        said = str(error) or "an empty sentence\n"
    assert "\n" not in said
    return said


def configured(whole: Path, to: Path, family: str, **changes: Any) -> Path:
    shutil.copytree(whole / family, to)
    path = to / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return to


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rms_norm_eps": 10**400}, "has an impossible rms_norm_eps: 1000"),
        ({"rms_norm_eps": -1}, "has an impossible rms_norm_eps: -1"),
        ({"head_dim": 0}, "has an impossible head_dim: 0"),
        ({"head_dim": 1 << 30}, "has an impossible rope: 1073741824 of 1073741824 dimensions"),
        ({"rope_parameters": {"rope_theta": -5.0}}, "has an impossible rope: 8 of 8 dimensions, theta -5.0"),
        ({"eos_token_id": 5000}, "config.json has answers end with token 5000, but the vocabulary has 97"),
        ({"eos_token_id": [1, -7]}, "config.json has answers end with token -7, but the vocabulary has 97"),
    ],
)
def test_numbers_that_cannot_be_are_named(whole, tmp_path, changes, sentence):
    directory = configured(whole, tmp_path / "model", "LlamaForCausalLM", **changes)
    (directory / "generation_config.json").unlink()
    assert sentence in refusal_of(directory)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default", "rope_theta": 1e-320},
        {"rope_type": "dynamic", "factor": 1e300},
        {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": -3.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "short_factor": [0] * 4, "long_factor": [1] * 4},
        {
            "rope_type": "longrope",
            "short_factor": [1] * 4,
            "long_factor": [1] * 4,
            "factor": 3.0,
            "original_max_position_embeddings": 1,
        },
    ],
)
def test_ropes_that_make_no_angles_are_refused(whole, tmp_path, scaling):
    directory = configured(whole, tmp_path / "model", "LlamaForCausalLM", rope_parameters=scaling)
    assert "has an impossible rope: its numbers make no angles" in refusal_of(directory)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("said", ["</s>", ["</s>"], [1, None], 1.0, True, {"a": 1}])
def test_end_tokens_that_are_no_ids_are_named(tmp_path, family, said):
    """Without them no answer would end."""
    checkpoint(tmp_path, family, num_hidden_layers=1)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": said}))
    assert f"generation_config.json has an impossible eos_token_id: {said}" in refusal_of(tmp_path)


@pytest.mark.parametrize("length", ["x", [64], 0, -5, 1.5, float("inf"), True])
def test_a_length_of_texts_that_cannot_be_is_named(tmp_path, length):
    checkpoint(tmp_path, "BertModel", num_hidden_layers=1)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    assert f"sentence_bert_config.json has an impossible max_seq_length: {length}" in refusal_of(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pad_token_id": -5}, "cannot be served: it does not compute (index out of range"),
        ({"sentence_transformers": 5}, ""),
    ],
)
def test_an_encoder_whose_configuration_is_odd_is_served_or_refused(tmp_path, changes, sentence):
    checkpoint(tmp_path, "BertModel", num_hidden_layers=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    said = refusal_of(tmp_path)
    assert sentence in said if sentence else not said


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertModel"])
def test_no_layer_is_made_where_there_are_a_billion(tmp_path, family):
    checkpoint(tmp_path, family, num_hidden_layers=1)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    path.write_text(json.dumps({**config, key: 10**9}))
    assert re.search("impossible num(ber of |_hidden_)layers: 1000000000", refusal_of(tmp_path))


@pytest.fixture(params=[logging.WARNING, logging.ERROR], ids=["as ever", "TRANSFORMERS_VERBOSITY=error"])
def verbosity(request):
    """What transformers writes, at least."""
    before = of_transformers.get_verbosity()
    of_transformers.set_verbosity(request.param)
    yield request.param
    of_transformers.set_verbosity(before)


@pytest.mark.parametrize(
    ("family", "name"),
    [("GPT2LMHeadModel", "transformer.wte.weight"), ("BertModel", "embeddings.word_embeddings.weight")],
)
def test_the_tensor_that_transformers_finds_of_another_shape_is_named_and_no_table_written(
    tmp_path, capfd, verbosity, family, name
):
    checkpoint(tmp_path, family, num_hidden_layers=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 2**31 - 1}))
    capfd.readouterr()
    assert f"tensor {name} of {tmp_path} is 97, 32, not 2147483647, 32" in refusal_of(tmp_path)
    assert capfd.readouterr().err == ""
    assert of_transformers.get_verbosity() == verbosity


def test_names_out_of_its_files_neither_break_the_sentence_nor_steer_a_terminal(whole, tmp_path):
    directory = configured(whole, tmp_path / "model", "LlamaForCausalLM", hidden_act="x\n\x1b[31m\ud800")
    assert refusal_of(directory) == "the activation x??[31m? of this LlamaForCausalLM is not supported"


def test_a_number_of_more_digits_than_are_read_is_one_sentence(whole, tmp_path):
    directory = configured(whole, tmp_path / "model", "LlamaForCausalLM")
    (directory / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")
    assert "config.json cannot be read: Exceeds the limit" in refusal_of(directory)


@pytest.mark.parametrize("names", [{"a": 1}, 5, [], "BertModel"])
def test_an_encoder_that_names_no_architectures_is_refused_in_one_sentence(whole, tmp_path, names):
    directory = configured(whole, tmp_path / "model", "LlamaForCausalLM", model_type="bert", architectures=names)
    assert refusal_of(directory)


@pytest.mark.parametrize("seed", range(4))
def test_a_config_with_odd_values_by_chance_is_served_or_refused_in_one_sentence(whole, tmp_path, seed):
    chance = random.Random(seed)
    for number in range(40):
        family = chance.choice(list(FAMILIES))
        config = json.loads((whole / family / "config.json").read_text())
        places = [(config, key) for key in config]
        places += [(value, key) for value in config.values() if isinstance(value, dict) for key in value]
        table, key = chance.choice(places)
        table[key] = value = chance.choice(ODD)
        try:
            refusal_of(configured(whole, tmp_path / str(number), family, **config))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {family} with {key} {str(value)[:40]}") from error


def _write(path: Path, header: object, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def _spoil(path: Path, chance: random.Random) -> None:
    """Something about one tensor in a safetensors header, or its bytes."""
    content = path.read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:begin]), content[begin:]
    names = sorted(set(header) - {"__metadata__"})
    name, other = chance.sample(names, 2)
    place = header[name]
    match chance.randrange(9):
        case 0:
            place["dtype"] = chance.choice(TYPES)
        case 1:
            shape = place["shape"]
            place["shape"] = chance.choice(
                [[], [0], [-1], [2**40, 2**40], [2**62, 4], None, "x", [1.5], shape[::-1], [*shape, 1]]
            )
        case 2:
            places = [[0, 0], [5, 1], [-1, 4], [2**63, 2**64], [0], None, header[other]["data_offsets"], [0, len(data)]]
            place["data_offsets"] = chance.choice(places)
        case 3:
            del place[chance.choice(list(place))]
        case 4:
            header["x" + name] = header.pop(name)
        case 5:
            header[name], header[other] = header[other], header[name]
        case 6:
            header[name] = chance.choice([None, 5, "x", [], {}])
        case 7:
            at = chance.choice([chance.randrange(16), chance.randrange(begin), begin, chance.randrange(len(content))])
            return path.write_bytes(content[:at])
        case 8:
            damaged = bytearray(content)
            for _ in range(3):
                damaged[chance.randrange(begin)] = chance.randrange(256)
            return path.write_bytes(damaged)
    _write(path, header, data)


@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_header_is_refused_in_one_sentence_that_names_the_file_or_a_tensor(whole, tmp_path, seed):
    chance = random.Random(seed)
    for number in range(60):
        directory = configured(whole, tmp_path / str(number), "LlamaForCausalLM")
        _spoil(directory / "model.safetensors", chance)
        said = refusal_of(directory)
        assert not said or "tensor" in said, f"seed {seed}: {said}"


@pytest.mark.parametrize(
    "length", [0, 1, 99_000_000, 2**31, 2**63, 2**64 - 1], ids=lambda length: f"{length} bytes of header"
)
def test_a_header_longer_than_its_file_is_refused(whole, tmp_path, length):
    directory = configured(whole, tmp_path / "model", "LlamaForCausalLM")
    _write(directory / "model.safetensors", b"{}", b"", length)
    assert "model.safetensors is not a whole safetensors file" in refusal_of(directory)


def _nan_in(name: str) -> Callable[[Path], object]:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        tensors[name].view(-1)[-1] = torch.nan
        save_file(tensors, directory / "model.safetensors")

    return spoil


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_worker_leaves_with_2_and_the_name_of_the_tensor_that_holds_no_numbers(whole, tmp_path, quantize):
    name = "model.layers.0.mlp.up_proj.weight"
    directory = configured(whole, tmp_path / "model", "LlamaForCausalLM")
    _nan_in(name)(directory)
    engine = msgspec.structs.replace(ENGINE, quantize=quantize)
    told = settings.WorkerSettings("w", "m", str(directory), f"unix:{tmp_path}/socket", engine=engine)
    done = subprocess.run(
        [sys.executable, "-m", "worker", msgspec.json.encode(told).decode()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"it cannot compute: tensor {name} of {directory}/model.safetensors holds values that are no" in done.stderr


def test_of_a_gguf_as_well_the_tensor_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    model = gguf_files.a_model("llama", num_hidden_layers=1)
    gguf_files.write(path, "llama", model, "Q8_0")
    assert not_finite(path) == ""
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = torch.inf
    gguf_files.write(path, "llama", model, "F16")
    assert not_finite(path) == f"tensor blk.0.ffn_down.weight of {path} holds values that are no numbers"


def test_a_gguf_is_looked_at_a_few_of_its_values_at_a_time(tmp_path):
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "num_local_experts": 32}
    model = gguf_files.a_model("mixtral", **sizes)
    gguf_files.write(path, "mixtral", model, "Q8_0")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assert not_finite(path) == ""
    taken = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    # In floats, and what they are made of.
    assert max(accumulate(taken)) < 4 * 4 * VALUES_AT_ONCE


def test_of_a_gguf_s_experts_in_mxfp4_the_tensor_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write_gpt_oss(path, {"experts": "MXFP4"})
    assert not_finite(path) == ""
    place = GgufFile(path).header.tensors["blk.1.ffn_down_exps.weight"]
    content = bytearray(path.read_bytes())
    content[place.at : place.at + place.num_bytes : 17] = b"\xff" * (place.num_bytes // 17)
    path.write_bytes(content)
    assert not_finite(path) == f"tensor blk.1.ffn_down_exps.weight of {path} holds values that are no numbers"


def test_of_experts_in_mxfp4_the_tensor_of_the_scale_is_named(tmp_path):
    write_mxfp4(tmp_path, hidden_size=64, intermediate_size=96)
    assert not_finite(tmp_path) == ""
    name, path = "model.layers.1.mlp.experts.down_proj_scales", tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[name][:, :, 0] = 255
    save_file(tensors, path)
    assert not logits_of(tmp_path).isfinite().all()
    assert not_finite(tmp_path) == f"tensor {name} of {path} holds values that are no numbers"


@pytest.mark.parametrize("round_", [int8_of, int4_of, fp8_of])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rounding_hides_nothing_that_is_no_number(round_, value):
    weight = torch.randn(4, 128)
    weight[2, 70] = value
    weight[3] = 0.0
    seen = round_(weight).dense(torch.float32).isfinite().all(1)
    assert seen.tolist() == [True, True, False, True]
