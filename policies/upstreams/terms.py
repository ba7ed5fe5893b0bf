"""Upstreams, as settings and administrators describe them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

MAX_UPSTREAMS = 1000
"""Which every gateway has in memory."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$(?!\n)"
VARIABLE_PATTERN = r"^([A-Za-z_][A-Za-z0-9_]*)?$(?!\n)"

Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=NAME_PATTERN)]
Model = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]+$(?!\n)")]
Kind = Literal["chat", "completions", "embeddings", "rerank"]
"""What can be asked of one."""
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server of OpenAI's API that answers for one model."""

    name: Name
    """Its own; the ledger's rows bear it."""
    model: Model
    """As clients ask for it here. Several upstreams may answer for one."""
    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    """What comes before "/chat/completions"."""
    upstream_model: Annotated[str, Meta(max_length=256)] = ""
    """As the upstream calls it; empty: as it is called here."""
    key_variable: Annotated[str, Meta(max_length=256, pattern=VARIABLE_PATTERN)] = ""
    """The environment variable that holds its API key; empty: none, or the one that an administrator gave."""
    kinds: tuple[Kind, ...] = ("chat", "completions", "embeddings")
    """What is asked of it."""
    cache_salt: bool = False
    """It takes ``cache_salt``, as vLLM, SGLang and Penstock do: each tenant has one of its own there, so that its
    prompts are found in the prefix cache by nobody else."""
    overflow: bool = False
    """The model is served here, too, and this one is asked only where its promise would be missed or no worker is
    there: at once, or when a request has waited for its turn as long as it could. Where it does not answer, workers
    do."""
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """The share that it gets beside others of the same model and priority."""
    priority: Annotated[int, Meta(ge=0, le=100)] = 0
    """Those with a larger number are asked when all with a smaller one cannot be."""
    choice: Literal["latency", "weight"] = "latency"
    """Between equals: of two drawn by weight the one that answers sooner, or by weight alone."""
    fallbacks: Annotated[tuple[Model, ...], Meta(max_length=8)] = ()
    """Other models that are asked, in this order, when none of this model answers: of upstreams, and at the end perhaps
    one that is served here, whose workers have a line for all that comes."""
    max_concurrent: Annotated[int, Meta(ge=1, le=100_000)] = 64
    """Requests that it is sent at a time, divided among the gateways that share a Redis; more wait in line."""
    max_model_tokens: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    """Prompt and completion together; 0: it is left to the upstream."""
    tokenizer: Annotated[str, Meta(max_length=4096)] = ""
    """A directory or hub id with the model's tokenizer, by which its usage is checked; empty: by the model of the same
    name that is served here, else by four bytes a token."""
    connect_timeout_s: Seconds = 5.0
    first_byte_timeout_s: Seconds = 60.0
    """From asking until a stream says its first; an answer that is not streamed has ``timeout_s``."""
    idle_timeout_s: Seconds = 60.0
    """Between two words of a stream."""
    timeout_s: Seconds = 600.0
    """Of a whole answer."""
    max_answer_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 32 << 20
    """Of one answer, or of each 256 vectors of one; what is longer is cut off."""
    max_retries: Annotated[int, Meta(ge=0, le=10)] = 2
    """So often a request that was not answered at all is sent again, here or to another one."""
    retry_share: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """Of the requests that are sent, so many may be sent again or hedged."""
    hedge: bool = False
    """A request that is not answered after the 95th percentile of the latest is sent to another one as well; whoever
    answers first is heard."""
    breaker_failures: Annotated[int, Meta(ge=1, le=1000)] = 5
    """So many failures in a row, and it is not asked for a while."""
    breaker_open_s: Seconds = 5.0
    """That while, at first; it doubles with each failed trial, up to a minute or this if it is longer."""
    probe_s: Annotated[float, Meta(ge=0, le=86_400)] = 15.0
    """Between two looks at whether it is there; 0: none."""


def faults_of(upstreams: Sequence[Upstream], models: Collection[str]) -> Iterator[tuple[int, str, str]]:
    """The number of one that cannot be, the field, and what is wrong with it. ``models``: served here."""
    seen: dict[str, int] = {}
    for number, upstream in enumerate(upstreams):
        if (other := seen.setdefault(upstream.name, number)) != number:
            yield number, "name", f"upstreams[{other}] has it already"
        for field, what in fault_of(upstream, models):
            yield number, field, what


def fault_of(upstream: Upstream, models: Collection[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with one by itself: the field and a sentence."""
    if not _is_address(upstream.url):
        yield "url", "must be an address such as https://host/v1, without a user, a query or a fragment"
    if upstream.overflow and upstream.model not in models:
        yield "overflow", f"there is no model {upstream.model} here that could overflow"
    if not upstream.overflow and upstream.model in models:
        yield "model", f"{upstream.model} is served here; say overflow = true if this is to relieve it"
    if not upstream.kinds:
        yield "kinds", "is empty, so nothing could be asked of it"
    if upstream.model in upstream.fallbacks:
        yield "fallbacks", "names the model itself"
    if served := [name for name in upstream.fallbacks[:-1] if name in models]:
        yield "fallbacks", f"{served[0]} is served here, so what stands behind it would never be asked"
    if upstream.overflow and any(name in models for name in upstream.fallbacks):
        yield "fallbacks", f"{upstream.model} is served here, and no other model here stands in for it"


def _is_address(url: str) -> bool:
    if not re.match(r"https?://[^/\s]", url) or re.search(r"[\s@?#]", url):
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # half a bracket, or a port that is none
        return False
