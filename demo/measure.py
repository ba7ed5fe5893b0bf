"""Held-out loss, exact answers by category, and how often the draft says what the model says.

An answer is exact when greedy decoding would write it token by token, end mark included: that is so just when each of
its tokens is the most likely one after the true tokens before it, so one forward pass tells.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from math import exp

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from demo.corpus import samples
from demo.network import Decoder
from demo.packing import encode, pieces, renderer

# Answers drawn at random (stories, names of colours, jokes): they have a loss but no single right answer.
OPEN_ENDED = frozenset({"story", "joke", "unknown", "colours", "goodbye", "thanks", "greeting"})


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out conversation; learned[i] tells whether token i is the assistant's."""

    category: str
    token_ids: list[int]
    learned: list[bool]


@dataclass(frozen=True, slots=True)
class Result:
    loss: float
    """Mean over the assistant's tokens, in nats."""
    token_accuracy: float
    exact: dict[str, tuple[int, int]]
    """category -> (exact answers, conversations)."""
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return exp(self.loss)

    @property
    def exact_share(self) -> float:
        return sum(right for right, _ in self.exact.values()) / max(1, sum(total for _, total in self.exact.values()))


@dataclass(frozen=True, slots=True)
class Measured:
    """Both checkpoints on the same conversations, and how often they agree."""

    model: Result
    draft: Result
    agreement: float


def held_out(tokenizer: Tokenizer, number: int, seed: int = 0) -> list[HeldOut]:
    render = renderer()
    drawn = islice(samples(seed, held_out=True), number)
    return [HeldOut(sample.category, *encode(tokenizer, pieces(render, sample))) for sample in drawn]


def groups(conversations: list[HeldOut], max_tokens: int = 8192) -> list[list[HeldOut]]:
    """Conversations of similar length together, so that little is padding."""
    made: list[list[HeldOut]] = [[]]
    for conversation in sorted(conversations, key=lambda c: len(c.token_ids)):
        if (len(made[-1]) + 1) * len(conversation.token_ids) > max_tokens:
            made.append([])
        made[-1].append(conversation)
    return [group for group in made if group]


@torch.no_grad()
def measure(decoder: Decoder, conversations: list[HeldOut]) -> Result:
    total_loss, num_right, num_tokens = 0.0, 0, 0
    exact: dict[str, list[bool]] = defaultdict(list)
    for group in groups(conversations):
        longest = max(len(c.token_ids) for c in group)
        token_ids = torch.zeros(len(group), longest, dtype=torch.long)
        learned = torch.zeros(len(group), longest, dtype=torch.bool)
        for row, conversation in enumerate(group):
            token_ids[row, : len(conversation.token_ids)] = torch.tensor(conversation.token_ids)
            learned[row, : len(conversation.token_ids)] = torch.tensor(conversation.learned)
        logits = decoder.logits(decoder(token_ids[:, :-1])).float()
        wanted, mask = token_ids[:, 1:], learned[:, 1:]
        total_loss += F.cross_entropy(logits[mask], wanted[mask], reduction="sum").item()
        right = (logits.argmax(-1) == wanted) | ~mask
        num_right += int((right & mask).sum())
        num_tokens += int(mask.sum())
        for row, conversation in enumerate(group):
            if conversation.category not in OPEN_ENDED:
                exact[conversation.category].append(bool(right[row].all()))
    counts = {category: (sum(rights), len(rights)) for category, rights in sorted(exact.items())}
    return Result(total_loss / num_tokens, num_right / num_tokens, counts, num_tokens)


@torch.no_grad()
def greedy(decoder: Decoder, prompt: list[int], stop: int, max_tokens: int) -> list[int]:
    """The most likely continuation, computed anew for each token: slow and obvious. Ends with `stop` when reached."""
    written: list[int] = []
    while len(written) < max_tokens and (not written or written[-1] != stop):
        hidden = decoder(torch.tensor([prompt + written]))[0, -1]
        written.append(int(decoder.logits(hidden).argmax()))
    return written


@torch.no_grad()
def agreement(decoder: Decoder, draft: Decoder, conversations: list[HeldOut], stop: int, max_tokens: int = 64) -> float:
    """The share of the model's own greedy tokens that the draft, given the same text, would have written as well."""
    agreed, total = 0, 0
    for conversation in conversations:
        prompt = conversation.token_ids[: conversation.learned.index(True)]
        written = greedy(decoder, prompt, stop, max_tokens)
        hidden = draft(torch.tensor([prompt + written[:-1]]))[0, len(prompt) - 1 :]
        agreed += int((draft.logits(hidden).argmax(-1) == torch.tensor(written)).sum())
        total += len(written)
    return agreed / total


def measure_both(model: Decoder, draft: Decoder, conversations: list[HeldOut], stop: int) -> Measured:
    few = conversations[: max(1, len(conversations) // 20)]
    return Measured(measure(model, conversations), measure(draft, conversations), agreement(model, draft, few, stop))
