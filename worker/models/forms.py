"""The forms that a matrix of weights is stored in: what checkpoints are read into, and what linear/ multiplies with.

A form is data alone, on any device. It can be cut and put together without being unpacked, since matrices are fused
and shared out among ranks before anything is repacked for a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

INT4_GROUPS = (32, 64, 128)
"""Inputs that share a scale and an offset."""


@dataclass(frozen=True, slots=True)
class Plain:
    """weight [out, in] bfloat16, float16 or float32."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in]"""
        return self.weight.to(dtype)

    def rows(self, start: int, stop: int) -> Plain:
        """Of the outputs [start, stop)."""
        return Plain(self.weight[start:stop])

    def columns(self, start: int, stop: int) -> Plain:
        """Of the inputs [start, stop)."""
        return Plain(self.weight[:, start:stop])

    def to(self, device: torch.device) -> Plain:
        return Plain(self.weight.to(device))


@dataclass(frozen=True, slots=True)
class _Scaled:
    """codes [out, in] times scales [out] float32."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in]"""
        return (self.codes.float() * self.scales[:, None]).to(dtype)

    def rows(self, start: int, stop: int) -> Self:
        """Of the outputs [start, stop)."""
        return type(self)(self.codes[start:stop], self.scales[start:stop])

    def columns(self, start: int, stop: int) -> Self:
        """Of the inputs [start, stop)."""
        return type(self)(self.codes[:, start:stop], self.scales)

    def to(self, device: torch.device) -> Self:
        return type(self)(self.codes.to(device), self.scales.to(device))


@dataclass(frozen=True, slots=True)
class Int8(_Scaled):
    """codes [out, in] int8 times scales [out] float32."""


@dataclass(frozen=True, slots=True)
class Fp8(_Scaled):
    """codes [out, in] float8_e4m3fn times scales [out] float32."""


@dataclass(frozen=True, slots=True)
class Int4:
    """Four-bit codes from 0 to 15, each times the scale and plus the offset of its group of inputs.

    codes [out, in / 2] uint8: byte j holds column 2 j in its low half and column 2 j + 1 in its high one; scales and
    offsets [out, in / group] float32. Column k multiplies input ``order[k]`` (GPTQ's act-order), or input k where there
    is no order.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    group: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in], the columns in the order of the inputs."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), 2).view(len(self.codes), -1, self.group).float()
        weight = (codes * self.scales[:, :, None] + self.offsets[:, :, None]).flatten(1).to(dtype)
        if self.order is None:
            return weight
        sorted_by_input = torch.empty_like(weight)
        sorted_by_input[:, self.order] = weight
        return sorted_by_input

    def rows(self, start: int, stop: int) -> Int4:
        """Of the outputs [start, stop)."""
        return Int4(self.codes[start:stop], self.scales[start:stop], self.offsets[start:stop], self.group, self.order)

    def columns(self, start: int, stop: int) -> Int4:
        """Of the inputs [start, stop), whole groups. Raises ValueError where they are not, or lie in no order."""
        if start % self.group or stop % self.group:
            raise ValueError(f"columns {start} to {stop} cut a group of {self.group}")
        if self.order is not None:
            raise ValueError("columns in another order than the inputs cannot be cut by input")
        groups = slice(start // self.group, stop // self.group)
        return Int4(self.codes[:, start // 2 : stop // 2], self.scales[:, groups], self.offsets[:, groups], self.group)

    def to(self, device: torch.device) -> Int4:
        order = None if self.order is None else self.order.to(device)
        return Int4(self.codes.to(device), self.scales.to(device), self.offsets.to(device), self.group, order)


Form = Plain | Int8 | Int4 | Fp8


def alone(form: Form) -> Form:
    """The same with memory of its own: a cut form keeps alive all that it was cut from."""
    parts: dict[str, Any] = {field.name: getattr(form, field.name) for field in fields(form)}
    for name, part in parts.items():
        if isinstance(part, Tensor) and part.untyped_storage().nbytes() > part.nbytes:
            parts[name] = part.clone(memory_format=torch.contiguous_format)
    return type(form)(**parts)


def joined(parts: Sequence[Form]) -> Form | None:
    """One matrix of the parts below each other, or None where their forms do not go together."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Plain):
        plain = [part for part in parts if isinstance(part, Plain)]
        return Plain(torch.cat([part.weight for part in plain])) if len(plain) == len(parts) else None
    if isinstance(first, Int4):
        return _joined_int4([part for part in parts if isinstance(part, Int4)], len(parts))
    alike = [part for part in parts if isinstance(part, Int8 | Fp8) and type(part) is type(first)]
    if len(alike) < len(parts):
        return None
    return type(first)(torch.cat([part.codes for part in alike]), torch.cat([part.scales for part in alike]))


def _joined_int4(parts: list[Int4], num_parts: int) -> Int4 | None:
    if len(parts) < num_parts or len({part.group for part in parts}) > 1:
        return None
    order = parts[0].order
    for part in parts:
        if (part.order is None) != (order is None):
            return None
        if order is not None and part.order is not None and not torch.equal(order, part.order):
            return None
    return Int4(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.offsets for part in parts]),
        parts[0].group,
        order,
    )
