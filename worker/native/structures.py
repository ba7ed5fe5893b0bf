"""What the compiled kernels are told of a step, its logits and its draws: structures that they read, and never keep."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p


class Draws(ctypes.Structure):
    """draws.h's struct of the same name; whoever fills it keeps the arrays alive."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab_size", c_int64),
        ("logits", c_void_p),
        ("maxima", c_void_p),
        ("wishes", c_char_p),
        ("chosen", c_void_p),
        ("tries", c_int64),
        ("at", c_void_p),
        ("bits", c_void_p),
        ("words", c_int64),
        ("forced", c_void_p),
    )


class Rankings(ctypes.Structure):
    """ranking.h's struct of the same name."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab_size", c_int64),
        ("places", c_int64),
        ("logits", c_void_p),
        ("maxima", c_void_p),
        ("at", c_void_p),
        ("totals", c_void_p),
        ("values", c_void_p),
        ("tokens", c_void_p),
    )


class Seen(ctypes.Structure):
    """penalties.h's struct of the same name."""

    _fields_ = (
        ("row", c_int64),
        ("count", c_int64),
        ("tokens", c_void_p),
        ("num_output", c_void_p),
        ("repetition", c_float),
        ("presence", c_float),
        ("frequency", c_float),
    )


class Step(ctypes.Structure):
    """step.h's struct of the same name."""

    held: tuple[object, ...]
    """What it points into."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("slots", c_void_p),
        ("row_stride", c_int64),
        ("num_slots", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("num_decodes", c_int64),
        ("rows", c_void_p),
        ("lengths", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("num_shares", c_int64),
        ("shares", c_void_p),
        ("sharers", c_void_p),
        ("num_chunks", c_int64),
        ("chunks", c_void_p),
        ("chunk_tables", c_void_p),
        ("chunk_table_stride", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("threads", c_int32),
        ("is_repeatable", c_int32),
    )
