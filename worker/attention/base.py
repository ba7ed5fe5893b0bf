"""What every attention is given and gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from worker.transfer import sent

Numbers = npt.NDArray[np.int32]
NONE: Numbers = np.empty(0, dtype=np.int32)


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


def slots_of(extents: Sequence[Extent], block_size: int) -> array[int]:
    """i64: where in the pool each row's key and value go."""
    slots = array("q")
    for _, num_tokens, start, block_ids in extents:
        if num_tokens == 1:
            slots.append(block_ids[start // block_size] * block_size + start % block_size)
        else:
            end = start + num_tokens
            for block in range(start // block_size, -(-end // block_size)):
                begin = block * block_size
                at = block_ids[block] * block_size - begin  # of position 0, if the block were as long
                slots.extend(range(at + max(start, begin), at + min(end, begin + block_size)))
    return slots


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

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> Plan:
        """See Backend. One upload."""
        outline = self.outline(extents)
        return outline.plan(slots, sent(outline.numbers, slots.device))


@dataclass(frozen=True, slots=True)
class _Unsent:
    """Of a Backend that sends what it wants by itself."""

    backend: Backend
    extents: Sequence[Extent]

    @property
    def numbers(self) -> Numbers:
        return NONE

    def plan(self, slots: Tensor, numbers: Tensor) -> Plan:
        return self.backend.plan(self.extents, slots)


def outlined(backend: Backend, extents: Sequence[Extent]) -> Outline:
    """By any backend."""
    return backend.outline(extents) if isinstance(backend, Outlining) else _Unsent(backend, extents)


class Fixed(Plan, Protocol):
    """A Plan to capture: a step is what lies in its places when it is replayed."""

    def numbers(self, extents: Sequence[Extent], tables_at: int = 0) -> Sequence[Numbers]:
        """What these have to lie in its places, part behind part; ``tables_at``: so many numbers of others come before
        the last part, which are the block tables."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the steps that one captured plan serves."""

    num_rows: int
    num_sequences: int
    """At most."""
    num_tokens: int = 0
    """Of each of them, at most: a decode has 1, a draft to verify one more than it has; 0: any, so chunks of prompts
    are among them."""


class Fixing(Outlining):
    """A Backend whose steps can be captured."""

    max_mixed_tokens: int
    """Of a step that has chunks of prompts: what captured plans are for."""

    @abstractmethod
    def fixed(self, shape: Shape, slots: Tensor, places: Tensor) -> Fixed:
        """A plan to capture. A step is what lies in slots [num_rows] i64 (below 0: the row is padding, its key and
        value are not kept) and in places [any] i32 (what ``Fixed.numbers`` says) when it is replayed.
        """

    @abstractmethod
    def num_places(self, shape: Shape, num_blocks: int) -> int:
        """That such a step takes, with so many blocks in all of its tables."""
