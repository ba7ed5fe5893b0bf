"""What the ranks hold of a model: together all of it, apart no more than their share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker import tiny
from worker.models import ModelError, read_architecture
from worker.models.architecture import Architecture, Latent, Mixture, Rope
from worker.models.forms import Form, Int8, Plain
from worker.models.load import build_decoder, load_decoder
from worker.models.quantize import int4_of, int8_of
from worker.models.shard import Layout, Part, Shard, cut, stages
from worker.models.sources import PlainSource, ShardSource
from worker.models.weights import Checkpoint


def architecture(**changes: object) -> Architecture:
    facts: dict[str, object] = {
        "name": "LlamaForCausalLM",
        "vocab_size": 53,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 5,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_positions": 64,
        "norm_eps": 1e-6,
        "attention_scale": 0.5,
        "ropes": (Rope(rotary_dim=4, max_positions=64),),
        "layer_ropes": (0, 0, 0, 0, 0),
        "windows": (0, 1, 2, 3, 4),
    }
    return Architecture(**{**facts, **changes})  # type: ignore[arg-type]


MIXTURES = [
    Mixture(3, 2, True, "block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    Mixture(3, 2, False),
    Mixture(3, 2, True, "mlp.router", is_stacked=True),
]
LATENT = {
    "mixture": Mixture(3, 2, True, num_dense=2, dense_size=48, shared_size=24, scores="sigmoid"),
    "num_kv_heads": 1,
    "head_dim": 10,
}
layouts = st.builds(Layout, st.sampled_from((1, 2, 4, 8)), st.integers(1, 5))


@settings(deadline=None)
@given(size=st.integers(1, 5000), data=st.data())
def test_a_width_is_cut_into_parts_of_nearly_equal_length(size, data):
    num_parts = data.draw(st.integers(1, min(size, 16)))
    parts = cut(size, num_parts)
    assert [place for part in parts for place in part] == list(range(size))
    lengths = [len(part) for part in parts]
    assert min(lengths) > 0
    assert max(lengths) - min(lengths) <= max(1, size // num_parts // 4)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_no_other_stages_have_a_smaller_largest_one(sizes, data):
    num_stages = data.draw(st.integers(1, len(sizes)))

    def largest(ranges: list[range]) -> int:
        return max(sum(sizes[part.start : part.stop]) for part in ranges)

    def all_ways() -> Iterator[list[range]]:
        for between in itertools.combinations(range(1, len(sizes)), num_stages - 1):
            yield [range(*ends) for ends in itertools.pairwise((0, *between, len(sizes)))]

    found = stages(sizes, num_stages)
    assert [place for part in found for place in part] == list(range(len(sizes)))
    assert len(found) == num_stages
    assert all(found)
    assert largest(found) == min(largest(way) for way in all_ways())


@settings(deadline=None)
@given(layout=layouts)
def test_ranks_and_stages_name_each_other(layout):
    by_stage = [list(layout.ranks(stage)) for stage in range(layout.pipeline)]
    assert sorted(itertools.chain(*by_stage)) == list(range(layout.num_ranks))
    assert all(layout.stage(rank) == stage for stage, ranks in enumerate(by_stage) for rank in ranks)
    assert by_stage[-1][0] == 0


class Whole(PlainSource):
    """A model whose tensors are numbered through; it notes what is taken of each."""

    def __init__(self) -> None:
        super().__init__(self.make)
        self.tensors: dict[str, torch.Tensor] = {}
        self.taken: dict[str, list[torch.Tensor]] = {}

    def make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        known = self.tensors.setdefault(name, made)
        assert known.shape == shape, "the ranks agree on what the whole is"
        return known

    def tensor(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor = super().tensor(name, shape, part, dtype)
        self.taken.setdefault(name, []).append(tensor)
        return tensor


@settings(deadline=None)
@given(
    layout=layouts,
    num_kv_heads=st.sampled_from((1, 2, 4, 8)),
    tied=st.booleans(),
    fused=st.booleans(),
    bias=st.booleans(),
    qk_norm=st.sampled_from(("none", "head", "width")),
    mixture=st.sampled_from((None, *MIXTURES)),
)
def test_all_ranks_together_have_the_model(layout, num_kv_heads, tied, fused, bias, qk_norm, mixture):
    model = architecture(
        num_kv_heads=num_kv_heads,
        tied=tied,
        fused=fused and mixture is None,
        mixture=mixture,
        sinks=mixture is not None,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        qk_norm=qk_norm,
    )
    ranks_share(model, layout)


def ranks_share(model: Architecture, layout: Layout) -> None:
    alone, together = Whole(), Whole()
    cpu = torch.device("cpu")
    build_decoder(Shard.of(model), alone, torch.float32, cpu, 16)
    for rank in range(layout.num_ranks):
        own = Whole()
        shard = Shard.of(model, layout, rank)
        build_decoder(shard, own, torch.float32, cpu, 16)
        assert not any(shard.misses(name) for name in own.tensors)
        assert all(shard.misses(name) for name in alone.tensors if name not in own.tensors)
        matrices = [name for name in own.taken if name.endswith((".weight", "_proj")) and "norm" not in name]
        assert sum(own.taken[name][0].numel() for name in matrices) == shard.num_parameters
        for name, tensors in own.taken.items():
            assert len(tensors) == 1
            together.make(name, own.tensors[name].shape)
            together.taken.setdefault(name, []).extend(tensors)
    assert {name: t.shape for name, t in together.tensors.items()} == {n: t.shape for n, t in alone.tensors.items()}
    for name, whole in alone.tensors.items():
        values = torch.cat([tensor.flatten() for tensor in together.taken[name]]).unique()
        assert torch.equal(values, whole.flatten()), name


@settings(deadline=None)
@given(layout=layouts, query_rank=st.sampled_from((0, 9)), bias=st.booleans())
def test_all_ranks_together_have_a_model_with_latent_attention(layout, query_rank, bias):
    latent = Latent(8, 2, key_dim=4, value_dim=3, query_rank=query_rank, is_interleaved=True)
    ranks_share(architecture(**LATENT, latent=latent, qkv_bias=bias, output_bias=bias), layout)


def test_one_rank_alone_has_the_architecture_as_it_is():
    shard = Shard.of(architecture())
    assert shard.own == shard.whole
    assert shard.is_first
    assert shard.is_last
    assert shard.num_parameters == architecture().num_parameters


def test_a_stage_has_the_windows_of_its_own_layers():
    owns = [Shard.of(architecture(), Layout(pipeline=3), rank).own for rank in (2, 1, 0)]
    assert sum((own.windows for own in owns), ()) == (0, 1, 2, 3, 4)
    assert [own.num_layers for own in owns] == [len(own.layer_ropes) for own in owns]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(3), "engine.tensor_parallel is 3, which does not divide the 8 attention heads of this Llama"),
        (Layout(8), "engine.tensor_parallel is 8, which does not divide the 6 KV heads"),
        (Layout(pipeline=6), "engine.pipeline_parallel is 6, but this LlamaForCausalLM has 5 layers to share out"),
    ],
)
def test_what_cannot_be_divided_is_said_with_the_numbers(layout, reason):
    changes = {"num_heads": 24, "num_kv_heads": 6} if "KV" in reason else {}
    with pytest.raises(ModelError, match=reason):
        Shard.of(architecture(**changes), layout)


@pytest.mark.parametrize(
    ("name", "shape", "is_summed"),
    [
        ("self_attn.o_proj.bias", (24,), True),
        ("mlp.down_proj.bias", (24,), True),
        ("mlp.up_proj.bias", (20,), False),
        ("mlp.experts.down_proj_bias", (3, 24), True),
        ("mlp.experts.gate_up_proj_bias", (3, 40), False),
        ("mlp.router.bias", (3,), False),
    ],
)
def test_only_one_rank_adds_a_bias_after_the_sum(name, shape, is_summed):
    model = architecture(output_bias=True, mlp_bias=True, mixture=MIXTURES[-1] if "experts" in name else None)
    for rank in range(2):
        source = ShardSource(PlainSource(lambda name, shape: torch.ones(shape)), Shard.of(model, Layout(2), rank))
        bias = source.tensor(f"layers.0.{name}", shape)
        assert torch.equal(bias, torch.full(shape, float(rank == 0 or not is_summed)))


def test_a_stack_of_experts_is_cut_between_a_gate_with_what_it_opens_and_the_next():
    shard = Shard.of(architecture(mixture=MIXTURES[-1]), Layout(4), 1)
    source = ShardSource(PlainSource(lambda name, shape: torch.arange(shape[-1]).expand(shape)), shard)
    assert source.tensor("layers.0.mlp.experts.gate_up_proj", (3, 24, 20))[2, 5].tolist() == list(range(20, 40))
    assert source.tensor("layers.0.mlp.experts.gate_up_proj_bias", (3, 20))[2].tolist() == list(range(20, 40))


def tensors_of(form: Form) -> list[torch.Tensor]:
    parts = [getattr(form, field.name) for field in fields(form)]
    return [part for part in parts if isinstance(part, torch.Tensor)]


class Quantised(PlainSource):
    """Stored quantised, as an importer would hand it out."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda name, shape: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))))
        self._kind = kind

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:  # type: ignore[override]
        whole = super().matrix(name, shape).weight
        form = int8_of(whole) if self._kind == "int8" else int4_of(whole, 32)
        return form if part is None else part.of_form(form)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("down", ["layers.0.mlp.down_proj", "layers.0.block_sparse_moe.experts.2.w2"])
def test_a_quantised_matrix_is_cut_as_it_is_stored(kind, down):
    model = architecture(hidden_size=64, head_dim=16, intermediate_size=256)
    source = Quantised(kind)
    inner = ShardSource(source, Shard.of(model, Layout(2), 1)).matrix(down, (64, 128))
    whole = source.matrix(down, (64, 256))
    assert torch.equal(inner.dense(torch.float32), whole.dense(torch.float32)[:, 128:])
    assert isinstance(inner, Int8) == (kind == "int8")
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors_of(inner))
    gates = ShardSource(source, Shard.of(model, Layout(2), 1)).matrix("layers.0.mlp.gate_up_proj", (256, 64))
    rows = source.matrix("layers.0.mlp.gate_up_proj", (512, 64)).dense(torch.float32)
    assert torch.equal(gates.dense(torch.float32), torch.cat((rows[128:256], rows[384:])))


def test_a_group_of_four_bit_codes_that_ranks_would_share_is_refused():
    model = architecture(hidden_size=64, head_dim=4, intermediate_size=256)
    source = ShardSource(Quantised("int4"), Shard.of(model, Layout(2), 1))
    with pytest.raises(ModelError, match=r"self_attn.o_proj cannot be shared among 2 ranks: columns 16 to 32 cut"):
        source.matrix("layers.0.self_attn.o_proj", (64, 16))


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_a_rank_takes_no_more_of_the_files_than_its_part(tmp_path, monkeypatch, family):
    tiny.checkpoint(tmp_path, family, num_key_value_heads=4, vocab_size=96)
    model = read_architecture(tmp_path)
    taken: list[int] = []
    finish = Checkpoint.finish

    def noting(checkpoint: Checkpoint) -> None:
        finish(checkpoint)
        taken.append(checkpoint.num_bytes_taken)

    monkeypatch.setattr(Checkpoint, "finish", noting)
    layout = Layout(4, 3)
    for rank in range(layout.num_ranks):
        shard = Shard.of(model, layout, rank)
        load_decoder(tmp_path, model, torch.float32, torch.device("cpu"), 64, shard=shard)
        norms = 32 * (2 + shard.is_last)
        assert taken.pop() == 4 * (shard.num_parameters + norms)
        assert shard.num_parameters < model.num_parameters / 8


def test_plain_rows_are_views_of_the_file(tmp_path):
    tiny.checkpoint(tmp_path, "LlamaForCausalLM")
    with Checkpoint(tmp_path) as checkpoint:
        rows = checkpoint.take("model.layers.0.mlp.up_proj.weight", (48, 32), Part((range(12, 24),)))
        assert rows.untyped_storage().nbytes() > rows.nbytes
        assert isinstance(Part((range(12),)).of_form(Plain(rows)), Plain)
