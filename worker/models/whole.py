"""A decoder's whole step in one call of the compiled kernels, where they serve: nothing is left to dispatch in between.

What it computes is what ``Decoder.forward`` computes operation by operation with the same kernels, to the bit; but what
adapters add to a product of bfloat16 is rounded once with it, not after it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from worker.attention import TwoPools
from worker.attention.windowed import FULL, WINDOWED
from worker.kv_cache import KVCache
from worker.models.additions import Grouped
from worker.models.decoder import Decoder
from worker.models.decoder import Layer as Weights
from worker.models.linear import Linear
from worker.models.linear.floats import FloatLinear
from worker.models.linear.int4 import PackedInt4Linear
from worker.models.linear.int8 import Int8Linear
from worker.models.linear.plain import PlainLinear
from worker.models.ops import softcapped
from worker.native import (
    ACTIVATIONS,
    STORED_TYPES,
    TILE_LOGITS,
    FloatMatrix,
    Library,
    PackedInt4,
    PackedInt8,
    PackedMatrix,
    Step,
    huge_empty,
)
from worker.native.packed import AnyMatrix
from worker.native.whole import Following, Layer, Network, Pass, Turning

HEAD_STEP = 32
"""The kernels take heads of bfloat16 by so many dimensions."""


class Whole:
    """One decoder over one pool; not safe for two threads."""

    def __init__(self, decoder: Decoder, cache: KVCache | TwoPools, library: Library) -> None:
        """Only where it ``serves``."""
        architecture = decoder.architecture
        self._decoder, self._library = decoder, library
        self._layers = (Layer * architecture.num_layers)(
            *(
                _layer(weights, cache, number, window, rope)
                for number, (weights, window, rope) in enumerate(
                    zip(
                        decoder.layers,
                        architecture.windows,
                        architecture.layer_ropes,
                        strict=True,
                    )
                )
            )
        )
        self._cache = cache
        self._angles = [rotary.angles() for rotary in decoder.rotaries]
        pointers = c_void_p * len(self._angles)
        self._cosines = pointers(*(angles.cos.data_ptr() for angles in self._angles))
        self._sines = pointers(*(angles.sin.data_ptr() for angles in self._angles))
        head = _matrix(decoder.head)
        assert head is not None
        assert decoder.embedding is not None
        assert decoder.norm is not None
        self._network = Network(
            turning=Turning(
                architecture.num_heads,
                architecture.num_kv_heads,
                architecture.head_dim,
                architecture.ropes[0].rotary_dim,
                architecture.qk_norm == "width",
                architecture.norm_eps,
            ),
            num_layers=architecture.num_layers,
            hidden_size=architecture.hidden_size,
            layers=ctypes.addressof(self._layers),
            embedding=decoder.embedding.data_ptr(),
            embedding_scale=decoder.embedding_scale,
            eps=architecture.norm_eps,
            activation=ACTIVATIONS[architecture.activation],
            norm=decoder.norm.data_ptr(),
            head=head,
            stored=0 if cache.keeps(decoder.dtype) else STORED_TYPES[cache.keys[0].dtype],
        )
        self._memory, self._room = torch.empty(0, dtype=torch.uint8), (0, 0, 0)
        """And for how many tokens, with adapters of which rank, it was last asked for, and its address."""
        self._logits = torch.empty((0, architecture.vocab_size))
        """Where ``follow`` computes them."""
        self.adds_to_sums = any(
            isinstance(linear, PlainLinear)
            for layer in decoder.layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        """Some of what adapters add is rounded with a product, and so not as it is operation by operation."""

    @staticmethod
    def serves(decoder: Decoder, library: Library) -> bool:
        """Whether every matrix is packed for the kernels, and the kernels know everything else in between."""
        architecture, is_bfloat16 = decoder.architecture, decoder.dtype is torch.bfloat16
        linears: list[Linear | None] = [decoder.head]
        for layer in decoder.layers:
            linears += (layer.qkv, layer.output, layer.gate_up, layer.down)
        packed = [_packed(linear) for linear in linears]
        if is_bfloat16:
            gates = [_packed(layer.gate_up) for layer in decoder.layers]
            is_known = (
                library.has_whole
                and architecture.head_dim % HEAD_STEP == 0
                and not any(isinstance(each, FloatMatrix) for each in packed)
                and all(isinstance(each, PackedMatrix | PackedInt8 | PackedInt4) and each.gated for each in gates)
            )
        else:
            is_known = decoder.dtype is torch.float32
        return (
            is_known
            and decoder.shard.layout.num_ranks == 1
            and None not in packed
            and len({rope.rotary_dim for rope in architecture.ropes}) == 1
            and not architecture.sinks
        )

    def forward(
        self,
        token_ids: array[int],
        positions: array[int],
        rows: array[int],
        steps: Sequence[Step],
        additions: Grouped | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See Decoder.forward, which leaves as much behind; beside the logits the largest of each 32, as Library.maxima
        has them, where they were found. ``rows`` ascend; ``steps``: of each pool.
        """
        decoder, architecture = self._decoder, self._decoder.architecture
        for angles in self._angles:
            angles.learn(positions)
        logits = torch.empty((len(rows), architecture.vocab_size), dtype=torch.float32)
        cap = architecture.logits_softcap
        # Capped logits would have other ones.
        maxima = None if cap else torch.empty((len(rows), -(-architecture.vocab_size // TILE_LOGITS), 2))
        whole = Pass(
            token_ids=token_ids.buffer_info()[0],
            rows=rows.buffer_info()[0],
            num_logits=len(rows),
            positions=positions.buffer_info()[0],
            cosines=ctypes.addressof(self._cosines),
            sines=ctypes.addressof(self._sines),
            logits=logits.data_ptr(),
            maxima=None if maxima is None else maxima.data_ptr(),
            memory=self._room_for(len(token_ids), 0 if additions is None else additions.rank),
        )
        if len(steps) > 1:
            whole.windowed = ctypes.addressof(steps[WINDOWED])
        if additions is not None:
            last = additions.wanted(torch.from_numpy(np.array(rows)), len(token_ids))
            whole.groups, whole.num_groups = additions.groups.data_ptr(), len(additions.groups)
            whole.last_groups, whole.num_last_groups = last.groups.data_ptr(), len(last.groups)
            whole.rank = additions.rank
        if decoder.keeps_hidden:
            decoder.hidden = torch.empty((len(rows), architecture.hidden_size), dtype=decoder.dtype)
            whole.hidden = decoder.hidden.data_ptr()
        if decoder.taps:
            taps = (c_int64 * len(decoder.taps))(*decoder.taps)
            tapped = torch.empty((len(taps), len(token_ids), architecture.hidden_size), dtype=decoder.dtype)
            whole.taps, whole.num_taps, whole.tapped = ctypes.addressof(taps), len(taps), tapped.data_ptr()
            decoder.tapped = list(tapped)
        self._library.whole(decoder.dtype, self._network, steps[FULL], whole)
        return softcapped(logits, cap), maxima

    def follow(
        self,
        token_ids: array[int],
        positions: array[int],
        rows: array[int],
        first: Step,
        later: Step,
        lengths: array[int],
    ) -> list[int]:
        """A step of ``token_ids``, then several of what is likeliest after each of its ``rows`` [n], and so on.

        positions: of the first step's tokens, and behind them [num_later, n] of the later ones'; ``later``: of the
        first of these, with slots for them all; lengths [num_later, n] i32. Returns [1 + num_later, n], end to end.
        """
        vocab_size, num, num_tokens = self._decoder.architecture.vocab_size, len(rows), len(token_ids)
        chosen = (c_int64 * (num + len(lengths)))()
        for angles in self._angles:
            angles.learn(positions)
        if len(self._logits) < num:
            self._logits = torch.empty((num, vocab_size))
        own = Pass(
            token_ids=token_ids.buffer_info()[0],
            rows=rows.buffer_info()[0],
            num_logits=num,
            positions=positions.buffer_info()[0],
            cosines=ctypes.addressof(self._cosines),
            sines=ctypes.addressof(self._sines),
            logits=self._logits.data_ptr(),
            maxima=None,
            memory=self._room_for(num_tokens),
        )
        every = array("q", range(num))
        more = Pass.from_buffer_copy(own)
        more.rows, more.positions = every.buffer_info()[0], own.positions + positions.itemsize * num_tokens
        step = Step.from_buffer_copy(later)
        step.num_tokens, step.lengths = num, lengths.buffer_info()[0]
        following = Following(len(lengths) // num, vocab_size, ctypes.addressof(chosen))
        self._library.follow(self._decoder.dtype, self._network, first, own, step, more, following)
        return chosen[:]

    def _room_for(self, num_tokens: int, rank: int = 0) -> int:
        """Memory for a pass of so many tokens, with adapters of such a rank at most; its address."""
        if self._room[:2] != (num_tokens, rank):
            num_bytes = self._library.whole_bytes(self._decoder.dtype, self._network, num_tokens, rank)
            if len(self._memory) < num_bytes:
                self._memory = huge_empty((num_bytes,), torch.uint8)
            self._room = num_tokens, rank, self._memory.data_ptr()
        return self._room[2]


def _packed(linear: Linear | None) -> PackedMatrix | PackedInt8 | PackedInt4 | FloatMatrix | None:
    """What the kernels multiply by, where they take x as it is."""
    if isinstance(linear, PlainLinear | Int8Linear):
        return linear.packed
    return linear.packed if isinstance(linear, PackedInt4Linear | FloatLinear) and linear.is_in_order else None


def _matrix(linear: Linear | None) -> AnyMatrix | None:
    packed = _packed(linear)
    return None if packed is None else packed.any_matrix


def _layer(weights: Weights, cache: KVCache | TwoPools, number: int, window: int, rope: int) -> Layer:
    def pointer(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return Layer(
        qkv=_matrix(weights.qkv),
        output=_matrix(weights.output),
        gate_up=_matrix(weights.gate_up),
        down=_matrix(weights.down),
        attention_pre_norm=pointer(weights.attention_pre_norm),
        attention_post_norm=pointer(weights.attention_post_norm),
        mlp_pre_norm=pointer(weights.mlp_pre_norm),
        mlp_post_norm=pointer(weights.mlp_post_norm),
        query_norm=pointer(weights.query_norm),
        key_norm=pointer(weights.key_norm),
        keys=pointer(cache.keys[number]),
        values=pointer(cache.values[number]),
        key_scales=pointer(cache.key_scales[number]),
        value_scales=pointer(cache.value_scales[number]),
        window=window,
        rope=rope,
    )
