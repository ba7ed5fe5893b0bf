"""The vocabulary in tiles of 64 neighbouring tokens and the largest logit of each: most of it need never be looked at.

The maxima cost one pass at memory speed (an argmax over the same row takes eight times as long on a CPU). Whatever is
asked next, the greedy token, the k largest, the nucleus, the winner of a draw, visits the few tiles that can matter,
and knows from the maxima when it has seen enough. A maximum also carries every NaN and +inf of its tile, so unusable
rows show without another pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTH = 64


class Tiles:
    """A batch of logits, tiled. Nothing is copied when the vocabulary is a multiple of 64 (as real ones are)."""

    def __init__(self, logits: Tensor) -> None:
        """logits [n, vocab_size] f32, contiguous; tokens that do not exist count as -inf."""
        n, vocab_size = logits.shape
        self.num_tiles = -(-vocab_size // WIDTH)
        padded = pad(logits, (0, missing), value=-torch.inf) if (missing := -vocab_size % WIDTH) else logits
        self.values = padded.view(n, self.num_tiles, WIDTH)
        self.maxima = self.values.amax(-1)
        """[n, num_tiles]"""
        self.largest = self.maxima.amax(-1)
        """[n]: NaN or infinite where the row is not a distribution."""

    def argmax(self) -> Tensor:
        """[n] i64: each row's likeliest token, the lowest id among equals."""
        tile = self.maxima.argmax(-1)
        rows = torch.arange(len(tile), device=tile.device)
        return tile * WIDTH + self.open(rows, tile).argmax(-1)

    def at(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """The logits of one token in each of rows [m] -> [m] f32."""
        return self.values[rows, token_ids // WIDTH, token_ids % WIDTH]

    def open(self, rows: Tensor, tiles: Tensor) -> Tensor:
        """The logits of tiles [...] i64 of rows, which broadcast with them -> [..., 64] f32, a copy."""
        # Whole tiles by one index are copied as such; two indices would be walked logit by logit.
        flat = (rows * self.num_tiles + tiles).flatten()
        return self.values.view(-1, WIDTH).index_select(0, flat).view(*tiles.shape, WIDTH)

    def whole(self, rows: Tensor) -> Tensor:
        """Rows [m] -> [m, num_tiles, 64] f32, a copy."""
        return self.values.index_select(0, rows)

    def largest_tiles(self, rows: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """The tiles with the ``num`` largest maxima, in order of id, for rows [m].

        -> tiles [m, num] i64, and [m] the largest maximum among all others (-inf when there are none).
        """
        if num >= self.num_tiles:
            tiles = torch.arange(self.num_tiles, device=rows.device).expand(len(rows), -1)
            return tiles, torch.full((len(rows),), -torch.inf, device=rows.device)
        maxima, tiles = self.maxima[rows].topk(num + 1)
        return tiles[:, :num].sort(-1).values, maxima[:, num]

    def leading(self, rows: Tensor, num: int) -> Tensor:
        """The ``num`` largest logits of rows [m], largest first -> [m, num] f32. ``num`` tiles hold them."""
        tiles, _ = self.largest_tiles(rows, num)
        return self.open(rows[:, None], tiles).flatten(1).topk(num).values

    def likeliest(self, num: int) -> tuple[Tensor, Tensor]:
        """The ``num`` largest logits of every row, largest first, of equal ones the lowest id first, and their token
        ids.

        -> [n, num] f32, [n, num] i64
        """
        rows = torch.arange(len(self.largest), device=self.largest.device)
        tiles = self._first_tiles(min(num, self.num_tiles))
        values, at = self.open(rows[:, None], tiles).flatten(1).sort(stable=True, dim=-1, descending=True)
        at = at[:, :num]
        return values[:, :num], tiles.gather(1, at // WIDTH) * WIDTH + at % WIDTH

    def _first_tiles(self, num: int) -> Tensor:
        """Those with the largest maxima, of equal ones the first: what topk takes of those is anybody's guess. In order
        of id -> [n, num] i64."""
        # Floats with one zero, as integers of the same order.
        bits = (self.maxima + 0.0).view(torch.int32).long()
        ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
        keys = (ordered << 32) - torch.arange(self.num_tiles, device=bits.device)
        return keys.topk(num).indices.sort(-1).values
