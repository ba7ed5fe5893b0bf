"""Filling in the middle: what comes before and after a hole as one prompt, by special tokens that a model was trained
with (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle", section 3: prefix, suffix,
middle). They are found in the tokenizer by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen's coders, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek's coders
)
ENDS = ("<|endoftext|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "▁<EOT>", "<|EOT|>")
"""With which a middle ends, besides the model's own end tokens."""


class Infill(NamedTuple):
    """A tokenizer's tokens for it."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """None where it has none."""
        for form in FORMS:
            before, after, middle = [tokenizer.token_to_id(name) for name in form]
            if before is not None and after is not None and middle is not None:
                ends = [tokenizer.token_to_id(name) for name in ENDS]
                return cls(before, after, middle, tuple([end for end in ends if end is not None]))
        return None

    def prompt(self, lead: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
        """``lead``: what the tokenizer puts before every text."""
        return [*lead, self.prefix_id, *before, self.suffix_id, *after, self.middle_id]
