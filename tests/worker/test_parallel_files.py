"""Quantised checkpoints and GGUF files shared among two ranks mean what they mean to one."""

from __future__ import annotations

import pytest
import torch

from tests.worker import gguf_files
from tests.worker.quantised_files import ENGINE, METHODS, SIZES, TOKEN_IDS, WITH_HEAD, Method, write, write_mxfp4
from tests.worker.test_shard import tensors_of
from tests.worker.tiny import BLOCK_SIZE
from tests.worker.troop import Troop
from worker.inputs import Span
from worker.loading import load_model
from worker.models import Layout, ModelError, Shard, read_architecture
from worker.models.gguf import GgufFile, GgufSource
from worker.models.sources import ShardSource
from worker.runner import Runner

KINDS = {
    "F16": "F16",
    "Q8_0": "Q8_0",
    "Q4_0": "Q4_0",
    "Q4_K": "Q4_K",
    "Q5_K": "Q5_K",
    "Q6_K": "Q6_K",
    "several": {"attn_v": "Q6_K", "attn_q": "Q4_K", "ffn_gate": "Q4_K", "ffn_up": "F16", "ffn_down": "Q8_0"},
}
UNSHARED = ("gptq, groups of 32 by rank", "gptq, by rank")
SPANS = [Span(TOKEN_IDS, 0, [4, 1, 2, 9], len(TOKEN_IDS))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def troop(directory):
    troop = Troop(Layout(2), directory, block_size=BLOCK_SIZE, attention="reference")
    yield troop
    troop.close()
    assert not troop.lost


def assert_alike(troop, directory, number):
    alone = Runner.load(str(directory / str(number)), ENGINE).forward(SPANS)
    together = troop.runner(number).forward(SPANS)
    assert alone.std() > 0.1
    torch.testing.assert_close(together, alone, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in UNSHARED])
def test_a_quantised_checkpoint(troop, directory, name):
    number = list(METHODS).index(name)
    write(directory / str(number), METHODS[name], intermediate_size=512)
    assert_alike(troop, directory, number)


@pytest.mark.parametrize("name", UNSHARED)
def test_a_matrix_whose_columns_are_in_an_order_of_their_own_is_refused(tmp_path, name):
    write(tmp_path, METHODS[name], intermediate_size=512)
    with pytest.raises(ModelError, match="cannot be shared among 2 ranks: columns in another order"):
        load_model(str(tmp_path), ENGINE, Layout(2), 1)


@pytest.mark.parametrize(("name", "change"), [("gptq", {"lm_head": True}), ("W4A16 by channel", {"ignore": []})])
def test_a_quantised_head_is_the_last_stages_alone(tmp_path, name, change):
    method = METHODS[name]
    write(tmp_path, Method({**method.config, **change}, method.quantise, method.form), modules=WITH_HEAD)
    stages = [load_model(str(tmp_path), ENGINE, Layout(1, 2), rank) for rank in range(2)]
    assert [stage.head is not None for stage in stages] == [True, False]


def test_experts_in_mxfp4(troop, directory):
    number = len(METHODS) + len(KINDS)
    write_mxfp4(directory / str(number), **SIZES, head_dim=16)
    assert_alike(troop, directory, number)


@pytest.mark.parametrize("name", KINDS)
def test_a_gguf_file(troop, directory, name):
    number = len(METHODS) + list(KINDS).index(name)
    path = directory / str(number)
    path.mkdir()
    gguf_files.write(path / "model.gguf", "qwen2", gguf_files.a_model("qwen2"), KINDS[name])
    assert_alike(troop, directory, number)


@pytest.mark.parametrize("kinds", [{"experts": "MXFP4"}, {"ffn_down_exps": "Q4_1", "": "Q8_0"}], ids=["MXFP4", "Q8_0"])
def test_stacked_experts_of_a_gguf_file(troop, directory, kinds):
    number = len(METHODS) + len(KINDS) + 1 + len(kinds)
    path = directory / str(number)
    path.mkdir()
    gguf_files.write_gpt_oss(path / "model.gguf", kinds)
    assert_alike(troop, directory, number)


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_0"])
def test_what_of_a_gguf_is_another_ranks_is_not_kept(tmp_path, name):
    path = tmp_path / "model.gguf"
    gguf_files.write(path, "qwen2", gguf_files.a_model("qwen2"), name)
    model = read_architecture(path)
    shard, file = Shard.of(model, Layout(2), 1), GgufSource(GgufFile(path), model, torch.float32, torch.device("cpu"))
    shape = model.hidden_size, shard.own.intermediate_size
    form = ShardSource(file, shard).matrix("layers.0.mlp.down_proj", shape)
    assert form.shape == shape
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors_of(form))
