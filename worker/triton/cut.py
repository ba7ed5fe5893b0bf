"""How a matrix times some tokens is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from worker.triton.device import num_processors

_PER_PROCESSOR = 2
"""Programs that fit at once, so that the loads of one hide the waits of the other."""
STEP_BYTES = 256
"""Of one token's inputs: where a program takes more of them at once, only smaller tiles have room. sm_89 has least
shared memory, 99 KiB a program."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A program has a tile of outputs and tokens, and of their inputs one of num_splits parts."""

    block_n: int
    """Outputs."""
    block_m: int
    """Tokens."""
    grid: tuple[int, int, int]
    steps_each: int
    """Of the loop over the inputs."""

    @property
    def num_splits(self) -> int:
        return self.grid[2]

    @property
    def num_stages(self) -> int:
        """Of the loop's loads, under way at once: smaller tiles leave memory for more."""
        return 4 if self.block_m < 64 else 3

    @property
    def num_warps(self) -> int:
        """A large tile's numbers do not fit into the registers of four."""
        return 4 if self.block_m < 64 else 8

    @classmethod
    def of(
        cls, num_tokens: int, num_outputs: int, num_steps: int, least_steps: int, step_bytes: int, device: torch.device
    ) -> Cut:
        """Where there are too few tiles to keep the device busy, their inputs are dealt to several programs, of at
        least least_steps steps each: with fewer, adding up costs more than is gained. step_bytes: of one token's
        inputs, that a step takes."""
        block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 or step_bytes > STEP_BYTES else 64
        block_n = 64 if block_m < 64 else 128
        tiles = triton.cdiv(num_outputs, block_n), triton.cdiv(num_tokens, block_m)
        num_splits = min(_PER_PROCESSOR * num_processors(device) // (tiles[0] * tiles[1]), num_steps // least_steps)
        steps_each = triton.cdiv(num_steps, max(1, num_splits))
        return cls(block_n, block_m, (*tiles, triton.cdiv(num_steps, steps_each)), steps_each)
