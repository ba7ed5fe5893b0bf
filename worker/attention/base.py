"""What every attention is given and gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become weights."""

    scale: float
    windows: tuple[int, ...]
    """A layer: a token sees itself and the ``window - 1`` tokens before it; 0: all of them; negative: those from the
    last multiple of ``-window`` on (only where a backend says so)."""
    softcap: float = 0.0
    """Scores become cap * tanh(scores / cap); 0: off."""
    sinks: tuple[Tensor, ...] = ()
    """A layer, [num_heads] f32: a score that is in each softmax beside the keys' and belongs to no value. Empty:
    none."""

    def sinks_of(self, layer: int) -> Tensor | None:
        """None: there are none."""
        return self.sinks[layer] if self.sinks else None

    def of(self, layers: Sequence[int]) -> Scores:
        """Those of these layers only."""
        sinks = tuple(self.sinks[layer] for layer in layers) if self.sinks else ()
        return replace(self, windows=tuple(self.windows[layer] for layer in layers), sinks=sinks)


class Extent(NamedTuple):
    """One sequence's part of a step: rows [row, row + num_tokens) of the batch are its positions [start, start +
    num_tokens).
    """

    row: int
    num_tokens: int
    start: int
    block_ids: Sequence[int]


class Plan(Protocol):
    """Attention of one step."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_kv_heads, head_dim] ->
        [num_tokens, num_heads * head_dim].

        Keys and values are written into their slots first. Query head h reads KV head h // (num_heads / num_kv_heads).
        """
        ...


class Backend(Protocol):
    """Attention over one pool."""

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> Plan:
        """slots [num_tokens] i64: where in the pool each row's key and value go. No two rows share one."""
        ...


class Outline(Protocol):
    """A Plan as far as the host makes it."""

    @property
    def numbers(self) -> Numbers:
        """[n]: what it wants on the device."""
        ...

    def plan(self, slots: Tensor, numbers: Tensor) -> Plan:
        """``slots`` as for a Backend; ``numbers`` [n] i32 are there."""
        ...


class Outlining(ABC):
    """A Backend that lets what it wants on the device travel with the rest of a step. No Protocol, of which it would
    take 10 us a step to ask whether a backend is one.
    """

    @abstractmethod
    def outline(self, extents: Sequence[Extent]) -> Outline: ...
