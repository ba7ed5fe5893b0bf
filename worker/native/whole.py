"""The structures of a whole step, as network.h declares them; whoever fills one keeps what it points to."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from worker.native.packed import AnyMatrix


class Turning(ctypes.Structure):
    """How queries and keys are normed and turned before attention: of all layers the same."""

    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
        ("over_width", c_int32),
        ("eps", c_float),
    )


class Layer(ctypes.Structure):
    """A layer's packed matrices, and pointers to its norms (null: none) and to its part of the cache."""

    _fields_ = (
        *((name, AnyMatrix) for name in ("qkv", "output", "gate_up", "down")),
        *(
            (name, c_void_p)
            for name in (
                "attention_pre_norm",
                "attention_post_norm",
                "mlp_pre_norm",
                "mlp_post_norm",
                "query_norm",
                "key_norm",
                "keys",
                "values",
                "key_scales",
                "value_scales",
            )
        ),
        ("window", c_int64),
        ("rope", c_int64),
    )


class Network(ctypes.Structure):
    """What is the same in every step: all layers, the embedding and the head."""

    _fields_ = (
        ("turning", Turning),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("eps", c_float),
        ("activation", c_int64),
        ("norm", c_void_p),
        ("head", AnyMatrix),
        ("stored", c_int64),
    )


class Pass(ctypes.Structure):
    """One step: what goes in, where results go, and the memory that it computes in (see Library.whole_bytes)."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("rows", c_void_p),
        ("num_logits", c_int64),
        ("positions", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("logits", c_void_p),
        ("maxima", c_void_p),
        ("memory", c_void_p),
        ("groups", c_void_p),
        ("num_groups", c_int64),
        ("last_groups", c_void_p),
        ("num_last_groups", c_int64),
        ("hidden", c_void_p),
        ("taps", c_void_p),
        ("num_taps", c_int64),
        ("tapped", c_void_p),
        ("rank", c_int64),
        ("windowed", c_void_p),
    )


class Following(ctypes.Structure):
    """What several steps in a row have besides: how many, and where the tokens go that they choose."""

    _fields_ = (
        ("num_steps", c_int64),
        ("vocab_size", c_int64),
        ("chosen", c_void_p),
    )
