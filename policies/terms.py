"""The shared words: what is asked for, what is sampled, how an answer ended, what was used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "content_filter", "error", "cancelled"]
"""How a sequence ended: on a stop token, at its token limit, where an upstream's filter withheld the rest, by a fault,
or because nobody wants it any more."""
ANSWERED = frozenset(("stop", "length", "content_filter"))
"""What was said until then is an answer."""
MAX_VOCABULARY = 1 << 22
"""Tokens; four times as many as any published model has."""


def printable(text: str) -> str:
    """The same without what would break a line, steer a terminal or be no UTF-8: for sentences with names in them that
    are out of files."""
    return "".join(char if char.isprintable() else "?" for char in text)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a sequence's next token is chosen; the worker needs nothing else of the request.

    Order of application, per row, in float32: penalties, logit bias, tokens that are not wanted (all but
    ``allowed_token_ids``, the last ones of ``bad_words``), forbidden tokens (stop tokens before ``min_tokens``),
    temperature, top-k, top-p, min-p, then one draw keyed by (seed, position).
    """

    max_tokens: int
    """Ceiling on completion tokens, >= 1; the gateway has already clamped it to the model's context."""
    seed: int = 0
    """64-bit unsigned. The gateway draws one when the client gave none, so a sequence always has one."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and completion, as in CTRL (Keskar et al. 2019); 1 is off."""
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    """No stop token may be sampled before this many completion tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end tokens."""
    ignore_eos: bool = False
    """The model's own end tokens do not stop the sequence (``stop_token_ids`` still do)."""
    num_logprobs: int | None = None
    """None: no log-probabilities. k >= 0: the sampled token's, and those of the k likeliest."""
    num_prompt_logprobs: int | None = None
    """The same of the prompt's own tokens; nothing of them is then looked for in the prefix cache."""
    allowed_token_ids: tuple[int, ...] = ()
    """No others come, unless a grammar allows none of these; empty: all may."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the completion does not have, unless a grammar allows nothing else."""

    def end_of(self, token_ids: Sequence[int], eos_token_ids: Collection[int]) -> FinishReason | None:
        """How a sequence of these has ended whose worker was lost before it could say so; None: it has not."""
        if token_ids:
            is_eos = token_ids[-1] in eos_token_ids and not self.ignore_eos
            if is_eos or token_ids[-1] in self.stop_token_ids:
                return "stop"
        return "length" if len(token_ids) >= self.max_tokens else None


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must be, all of it but special tokens at its end."""

    kind: Literal["json_schema", "json_object", "regex", "lark", "choice"]
    source: str
    """The schema as JSON text; nothing; an expression; a grammar in llguidance's Lark, where ``<name>`` is a special
    token and ``%json {...}`` a schema; a JSON list of strings."""
    is_strict: bool = False
    """Whatever ends it early, it is made to be whole by then."""
    is_composed: bool = False
    """Its rules are the gateway's own, but for those within ``%lark``; else somebody wrote them who asks."""

    @property
    def has_written_rules(self) -> bool:
        """Of which nothing is known before they are followed."""
        return self.kind == "lark" and (not self.is_composed or "%lark" in self.source)


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """One vector for the whole prompt, in place of tokens."""

    kind: Literal["last", "mean", "first", "score"]
    """Of the model's last hidden states, that of the last token, the mean over all, that of the first; or what the
    model's own head says of them, a vector of one number."""
    is_normalized: bool = True
    """To a length of 1; no matter for a score."""
    num_dimensions: int = 0
    """The first so many are what is wanted, cut before the length is; 0: all of them."""
    second_at: int = 0
    """Where the second of two texts begins in the prompt; 0: there is one."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request, counted where they were computed."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt tokens, those whose KV was found rather than computed."""
    num_completion_tokens: int
    num_reasoning_tokens: int = 0
    """Of the completion tokens."""
    num_drafted_tokens: int = 0
    """Guessed and verified while they were computed; nobody pays for them."""
    num_accepted_tokens: int = 0
    """Of those, the ones that were right."""
    num_predicted_tokens: int = 0
    """Of the completion tokens, those that the client predicted."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a prompt that was computed in one step."""

    began_s: float
    """After the request came."""
    seconds: float
    """That the step took, with all that was in it."""
    num_tokens: int


class Timeline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What happened to one sequence of a request that is traced; the first so many of each."""

    chunks: list[Chunk]
    preempted_s: list[float]
    """When it lost KV for others, after the request came."""


MAX_TIMELINE = 64
"""Of each list of a ``Timeline``."""


def total(usages: Iterable[Usage]) -> Usage:
    """Of several together."""
    columns = zip(*map(msgspec.structs.astuple, usages), strict=True)
    return Usage(*map(sum, columns))
