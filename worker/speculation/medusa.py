"""Drafts by heads that were trained on the model itself (Medusa, Cai et al. 2024, arXiv 2401.10774): from what its last
layer says of one position, its own head tells the next token, and the n-th of these the n-th one after that.

The layout is that of the authors: config.json says ``medusa_num_heads``, and medusa_lm_head.safetensors or .pt has for
each head blocks "0.0.linear", "0.1.linear" and so on, each x + silu(W x + b), and a matrix to the vocabulary behind
them. One line of tokens is drafted, the likeliest of each head, not a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.loading import refuse_too_large
from worker.models import Decoder, ModelError
from worker.models.weights import read_json
from worker.runner import Runner
from worker.sequence import Sequence
from worker.speculation.drafter import NO_DRAFT, Draft
from worker.speculation.model import Durations
from worker.speculation.trained import tensors_of

NUM_HEADS_FIELD = "medusa_num_heads"
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True, slots=True)
class Head:
    """Of one place after the next token."""

    blocks: list[tuple[Tensor, Tensor]]
    """Each [hidden_size, hidden_size] and [hidden_size]."""
    vocabulary: Tensor
    """[vocab_size, hidden_size]"""

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size]"""
        for weight, bias in self.blocks:
            hidden = hidden + F.silu(F.linear(hidden, weight, bias))
        return F.linear(hidden, self.vocabulary)


class MedusaDrafter:
    """A Watcher; its heads read what the target's steps leave behind."""

    name = "medusa"
    is_free = False

    def __init__(self, runner: Runner, heads: Run[Head], now: Callable[[], float]) -> None:
        """``runner``: of the target, which keeps its hidden rows from now on."""
        self._target = runner.keep_hidden()
        self._heads, self._now = list(heads), now
        self._seen: dict[Sequence, tuple[int, Tensor]] = {}
        """The position of the first row, and the rows, of the last step that sampled it."""
        self._durations = Durations()

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """See Drafter."""
        return self._durations.expected_s(num_sequences, num_tokens)

    def computed(self, batch: Run[tuple[Sequence, int]]) -> None:
        """See Watcher."""

    def watch(self, sequences: Run[Sequence], rows: Run[int]) -> None:
        """See Watcher."""
        hidden = self._target.hidden
        assert hidden is not None, "the target has kept nothing"
        at = 0
        for sequence in sequences:
            end = at + 1 + len(sequence.draft_token_ids)
            # A copy, lest one that pauses keeps the rows of a whole step.
            self._seen[sequence] = len(sequence.token_ids) - 1, hidden[rows[at] : rows[end - 1] + 1].clone()
            at = end

    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        """See Drafter."""
        began_at = self._now()
        drafts = [NO_DRAFT] * len(sequences)
        places, rows = [], []
        for place, sequence in enumerate(sequences):
            begin, hidden = self._seen.get(sequence, (0, None))
            # What was computed at the last token but one is what the last one was sampled by.
            row = len(sequence.token_ids) - 2 - begin
            if hidden is not None and 0 <= row < len(hidden):
                places.append(place)
                rows.append(hidden[row])
        if not rows:
            return drafts
        num = min(max(num_tokens), len(self._heads))
        chosen = self._choose(torch.stack(rows), num)
        for place, token_ids in zip(places, chosen, strict=True):
            drafts[place] = Draft(token_ids[: num_tokens[place]], 0)
        self._durations.tell(len(rows), num, self._now() - began_at)
        return drafts

    @torch.inference_mode()
    def _choose(self, hidden: Tensor, num_tokens: int) -> list[list[int]]:
        """[n, hidden_size] -> n lists of so many tokens."""
        chosen = [head(hidden).argmax(-1) for head in self._heads[:num_tokens]]
        token_ids: list[list[int]] = torch.stack(chosen, 1).tolist()
        return token_ids

    def learn(self, sequence: Sequence) -> None:
        """See Drafter."""

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._seen.pop(sequence, None)


def is_medusa(directory: Path) -> bool:
    """Whether it has such heads rather than a model. Raises ModelError."""
    return (directory / "config.json").is_file() and NUM_HEADS_FIELD in read_json(directory / "config.json")


def load_heads(directory: Path, target: Decoder, source: str) -> list[Head]:
    """Those of a directory, for this target, which came from ``source``. Raises ModelError."""
    tensors = tensors_of(directory, _FILES, "the Medusa heads")
    size, vocab_size = target.architecture.hidden_size, target.architecture.vocab_size
    num_bytes = sum(tensor.numel() for tensor in tensors.values()) * target.dtype.itemsize
    refuse_too_large(str(directory), num_bytes, target.dtype, target.device)

    def take(name: str, *shape: int) -> Tensor:
        tensor = tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"the Medusa heads {directory} are for another model than {source}:"
                f" {name} is {list(tensor.shape)}, and {list(shape)} is wanted"
            )
        return tensor.to(target.device, target.dtype)

    heads: list[Head] = []
    while any(name.startswith(f"{len(heads)}.") for name in tensors):
        number = len(heads)
        blocks: list[tuple[Tensor, Tensor]] = []
        while f"{number}.{len(blocks)}.linear.weight" in tensors and f"{number}.{len(blocks)}.linear.bias" in tensors:
            at = f"{number}.{len(blocks)}.linear"
            blocks.append((take(f"{at}.weight", size, size), take(f"{at}.bias", size)))
        if f"{number}.{len(blocks)}.weight" not in tensors:
            raise ModelError(f"the Medusa heads {directory} lack {number}.{len(blocks)}.weight")
        heads.append(Head(blocks, take(f"{number}.{len(blocks)}.weight", vocab_size, size)))
    if tensors:
        raise ModelError(f"the Medusa heads {directory} have what is not known: {min(tensors)}")
    if not heads:
        raise ModelError(f"the Medusa heads {directory} are none")
    return heads
