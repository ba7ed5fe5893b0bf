"""Drafts by a layer that was trained on the model itself (EAGLE-3, Li et al. 2025, arXiv 2503.01840): it reads what
goes into three of the model's layers at a position, and the token after it, and writes on from there in a vocabulary of
its own.

The layout is that of the authors: config.json says ``draft_vocab_size``; ``fc`` makes one row of three, ``midlayer`` is
a Llama layer whose attention reads the token's embedding beside that row, ``norm`` and ``lm_head`` follow, and ``d2t``
says how far a draft's token is from the model's. What comes out of the layer stands for the row of the next position.
One line of tokens is drafted, not a tree.

Positions whose rows nobody has seen, since their keys and values were found in the prefix cache or belong to a fork's
leader, are not attended to.
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
from worker.models import Architecture, Decoder, ModelError
from worker.models.families import architecture_of
from worker.models.rope import Rotary
from worker.models.weights import read_json
from worker.sequence import Sequence
from worker.speculation.drafter import NO_DRAFT, Draft
from worker.speculation.model import Durations
from worker.speculation.trained import tensors_of

SIZE_FIELD = "draft_vocab_size"
TAPS_FIELD = "eagle_aux_hidden_state_layer_ids"
MAX_CONTEXT = 1024
"""Positions of one sequence that are attended to, the latest: what is older is dropped."""
_FILES = ("model.safetensors", "pytorch_model.bin")
_NUM_TAPS = 3
_NOT_NEEDED = ("t2d", "rotary_emb.inv_freq")
"""Ends the names of tensors that follow from others."""


@dataclass(frozen=True, slots=True)
class Eagle:
    """The layer and what is around it, for one target."""

    target: Decoder
    architecture: Architecture
    weights: dict[str, Tensor]
    rotary: Rotary

    def fused(self, tapped: Run[Tensor]) -> Tensor:
        """Each [n, target's hidden_size] -> [n, hidden_size]"""
        return self._product(torch.cat(list(tapped), -1), "fc")

    def layer(self, hidden: Tensor, token_ids: Tensor, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """[n, hidden_size] and the n tokens that follow them -> the same shape; with the keys and values [num_kv_heads,
        n, head_dim] of these positions behind those that were there."""
        own, table = self.architecture, self.weights.get("embed_tokens.weight", self.target.embedding)
        assert table is not None
        embedded = self._normed(F.embedding(token_ids, table), "midlayer.input_layernorm")
        x = torch.cat((embedded, self._normed(hidden, "midlayer.hidden_norm")), -1)
        cos, sin = self.rotary.at(torch.arange(start, start + len(hidden), device=hidden.device))
        heads = [
            self._product(x, f"midlayer.self_attn.{name}_proj").view(len(x), -1, own.head_dim).transpose(0, 1)
            for name in "qkv"
        ]
        query, key = ((each * cos + each.roll(own.head_dim // 2, -1) * sin).to(hidden.dtype) for each in heads[:2])
        num_before = keys.shape[1]
        keys, values = torch.cat((keys, key), 1), torch.cat((values, heads[2]), 1)
        sees = torch.ones(len(x), keys.shape[1], dtype=torch.bool, device=x.device).tril(num_before)
        mixed = F.scaled_dot_product_attention(query[None], keys[None], values[None], sees, enable_gqa=True)[0]
        mixed = mixed.transpose(0, 1).reshape(len(x), -1)
        hidden = hidden + self._product(mixed, "midlayer.self_attn.o_proj")
        x = self._normed(hidden, "midlayer.post_attention_layernorm")
        gated = F.silu(self._product(x, "midlayer.mlp.gate_proj")) * self._product(x, "midlayer.mlp.up_proj")
        return hidden + self._product(gated, "midlayer.mlp.down_proj"), keys, values

    def choose(self, hidden: Tensor) -> Tensor:
        """[1, hidden_size] -> [1], the likeliest token, in the target's vocabulary."""
        chosen = self._product(self._normed(hidden, "norm"), "lm_head").argmax(-1)
        return chosen + self.weights["d2t"][chosen]

    def _product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.architecture.norm_eps)
        return self.weights[f"{name}.weight"] * wide.to(x.dtype)


class _Text:
    """One sequence: rows of positions that follow each other, and of the first of them keys and values."""

    __slots__ = ("keys", "num_rows", "rows", "start", "values")

    def __init__(self, start: int, keys: Tensor) -> None:
        self.start = start
        """The position of the first row that is not in ``keys``."""
        self.rows: list[Tensor] = []
        """Those, as steps have left them: they are put together where a draft is asked for, and not in each step."""
        self.num_rows = 0
        self.keys = self.values = keys

    def add(self, rows: Tensor) -> None:
        """Behind those that there are."""
        self.rows.append(rows)
        self.num_rows += len(rows)

    def keep_first(self, num: int) -> None:
        """At most so many; the others are gone."""
        while self.num_rows > num:
            last = self.rows.pop()
            self.num_rows -= len(last)
            if self.num_rows < num:
                self.add(last[: num - self.num_rows])

    def keep_last(self, num: int) -> None:
        """As ``keep_first``."""
        while self.num_rows > num:
            first = self.rows[0]
            num_gone = min(len(first), self.num_rows - num)
            self.rows[:1] = [first[num_gone:]] if num_gone < len(first) else []
            self.num_rows -= num_gone
            self.start += num_gone


class EagleDrafter:
    """A Watcher."""

    name = "eagle"
    is_free = False

    def __init__(self, eagle: Eagle, now: Callable[[], float]) -> None:
        """Its target keeps what is read of it from now on."""
        self._eagle, self._now = eagle, now
        eagle.target.taps = taps_of(eagle.target)
        own = eagle.architecture
        size = (own.num_kv_heads, 0, own.head_dim)
        self._nothing = torch.empty(size, dtype=eagle.target.dtype, device=eagle.target.device)
        self._texts: dict[Sequence, _Text] = {}
        self._durations = Durations()

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """See Drafter."""
        return self._durations.expected_s(num_sequences, num_tokens)

    @torch.inference_mode()
    def computed(self, batch: Run[tuple[Sequence, int]]) -> None:
        """See Watcher."""
        fused = self._eagle.fused(self._eagle.target.tapped)
        at = 0
        for sequence, num_tokens in batch:
            start, num = sequence.num_computed, num_tokens + len(sequence.draft_token_ids)
            num_kept = min(num, MAX_CONTEXT)
            at += num
            # A copy, lest one that pauses keeps the rows of a whole step.
            rows = fused[at - num_kept : at].clone()
            text = self._texts.get(sequence)
            if text is None or num_kept < num or not text.start <= start <= text.start + text.num_rows:
                text = self._texts[sequence] = _Text(start + num - num_kept, self._nothing)
            else:
                # What was computed of a draft that was wrong is computed again, and replaced.
                text.keep_first(start - text.start)
            text.add(rows)
            if text.num_rows > MAX_CONTEXT:
                text.keep_last(MAX_CONTEXT)
                text.keys = text.values = self._nothing

    def watch(self, sequences: Run[Sequence], rows: Run[int]) -> None:
        """See Watcher."""

    @torch.inference_mode()
    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        """See Drafter."""
        began_at = self._now()
        drafts = [self._draft(sequence, num) for sequence, num in zip(sequences, num_tokens, strict=True)]
        num = max(num_tokens)
        self._durations.tell(len(sequences), num, self._now() - began_at)
        return drafts

    def _draft(self, sequence: Sequence, num_tokens: int) -> Draft:
        text, known = self._texts.get(sequence), sequence.token_ids
        # The last row that counts is that of the last token but one, which the last one was sampled by.
        num_rows = 0 if text is None else len(known) - 1 - text.start
        if text is None or not 0 < num_rows <= text.num_rows:
            return NO_DRAFT
        eagle = self._eagle
        rows = torch.cat(text.rows)
        following = torch.tensor(known[text.start + 1 : text.start + 1 + num_rows], device=rows.device)
        hidden, keys, values = eagle.layer(rows[:num_rows], following, text.start, text.keys, text.values)
        # These positions are certain, and are not computed again.
        text.keys, text.values = keys[:, -MAX_CONTEXT:], values[:, -MAX_CONTEXT:]
        text.rows, text.num_rows, text.start = [], 0, text.start + num_rows
        text.add(rows[num_rows:].clone())
        hidden = hidden[-1:]
        token_ids = [eagle.choose(hidden)]
        for place in range(num_tokens - 1):
            hidden, keys, values = eagle.layer(hidden, token_ids[-1], text.start + place, keys, values)
            token_ids.append(eagle.choose(hidden))
        return Draft(torch.cat(token_ids).tolist(), 0)

    def learn(self, sequence: Sequence) -> None:
        """See Drafter."""

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._texts.pop(sequence, None)


def taps_of(target: Decoder) -> tuple[int, ...]:
    """The layers of which such heads read what goes in."""
    num_layers = target.architecture.num_layers
    return tuple(sorted({2, num_layers // 2, num_layers - _NUM_TAPS}))


def is_eagle(directory: Path) -> bool:
    """Whether it has such a head rather than a model. Raises ModelError."""
    return (directory / "config.json").is_file() and SIZE_FIELD in read_json(directory / "config.json")


def load_eagle(directory: Path, target: Decoder, source: str, max_model_tokens: int) -> Eagle:
    """That of a directory, for this target, which came from ``source`` and takes so many tokens: the head follows it
    that far, though it was mostly trained on shorter texts, for only how far positions lie apart matters to it. Raises
    ModelError."""
    config = read_json(directory / "config.json")
    own = architecture_of({**config, "architectures": ["LlamaForCausalLM"]})
    if own.activation != "silu":
        raise ModelError(f"the activation {own.activation} of the EAGLE head {directory} is not supported, but silu")
    draft_vocab_size = config[SIZE_FIELD]
    tensors = tensors_of(directory, _FILES, "the files of the EAGLE head")
    taps = taps_of(target)
    if len(taps) != _NUM_TAPS or taps[0] < 0:
        raise ModelError(f"{source} has too few layers for the EAGLE head {directory}")
    others = config.get("eagle_config")
    said = (others if isinstance(others, dict) else config).get(TAPS_FIELD) or list(taps)
    # Some number a layer by what goes into it, some by what comes out of it.
    if said not in (list(taps), [tap - 1 for tap in taps]):
        raise ModelError(f"the EAGLE head {directory} reads other layers than {list(taps)}: {TAPS_FIELD} is {said}")
    size, inner = own.hidden_size, own.intermediate_size
    num_queries, num_keys = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, _NUM_TAPS * target.architecture.hidden_size),
        "lm_head.weight": (draft_vocab_size, size),
        "norm.weight": (size,),
        "d2t": (draft_vocab_size,),
        "midlayer.self_attn.q_proj.weight": (num_queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": (num_keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": (num_keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, num_queries),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        **{
            f"midlayer.{name}.weight": (size,)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
    }
    for name, shape in list(shapes.items()):
        bias = f"{name.removesuffix('weight')}bias"
        # Whether a matrix has one is up to whoever trained the head.
        if len(shape) == 2 and (bias in tensors or (own.qkv_bias and ".self_attn." in name)):
            shapes[bias] = shape[:1]
    vocab_size = target.architecture.vocab_size
    if "embed_tokens.weight" in tensors or size != target.architecture.hidden_size:
        shapes["embed_tokens.weight"] = (vocab_size, size)
    unknown = sorted(name for name in tensors if name not in shapes and not name.endswith(_NOT_NEEDED))
    if unknown:
        raise ModelError(f"the EAGLE head {directory} has what is not known: {unknown[0]}")
    num_bytes = sum(tensor.numel() for tensor in tensors.values()) * target.dtype.itemsize
    refuse_too_large(str(directory), num_bytes, target.dtype, target.device)
    weights = {}
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            is_there = f"is {list(tensor.shape)}" if tensor is not None else "is not there"
            raise ModelError(
                f"the EAGLE head {directory} is for another model than {source}: {name} {is_there},"
                f" and {list(shape)} is wanted"
            )
        weights[name] = tensor.to(target.device, torch.int64 if name == "d2t" else target.dtype)
    reached = weights["d2t"] + torch.arange(draft_vocab_size, device=target.device)
    if config.get("vocab_size") != vocab_size or int(reached.min()) < 0 or int(reached.max()) >= vocab_size:
        raise ModelError(f"the EAGLE head {directory} is for another vocabulary than that of {source}")
    return Eagle(target, own, weights, Rotary(own.ropes[0], max_model_tokens, target.device))
