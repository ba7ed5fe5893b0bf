"""What of a model one rank holds: which layers, which heads, which rows and columns of each matrix.

Pure arithmetic over names and shapes. Matrices are cut as in Megatron-LM (Shoeybi et al. 2019): those that enter a half
layer by their rows, those that leave it by their columns, so that what the ranks compute apart has to be summed once a
half layer. Each expert of a mixture is cut so, and its router is whole on every rank; so is what makes the latent of
latent attention, which every rank keeps, where what heads make of it is cut by the heads. Embedding and head are cut by
the vocabulary. Layers go to stages in contiguous ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.models.architecture import Architecture
from worker.models.errors import ModelError
from worker.models.forms import Form, alone, joined

LARGEST_UNIT = 128
"""Widths are cut at multiples of this, which no kernel's tile and no group of four-bit codes is larger than."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks compute one model: ``tensor`` of them share each matrix of a stage, ``pipeline`` stages follow
    each other.
    """

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        """Rank 0 is in the last one: it samples, and there the logits are."""
        return self.pipeline - 1 - rank // self.tensor

    def ranks(self, stage: int) -> range:
        """That share the matrices of this stage."""
        first = (self.pipeline - 1 - stage) * self.tensor
        return range(first, first + self.tensor)


@dataclass(frozen=True, slots=True)
class Part:
    """Of a whole tensor."""

    rows: tuple[range, ...]
    """Taken below each other."""
    columns: range | None = None
    """None: all."""
    dim: int = 1
    """The columns' own."""

    def of(self, whole: Tensor) -> Tensor:
        """Contiguous; one range of rows is no copy."""
        rows = [whole[rows.start : rows.stop] for rows in self.rows]
        below = rows[0] if len(rows) == 1 else torch.cat(rows)
        if self.columns is None:
            return below
        return below.narrow(self.dim, self.columns.start, len(self.columns)).contiguous()

    def of_form(self, whole: Form) -> Form:
        """For matrices that are stored quantised; what is in no part is not kept. Raises ValueError where a group of
        codes would be cut.
        """
        below = joined([whole.rows(rows.start, rows.stop) for rows in self.rows])
        assert below is not None
        part = below if self.columns is None else below.columns(self.columns.start, self.columns.stop)
        return alone(part)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model. ``of`` makes it."""

    whole: Architecture
    own: Architecture
    """The same facts of this rank's layers, with its heads and its part of the inner width; the vocabulary is whole."""
    layout: Layout
    rank: int
    layers: range
    query_heads: range
    kv_heads: range
    """Where there are fewer than ranks, neighbours have the same one."""
    inner: range
    vocabulary: range
    vocabulary_widths: tuple[int, ...]
    """Of all ranks that share its matrices."""

    @classmethod
    def of(cls, architecture: Architecture, layout: Layout | None = None, rank: int = 0) -> Shard:
        """Raises ModelError where the model cannot be divided like that."""
        layout = layout or Layout()
        num_ranks = layout.tensor
        name, num_heads, num_kv_heads = architecture.name, architecture.num_heads, architecture.num_kv_heads
        for what, count, divides in (
            ("attention heads", num_heads, num_heads % num_ranks == 0),
            ("KV heads", num_kv_heads, num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0),
        ):
            if not divides:
                raise ModelError(
                    f"engine.tensor_parallel is {num_ranks}, which does not divide the {count} {what} of this {name}"
                )
        if layout.pipeline > architecture.num_layers:
            raise ModelError(
                f"engine.pipeline_parallel is {layout.pipeline},"
                f" but this {name} has {architecture.num_layers} layers to share out"
            )
        if num_ranks > min(architecture.intermediate_size, architecture.vocab_size):
            raise ModelError(f"engine.tensor_parallel is {num_ranks}, more than this {name} is wide")
        index = rank % num_ranks
        layers = stages(_layer_bytes(architecture), layout.pipeline)[layout.stage(rank)]
        query_heads = range(index * num_heads // num_ranks, (index + 1) * num_heads // num_ranks)
        num_own = max(1, num_kv_heads // num_ranks)
        kv_heads = range(index * num_kv_heads // num_ranks, index * num_kv_heads // num_ranks + num_own)
        inner = cut(architecture.intermediate_size, num_ranks)[index]
        mixture = architecture.mixture
        if mixture is not None:
            dense, shared = (cut(size, num_ranks)[index] if size else () for size in mixture.other_sizes)
            num_dense = max(0, mixture.num_dense - layers.start)
            mixture = replace(mixture, num_dense=num_dense, dense_size=len(dense), shared_size=len(shared))
        own = replace(
            architecture,
            mixture=mixture,
            num_layers=len(layers),
            num_heads=len(query_heads),
            num_kv_heads=len(kv_heads),
            intermediate_size=len(inner),
            layer_ropes=architecture.layer_ropes[layers.start : layers.stop],
            windows=architecture.windows[layers.start : layers.stop],
        )
        tables = cut(architecture.vocab_size, num_ranks)
        widths = tuple(map(len, tables))
        return cls(architecture, own, layout, rank, layers, query_heads, kv_heads, inner, tables[index], widths)

    @property
    def index(self) -> int:
        """Among the ranks that share its matrices."""
        return self.rank % self.layout.tensor

    @property
    def is_first(self) -> bool:
        """Its stage turns token ids into activations."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Its stage turns activations into logits."""
        return self.layers.stop == self.whole.num_layers

    @property
    def num_kv_copies(self) -> int:
        """Ranks that have the same KV head."""
        return max(1, self.layout.tensor // self.whole.num_kv_heads)

    @property
    def num_parameters(self) -> int:
        """Of its matrices; norms and biases are too small to count."""
        tables = self.is_first + (self.is_last and not (self.is_first and self.whole.tied))
        return self.num_layer_parameters + tables * len(self.vocabulary) * self.own.hidden_size

    @property
    def num_layer_parameters(self) -> int:
        """The same without embedding and head."""
        return sum(self.own.num_layer_parameters(layer) for layer in range(len(self.layers)))

    def whole_name(self, name: str) -> str:
        """Of "layers.0.mlp.up_proj", the first of its own: the name in the checkpoint."""
        if not name.startswith("layers."):
            return name
        _, index, rest = name.split(".", 2)
        return f"layers.{self.layers.start + int(index)}.{rest}"

    def misses(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to other stages alone."""
        if name.startswith("layers."):
            index, num_layers = name.split(".", 2)[1], self.whole.num_layers + self.whole.num_extra_layers
            return index.isdecimal() and int(index) < num_layers and int(index) not in self.layers
        module = name.rpartition(".")[0]  # of several tensors, where it is quantised
        if module == "embed_tokens":
            return not (self.is_first or (self.is_last and self.whole.tied))
        return module in ("norm", "lm_head") and not self.is_last

    def part(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Part | None]:
        """Own ``shape`` of a matrix, bias or norm -> the shape of the whole, and what of it is its own; None: all."""
        if self.layout.tensor == 1:
            return shape, None
        mixture = self.whole.mixture
        if mixture is not None and mixture.is_stacked and f".{mixture.experts}." in name:
            return self._stacked_part(name, shape)
        entering = self._rows(name)
        if entering is not None:
            size, rows = entering
            return (size, *shape[1:]), Part(rows)
        leaving = self._columns(name) if len(shape) > 1 else None
        if leaving is not None:
            size, columns = leaving
            return (shape[0], size), Part((range(shape[0]),), columns)
        return shape, None

    def adds_bias(self, name: str) -> bool:
        """Of a matrix that is cut by columns, one rank adds the bias, or the sum would have it several times."""
        return self.index == 0 or self._columns(name.removesuffix("_bias")) is None

    def _stacked_part(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Part | None]:
        """As ``part``, of [num_experts, in, out] or [num_experts, out]; a gate and what it opens are neighbours."""
        inner, experts = self.whole.intermediate_size, (range(shape[0]),)
        match name.rpartition(".")[2]:
            case "gate_up_proj" | "gate_up_proj_bias":
                return (*shape[:-1], 2 * inner), Part(experts, _scaled(self.inner, 2), len(shape) - 1)
            case "down_proj":
                return (shape[0], inner, shape[2]), Part(experts, self.inner)
        return shape, None

    def _inner(self, name: str) -> tuple[int, range]:
        """Of the MLP that a matrix is of, the width inside, and which of it is this rank's."""
        mixture = self.whole.mixture
        if mixture is not None and ".shared_experts." in name:
            size = mixture.shared_size
        elif mixture is not None and int(name.split(".", 2)[1]) < mixture.num_dense:
            size = mixture.dense_size
        else:
            return self.whole.intermediate_size, self.inner
        return size, cut(size, self.layout.tensor)[self.index]

    def _rows(self, name: str) -> tuple[int, tuple[range, ...]] | None:
        whole, latent = self.whole, self.whole.latent
        size = whole.head_dim if latent is None else latent.key_dim + latent.rope_dim
        queries, keys = _scaled(self.query_heads, size), _scaled(self.kv_heads, whole.head_dim)
        num_queries, num_keys = whole.num_heads * size, whole.num_kv_heads * whole.head_dim
        match _module(name):
            case "q_proj" | "q_b_proj":
                return num_queries, (queries,)
            case "kv_b_proj" if latent is not None:
                each = latent.key_dim + latent.value_dim
                return whole.num_heads * each, (_scaled(self.query_heads, each),)
            case "k_proj" | "v_proj":
                return num_keys, (keys,)
            case "qkv_proj":
                below = (queries, _moved(keys, num_queries), _moved(keys, num_queries + num_keys))
                return num_queries + 2 * num_keys, below
            case "gate_proj" | "up_proj" | "w1" | "w3":  # the latter are Mixtral's
                width, own = self._inner(name)
                return width, (own,)
            case "gate_up_proj":
                width, own = self._inner(name)
                return 2 * width, (own, _moved(own, width))
            case "sinks":
                return whole.num_heads, (self.query_heads,)
            case "embed_tokens" | "lm_head":
                return whole.vocab_size, (self.vocabulary,)
            case "q_norm" if whole.qk_norm == "width":
                return num_queries, (queries,)
            case "k_norm" if whole.qk_norm == "width":
                return num_keys, (keys,)
        return None

    def _columns(self, name: str) -> tuple[int, range] | None:
        match _module(name):
            case "o_proj":
                latent = self.whole.latent
                size = self.whole.head_dim if latent is None else latent.value_dim
                return self.whole.num_heads * size, _scaled(self.query_heads, size)
            case "down_proj" | "w2":
                return self._inner(name)
        return None


def _module(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def cut(size: int, num_parts: int) -> list[range]:
    """[0, size) in parts of nearly equal length, none empty; large ones begin at multiples of a large unit."""
    assert 0 < num_parts <= size
    unit = LARGEST_UNIT
    while unit > 1 and size < 8 * unit * num_parts:
        unit //= 2
    places = [part * size // (num_parts * unit) * unit for part in range(num_parts)]
    return [range(start, stop) for start, stop in zip(places, [*places[1:], size], strict=True)]


def stages(sizes: Sequence[int], num_stages: int) -> list[range]:
    """Contiguous ranges of things of these sizes, none empty, the largest sum of a range as small as it can be."""
    num = len(sizes)
    assert 0 < num_stages <= num
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    # least[end]: the largest sum where the first ``end`` things make the stages so far; begins: where the last begins.
    least = [float(before[end]) for end in range(num + 1)]
    begins: list[list[int]] = []
    for stage in range(1, num_stages):
        next_least, begin = [float("inf")] * (num + 1), [0] * (num + 1)
        for end in range(stage + 1, num + 1):
            next_least[end], begin[end] = min(
                (max(least[start], before[end] - before[start]), start) for start in range(stage, end)
            )
        least = next_least
        begins.append(begin)
    found, end = [], num
    for begin in reversed(begins):
        found.append(range(begin[end], end))
        end = begin[end]
    return [range(end), *reversed(found)]


def _layer_bytes(architecture: Architecture) -> list[int]:
    """As parameters; the tables at both ends count with the layer beside them."""
    sizes = [architecture.num_layer_parameters(layer) for layer in range(architecture.num_layers)]
    table = architecture.vocab_size * architecture.hidden_size
    sizes[0] += table
    sizes[-1] += table
    return sizes


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)


def _moved(places: range, by: int) -> range:
    return range(places.start + by, places.stop + by)
