"""Which answers may be given twice, the names they are kept under, and the shape they are kept in.

An exact answer is kept as tokens, so the same one serves a stream and a body, with or without its usage. Its name
covers all that the tokens depend on and nothing else; whose it is, its scope says. Where and how long answers are kept
is the gateway's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from policies.policy import Cache
from policies.terms import FinishReason, Sampling, Usage
from policies.wire import Submit, TokenLogprob

Outcome = Literal["miss", "hit", "shared", "bypass"]
"""What the exact cache did for a request: nothing yet, it had the answer, one was on its way already, or it was not
asked."""


class Asked(NamedTuple):
    """What a request asks for, as far as its tokens depend on it."""

    model: str
    fingerprint: str
    """Changes with whatever makes the same seed give other tokens."""
    submits: Sequence[Submit]
    """One for each of its prompts, in order; all sample alike."""
    stops: Sequence[str]
    """The strings that end the text."""
    is_seeded: bool
    """The seed is the client's own."""
    cache_salt: str | None = None
    """The client's word for those of its users among whom the answer may be found again; None: all of them."""


class Rules(NamedTuple):
    """What one request may have from the cache, and leave in it."""

    reads: bool
    keeps: bool


NONE = Rules(reads=False, keeps=False)


def rules(cache: Cache, asked: Asked, control: str = "") -> Rules:
    """Under a policy's words and the request's own ``Cache-Control`` (RFC 9111, section 5.2.1: no-store takes nothing
    and leaves nothing, no-cache wants a fresh answer and leaves it). Vectors are not kept: they are read faster than
    they would be fetched; nor is what is said of prompts, as it is said once."""
    directives = {part.partition("=")[0].strip().lower() for part in control.split(",")} if control else ()
    first = asked.submits[0]
    if first.pooling is not None or first.sampling.num_prompt_logprobs is not None:
        return NONE
    if cache.exact == "off" or "no-store" in directives:
        return NONE
    if cache.exact == "deterministic" and not asked.is_seeded and asked.submits[0].sampling.temperature > 0:
        return NONE
    return Rules(reads="no-cache" not in directives, keeps=True)


@lru_cache(4096)
def scope_of(secret: bytes, tenant_id: str, group: str) -> bytes:
    """Whose answers: the tenant's own, or those of the group that it names. 16 bytes, meaningless without the
    install's secret."""
    owner = f"group\0{group}" if group else f"tenant\0{tenant_id}"
    return blake2b(owner.encode(), digest_size=16, key=secret[:64], person=b"penstock answer").digest()


def name_of(asked: Asked) -> bytes:
    """The name of the whole request's answer, 32 bytes: its prompts are answered together or not at all."""
    sequences = [
        (submit.prompt_token_ids, _canonical(submit.sampling, asked.is_seeded), submit.num_sequences, submit.grammar)
        for submit in asked.submits
    ]
    text = _encode((asked.model, asked.fingerprint, sequences, asked.stops, asked.cache_salt))
    return blake2b(text, digest_size=32, person=b"penstock answer").digest()


def _canonical(sampling: Sampling, is_seeded: bool) -> tuple[object, ...]:
    """Requests that differ in what has no effect are one: a greedy one neither draws nor filters."""
    s = sampling
    greedy = s.temperature == 0
    return (
        s.max_tokens,
        None if greedy else (s.seed if is_seeded else "", s.temperature, s.top_p, s.top_k, s.min_p),
        s.presence_penalty,
        s.frequency_penalty,
        s.repetition_penalty,
        sorted(s.logit_bias.items()),
        s.min_tokens,
        sorted(set(s.stop_token_ids)),
        s.ignore_eos,
        s.num_logprobs,
        sorted(set(s.allowed_token_ids)),
        sorted(set(s.bad_words)),
    )


class Word(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one token of an upstream's answer says."""

    kind: Literal["content", "reasoning", "refusal", "call", "arguments", "custom", "input"]
    """The last two are the same of a custom tool."""
    text: str
    """Of a call: the name of what is called."""
    number: int = 0
    """Of the call."""
    id: str = ""
    """Of a call, where it begins."""
    logprob: bytes = b""
    """Where asked: an entry of OpenAI's chat form, as JSON."""


class Told(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence from its first token to its last."""

    part: int
    """Which of the request's prompts it answers."""
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    reason: FinishReason
    """ "cancelled" where the gateway found a stop string: whoever reads it finds it too."""
    has_end_token: bool = False
    """Its last token ended it and says nothing."""
    words: list[Word] | None = None
    """Of an upstream's answer: one for each token, whose ids say nothing."""
    usage: Usage | None = None
    """Of the whole part, with its last sequence, where an upstream has said it."""


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="4"):
    """A whole answer. The tag is the version of this shape: gateways of another one cannot read it and need not."""

    made_at: int
    """Unix seconds."""
    sequences: list[Told]


_encode = msgspec.msgpack.encode
_kept = msgspec.msgpack.Decoder(Kept)


def packed(kept: Kept) -> bytes:
    """As caches and the store keep it: MessagePack that begins with the version of its shape."""
    return _encode(kept)


def unpacked(value: bytes) -> Kept | None:
    """None where it is of another version, or damaged."""
    try:
        return _kept.decode(value)
    except msgspec.DecodeError:
        return None
