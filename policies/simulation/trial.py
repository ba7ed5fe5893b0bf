"""What a trial is asked and what it answers: arrivals, the policies that judge them, and what would have happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from policies.engine import Engine
from policies.policy import Document, Narrowing, Policy
from policies.pricelist import Listed
from policies.settings import CLASSES, SlaClass

MAX_ARRIVALS = 20_000
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Tokens = Annotated[int, Meta(ge=0, le=10_000_000)]
SomeTokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Weight = Annotated[float, Meta(ge=0, le=10)]
Reason = Literal[
    "model_not_found",
    "context_length_exceeded",
    "requests",
    "tokens",
    "concurrent_requests",
    "budget",
    "queue_full",
    "slow_down",
    "queue_timeout",
]
"""Why a request is refused: its policy does not have the model, no worker can hold it, a ceiling on requests, tokens
or open requests, money, a full line, a first token predicted too late, or no worker with room in time."""


class Arrival(Document, frozen=True):
    """One recorded request."""

    at_s: Seconds
    """Since any instant before all of them."""
    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    num_prompt_tokens: SomeTokens
    num_completion_tokens: SomeTokens
    """What it wrote, and writes again unless a limit ends it before."""
    num_cached_tokens: Tokens = 0
    """Of the prompt, those found in a prefix cache."""
    max_completion_tokens: SomeTokens | None = None
    """What it asked for; None: no more than it wrote."""
    key: Annotated[str, Meta(max_length=128)] = ""
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"


class WorkerModel(Document, frozen=True):
    """How the workers of one model compute: how many, how large, how fast."""

    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    weights: tuple[Weight, Weight, Weight, Weight, Weight, Weight, Weight] = (
        6e-3,
        3e-5,
        3e-5,
        5e-8,
        2e-10,
        1e-4,
        1e-8,
    )
    """Seconds: a step, a prompt token, a decoding sequence, a KV token it reads, a (prompt, earlier) token pair, a
    chunk, a KV token before it (policies/costs.py). The default is about an 8 B model on one large GPU."""
    block_size: Annotated[int, Meta(ge=8, le=256)] = Engine().block_size
    num_blocks: Annotated[int, Meta(ge=1, le=100_000_000)] = 10_000
    max_sequences: Annotated[int, Meta(ge=1, le=4096)] = Engine().max_sequences
    max_step_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = Engine().max_step_tokens
    max_prefill_tokens_beside_decodes: Annotated[int, Meta(ge=1, le=1_000_000)] = (
        Engine().max_prefill_tokens_beside_decodes
    )
    max_slowdown: Annotated[float, Meta(ge=0, le=1000)] = Engine().max_slowdown
    max_preemptions: Annotated[int, Meta(ge=0, le=1_000_000)] = Engine().max_preemptions
    promises: bool = True
    """Workers are told what requests were promised and plan by it; else by the classes' priorities alone."""


class NarrowedKey(Document, frozen=True, kw_only=True):
    """A key that may do less than its tenant, or that another one was rotated into."""

    narrowing: Narrowing
    purse_id: str = ""
    """Under which its budget is counted, the same for keys that were rotated into each other; empty: its own."""


class Trial(Document, frozen=True):
    """A question: these arrivals under these policies and classes on these workers."""

    arrivals: tuple[Arrival, ...]
    policies: dict[str, Policy]
    """By tenant; each that arrives has one."""
    workers: dict[str, WorkerModel]
    """By model; a model that is not here does not exist."""
    keys: dict[str, NarrowedKey] = msgspec.field(default_factory=dict)
    """Those that need one, by the names in the arrivals."""
    classes: dict[str, SlaClass] = msgspec.field(default_factory=lambda: dict(CLASSES))
    prices: tuple[Listed, ...] = ()
    """The price list; each arrival pays what is on it last, whenever it comes."""
    completion_estimate: Annotated[int, Meta(ge=1)] = 256
    """As in [limits] of the settings."""
    stops_at_s: Seconds | None = None
    """What has not ended by then is left as it is; None: all come to their end."""
    starts_at: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Unix seconds that ``at_s`` counts from: which day and month it is for a budget."""


class Percentiles(msgspec.Struct, frozen=True):
    """Of the requests that were answered; zeros when there were none."""

    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to all requests, to those of a class, or to those of a tenant."""

    num_requests: int
    num_admitted: int
    """Let in by every limit and by the promise, and then computed."""
    refused: dict[Reason, int]
    num_unfinished: int
    """Waiting or being computed when the trial stopped."""
    num_cut: int
    """Answers that ended before they were complete, with "length", because a limit or a budget was used up."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    """Tokens of those that were computed."""
    num_served_tokens: int
    """Given until the trial stopped: prompts count when they are sent, completions as they come."""
    engine_s: float
    """Their shares of the steps that they were in."""
    cost_micros: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    longest_wait_ms: float
    """For a worker, of those computed and of those that gave up."""


class ClassPart(Part, frozen=True, kw_only=True):
    """A class: besides, what it was promised."""

    ttft_error_ms: Percentiles
    """How far the predicted time to the first token was off, either way, of its computed requests."""
    ttft_bias_ms: float
    """The mean with its sign: above zero, they came sooner than predicted."""
    ttft_attainment: float
    """Share of its computed requests whose first token came within the class's ``ttft_ms``; 1 when there were none."""
    tpot_attainment: float
    num_kept: int
    """Computed requests of which both the first token and the further ones came in time."""
    num_tokens_while_waiting: int
    """Prompt and completion tokens given to the class while it had requests waiting."""
    share_while_waiting: float
    """Those, of all that were given in that time; 1 when nothing of it ever waited."""
    longest_gap_tokens: int
    """Given to others between two of its turns while it had requests waiting, of that gap which came closest to its
    bound."""
    gap_bound_tokens: int
    """The most that it could have been (policies/priority.py)."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What would have happened."""

    total: Part
    classes: dict[str, ClassPart]
    tenants: dict[str, Part]
    duration_s: float
    """From the first arrival until the last answer has ended, or the trial stopped."""
    utilisation: float
    """Of all workers: the part of that time in which they computed."""
    num_preemptions: int
    """Sequences that lost all their KV for others, as often as it happened."""
    num_tail_frees: int
    """Those that lost the end of it."""
    num_displacements: int
    """Requests for which others were put aside."""


def percentiles(values: Sequence[float]) -> Percentiles:
    """Nearest rank."""
    if not values:
        return Percentiles()
    ranked = sorted(values)

    def rank(per_cent: int) -> float:
        return ranked[-(-len(ranked) * per_cent // 100) - 1]

    return Percentiles(rank(50), rank(90), rank(95), rank(99), ranked[-1])
