"""The compiled kernels as functions over tensors."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from worker.native.floats import FloatMatrix
from worker.native.of_logits import OfLogits
from worker.native.outcome import may_fail
from worker.native.packed import PANEL, Matrix, PackedInt4, PackedInt8, PackedMatrix
from worker.native.pages import huge_empty
from worker.native.structures import Step
from worker.native.whole import Following, Network, Pass, Turning

MAX_HEAD_DIM = 1024
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "clamped_swiglu": 4}
DTYPES = (torch.bfloat16, torch.float32)
STORED_TYPES = {torch.bfloat16: 1, torch.int8: 2}
"""What a pool may hold that is not of the queries' type."""
RESULTS = {torch.bfloat16: 0, torch.float32: 1}
GATED = 2
"""What a product is made into."""

MAX_EXCEPTIONS = 1 / 1024
"""Of the weights of a matrix that is coded, and ALLOWED_EXCEPTIONS besides."""
ALLOWED_EXCEPTIONS = 64


class Library(OfLogits):
    """Tensors are bfloat16 or float32, contiguous where nothing else is said; norm weights, cos and sin are float32.

    What needs memory beside its results raises MemoryError where there is none; what it was to write counts for nothing
    then.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        loaded = ctypes.CDLL(path)
        super().__init__(loaded)
        self.path = path
        self._add_norm = loaded.penstock_add_norm
        self._add_norm.argtypes = (c_int, *(c_void_p,) * 5, c_int64, c_int64, c_float, c_int)
        self._turn = loaded.penstock_turn
        self._turn.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, *(c_void_p,) * 4, c_int)
        self._gate = loaded.penstock_gate
        self._gate.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int, c_int)
        self._attend = loaded.penstock_attend
        self._attend.argtypes = (c_int, c_int, c_void_p, *(c_void_p,) * 7, c_int64, c_void_p, c_void_p)
        self._linear_int8, self._linear_int4 = loaded.penstock_linear_int8, loaded.penstock_linear_int4
        for function in (self._linear_int8, self._linear_int4):
            function.argtypes = (c_int, c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int)
        for function in (self._add_norm, self._turn, self._gate):
            function.restype = None
        failing = [self._attend, self._linear_int8, self._linear_int4]
        self.has_tiles = bool(loaded.penstock_has_tiles())
        """Whether they multiply bfloat16 in tiles."""
        self.has_linear = bool(loaded.penstock_has_linear())
        """Whether there are ``linear`` and ``gated``."""
        if self.has_linear:
            self._linear = loaded.penstock_linear
            self._linear.argtypes = (c_void_p, c_int64, c_void_p, c_int, c_int, c_void_p, c_void_p, c_int)
            failing.append(self._linear)
            self._coded_bytes = loaded.penstock_coded_bytes
            self._coded_bytes.argtypes, self._coded_bytes.restype = (c_void_p,), c_int64
            self._code = loaded.penstock_code
            self._code.argtypes = (*(c_void_p,) * 3, c_int64, *(c_void_p,) * 3, c_int)
            failing.append(self._code)
        self.has_whole = bool(loaded.penstock_has_whole())
        """Whether there are ``whole`` and ``follow`` of bfloat16; those of float32 there always are."""
        self._whole = loaded.penstock_whole
        self._whole.argtypes = (c_int, *(c_void_p,) * 3)
        self._follow = loaded.penstock_follow
        self._follow.argtypes = (c_int, *(c_void_p,) * 6)
        failing += [self._whole, self._follow]
        self._whole_bytes = loaded.penstock_whole_bytes
        self._whole_bytes.argtypes = (c_int, c_void_p, c_int64, c_int64)
        self._whole_bytes.restype = c_int64
        self.has_int8 = bool(loaded.penstock_has_int8())
        """Whether ``linear_rounded`` computes anything here."""
        self._linear_as_floats = loaded.penstock_linear_as_floats
        self._linear_as_floats.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int)
        self.float_panel = int(loaded.penstock_float_panel())
        """Columns of a panel of what ``linear_as_floats`` multiplies."""
        self._adapt = loaded.penstock_adapt
        self._adapt.argtypes = (c_void_p, *(c_int64,) * 3, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int)
        may_fail(*failing, self._linear_as_floats, self._adapt)
        self.has_adapt = bool(loaded.penstock_has_adapt())
        """Whether ``adapt`` does."""

    def add_norm(self, x: Tensor, delta: Tensor | None, post: Tensor | None, pre: Tensor | None, eps: float) -> Tensor:
        """x [rows, size] += delta, normed by ``post`` where there is one; returns x normed by ``pre``, or x itself."""
        out = x if pre is None else torch.empty_like(x)
        self._add_norm(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            None if post is None else post.data_ptr(),
            None if pre is None else pre.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
            torch.get_num_threads(),
        )
        return out

    def turn(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        over_width: bool,
        eps: float,
    ) -> None:
        """Norms (where there are weights) and turns the queries and keys of qkv [rows, heads * head_dim] in place."""
        how = Turning(num_heads, num_kv_heads, head_dim, cos.shape[1], over_width, eps)
        self._turn(
            qkv.dtype is torch.bfloat16,
            ctypes.addressof(how),
            qkv.data_ptr(),
            qkv.shape[0],
            qkv.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            torch.get_num_threads(),
        )

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [rows, 2 * size] -> [rows, size]"""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        self._gate(
            gate_up.dtype is torch.bfloat16,
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            ACTIVATIONS[activation],
            torch.get_num_threads(),
        )
        return out

    def code(self, weight: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor, Tensor] | None:
        """weight [columns, size] bfloat16 in twelve bits each, as coded.h has them: panels uint8, exceptions [count] of
        8 bytes and [panels + 1] where those of each panel begin, i64; None where exceptions are more than a few.
        ``matrix``: its sizes.
        """
        panels = huge_empty((self._coded_bytes(ctypes.addressof(matrix)),), torch.uint8)
        exceptions = torch.empty(ALLOWED_EXCEPTIONS + int(weight.numel() * MAX_EXCEPTIONS), dtype=torch.int64)
        firsts = torch.empty(-(-matrix.columns // PANEL) + 1, dtype=torch.int64)
        count = c_int64()
        self._code(
            weight.data_ptr(),
            ctypes.addressof(matrix),
            panels.data_ptr(),
            len(exceptions),
            exceptions.data_ptr(),
            firsts.data_ptr(),
            ctypes.addressof(count),
            torch.get_num_threads(),
        )
        return None if count.value < 0 else (panels, exceptions[: count.value].clone(), firsts)

    def linear(self, x: Tensor, matrix: PackedMatrix, dtype: torch.dtype, maxima: Tensor | None = None) -> Tensor:
        """x [rows, size] bfloat16 times the matrix -> [rows, columns], bfloat16, or float32 for the same values; then
        ``maxima`` may be filled in, too (see the method of that name).
        """
        out = x.new_empty((x.shape[0], matrix.columns), dtype=dtype)
        self._multiply(x, matrix, RESULTS[dtype], 0, out, maxima)
        return out

    def gated(self, x: Tensor, matrix: PackedMatrix, activation: str) -> Tensor:
        """``gate`` of ``linear``, for a matrix that is gated -> [rows, columns / 2] bfloat16"""
        assert matrix.gated
        out = x.new_empty((x.shape[0], matrix.columns // 2))
        self._multiply(x, matrix, GATED, ACTIVATIONS[activation], out)
        return out

    def _multiply(
        self, x: Tensor, matrix: PackedMatrix, result: int, activation: int, out: Tensor, maxima: Tensor | None = None
    ) -> None:
        self._linear(
            x.data_ptr(),
            x.shape[0],
            ctypes.addressof(matrix.struct),
            result,
            activation,
            out.data_ptr(),
            None if maxima is None else maxima.data_ptr(),
            torch.get_num_threads(),
        )

    def whole_bytes(self, dtype: torch.dtype, network: Network, num_tokens: int, rank: int) -> int:
        """Of memory that ``whole`` computes so many tokens in, with adapters of such a rank at most."""
        return int(self._whole_bytes(dtype is torch.bfloat16, ctypes.addressof(network), num_tokens, rank))

    def whole(self, dtype: torch.dtype, network: Network, step: Step, whole: Pass) -> None:
        """A step from token ids to logits, activations in ``dtype``. Of bfloat16 head_dim is a multiple of 32, and the
        gate-up matrices are gated; of float32 there are no adapters."""
        addresses = map(ctypes.addressof, (network, step, whole))
        self._whole(dtype is torch.bfloat16, *addresses)

    def follow(
        self,
        dtype: torch.dtype,
        network: Network,
        first: Step,
        whole: Pass,
        step: Step,
        more: Pass,
        following: Following,
    ) -> None:
        """Several such steps, see follow.h."""
        addresses = map(ctypes.addressof, (network, first, whole, step, more, following))
        self._follow(dtype is torch.bfloat16, *addresses)

    def linear_rounded(self, x: Tensor, matrix: PackedInt8 | PackedInt4, dtype: torch.dtype) -> Tensor:
        """x [rows, size] bfloat16 or float32, rounded to int8 row by row, or group by group, times the matrix ->
        [rows, columns] in ``dtype``, which is x's own or float32.
        """
        out = x.new_empty((len(x), matrix.columns), dtype=dtype)
        multiply = self._linear_int8 if isinstance(matrix, PackedInt8) else self._linear_int4
        multiply(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            len(x),
            ctypes.addressof(matrix.struct),
            RESULTS[dtype],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def linear_as_floats(self, x: Tensor, matrix: FloatMatrix) -> Tensor:
        """x [rows, size] float32 times the matrix -> [rows, columns] float32."""
        out = x.new_empty((len(x), matrix.columns))
        self._linear_as_floats(
            x.data_ptr(), len(x), ctypes.addressof(matrix.struct), out.data_ptr(), torch.get_num_threads()
        )
        return out

    def adapt(self, groups: Tensor, rank: int, first: int, x: Tensor, y: Tensor) -> None:
        """y [rows, columns] += what adapters make of x [rows, size], in place, both bfloat16; size is even.

        groups [num_groups, 3] i64: owners.h's ``Group``, and the largest of their ranks; ``first``: of the product's
        factors.
        """
        assert x.is_contiguous()
        assert y.is_contiguous()
        num_threads = torch.get_num_threads()
        of_x, of_y = (x.data_ptr(), *x.shape), (y.data_ptr(), y.shape[1])
        self._adapt(groups.data_ptr(), len(groups), rank, first, *of_x, *of_y, num_threads)

    def attend(
        self,
        step: Step,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        window: int,
        out: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Writes all rows' keys and values into the caches, then fills the rows of out, the decodes' and the chunks'.

        queries, keys and values are [num_tokens, heads, head_dim] with ``step.row_stride`` elements between rows; out
        is [num_tokens, num_heads * head_dim]. Caches are of the queries' type, or of ``STORED_TYPES``; those of int8
        have scales [num_kv_heads, num_slots] f32. sinks [num_heads] f32: see Scores.
        """
        own = key_cache.dtype
        self._attend(
            queries.dtype is torch.bfloat16,
            0 if own is queries.dtype else STORED_TYPES[own],
            ctypes.addressof(step),
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            None if key_scales is None else key_scales.data_ptr(),
            None if value_scales is None else value_scales.data_ptr(),
            window,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
