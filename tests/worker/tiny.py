"""Tiny random checkpoints, written by transformers as it writes any other, and walks over them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from worker.adapters import Adapter
from worker.inputs import Span
from worker.runner import Runner

VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
BLOCK_SIZE = 8


def checkpoint(directory: Path, architecture: str, seed: int = 0, shard_size: str | None = None, **changes: Any) -> Any:
    """A random float32 model of this architecture, saved to ``directory``; ``changes`` are fields of its configuration.

    Weights are larger than an untrained model's, so that attention is far from uniform and greedy tokens are far from
    ties.
    """
    torch.manual_seed(seed)
    kind = getattr(transformers, architecture)
    config = kind.config_class(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    model = kind(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
    model.save_pretrained(directory, **({"max_shard_size": shard_size} if shard_size else {}))
    return model


@torch.inference_mode()
def oracle_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]"""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


@dataclass
class Walk:
    """Sequences that grow greedily through a runner, cut, mixed and placed as ``chance`` says."""

    runner: Runner
    prompts: list[list[int]]
    num_new: int
    chance: random.Random
    adapters: Sequence[Adapter | None] = ()
    """Of each prompt; none given: the base."""
    token_ids: list[list[int]] = field(init=False)
    logits: list[list[torch.Tensor]] = field(init=False)
    """For each sequence, the logits after each of its tokens in turn."""

    def __post_init__(self) -> None:
        free = list(range(self.runner.num_blocks))
        self.chance.shuffle(free)
        self.token_ids = [list(prompt) for prompt in self.prompts]
        self.logits = [[] for _ in self.prompts]
        tables = []
        for prompt in self.prompts:
            num_blocks = -(-(len(prompt) + self.num_new) // BLOCK_SIZE)
            tables.append([free.pop() for _ in range(num_blocks)])
            if self.chance.random() < 0.5:
                tables[-1].sort()
        done = [0] * len(self.prompts)
        ends = [len(prompt) + self.num_new - 1 for prompt in self.prompts]
        while any(map(int.__lt__, done, ends)):
            behind = [index for index, end in enumerate(ends) if done[index] < end]
            chosen = self.chance.sample(behind, self.chance.randint(1, len(behind)))
            spans = []
            for index in chosen:
                todo = self.token_ids[index][done[index] :]
                length = self.chance.choice((1, self.chance.randint(1, len(todo)), len(todo)))
                adapter = self.adapters[index] if self.adapters else None
                spans.append(Span(todo[:length], done[index], tables[index], length, adapter=adapter))
            rows = iter(self.runner.forward(spans).split([len(span.token_ids) for span in spans]))
            for index, span in zip(chosen, spans, strict=True):
                part = next(rows)
                self.logits[index] += part
                done[index] += len(span.token_ids)
                if done[index] == len(self.token_ids[index]):
                    self.token_ids[index].append(int(part[-1].argmax()))
