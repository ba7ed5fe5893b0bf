"""Every name that spans and their attributes have, once.

The conventions for generative AI are moving (they left OpenTelemetry's semantic conventions for a repository of their
own in 2026), and whoever has dashboards on the older names keeps them until asking for the newer ones with
``OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental``: without it names are those of version 1.36, with it those
of 1.41. What both call the same stands once, and so do HTTP's, which are stable, and ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OPT_IN: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"
LATEST: Final = "gen_ai_latest_experimental"

PROVIDER: Final = "penstock"

GEN_AI: Final[Mapping[str, tuple[str, str]]] = {
    # ours: (1.36, 1.41); empty: that version has no such attribute
    "operation": ("gen_ai.operation.name", "gen_ai.operation.name"),
    "provider": ("gen_ai.system", "gen_ai.provider.name"),
    "output_type": ("gen_ai.output.type", "gen_ai.output.type"),
    "request_model": ("gen_ai.request.model", "gen_ai.request.model"),
    "stream": ("", "gen_ai.request.stream"),
    "seed": ("gen_ai.request.seed", "gen_ai.request.seed"),
    "num_choices": ("gen_ai.request.choice.count", "gen_ai.request.choice.count"),
    "max_tokens": ("gen_ai.request.max_tokens", "gen_ai.request.max_tokens"),
    "temperature": ("gen_ai.request.temperature", "gen_ai.request.temperature"),
    "top_p": ("gen_ai.request.top_p", "gen_ai.request.top_p"),
    "top_k": ("gen_ai.request.top_k", "gen_ai.request.top_k"),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", "gen_ai.request.frequency_penalty"),
    "presence_penalty": ("gen_ai.request.presence_penalty", "gen_ai.request.presence_penalty"),
    "response_id": ("gen_ai.response.id", "gen_ai.response.id"),
    "response_model": ("gen_ai.response.model", "gen_ai.response.model"),
    "finish_reasons": ("gen_ai.response.finish_reasons", "gen_ai.response.finish_reasons"),
    "time_to_first_chunk": ("", "gen_ai.response.time_to_first_chunk"),
    "input_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.input_tokens"),
    "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.output_tokens"),
    "cached_tokens": ("", "gen_ai.usage.cache_read.input_tokens"),
    "reasoning_tokens": ("", "gen_ai.usage.reasoning.output_tokens"),
    "api_type": ("", "openai.api.type"),
    "request_tier": ("gen_ai.openai.request.service_tier", "openai.request.service_tier"),
    "response_tier": ("gen_ai.openai.response.service_tier", "openai.response.service_tier"),
    "fingerprint": ("gen_ai.openai.response.system_fingerprint", "openai.response.system_fingerprint"),
    "input_messages": ("gen_ai.prompt", "gen_ai.input.messages"),
    "output_messages": ("gen_ai.completion", "gen_ai.output.messages"),
}
"""For what a request asks of a model, and what becomes of it."""

# HTTP's, and those that all spans may have.
METHOD: Final = "http.request.method"
ROUTE: Final = "http.route"
STATUS: Final = "http.response.status_code"
ERROR_TYPE: Final = "error.type"

# Ours.
REQUEST_ID: Final = "penstock.request.id"
TENANT_ID: Final = "penstock.tenant.id"
KEY_ID: Final = "penstock.key.id"
SLA_CLASS: Final = "penstock.sla_class"
POLICY: Final = "penstock.policy"
CACHE: Final = "penstock.cache"
COST_MICROS: Final = "penstock.cost_micros"
KEPT_FOR: Final = "penstock.trace.kept_for"
"""sampled, parent, error, missed, slow or failover: why there is this trace."""
LOOP_LAG_MS: Final = "penstock.event_loop.lag_ms"
WORKER: Final = "penstock.worker"
LEFT: Final = "penstock.worker.left"
UPSTREAM: Final = "penstock.upstream"
UPSTREAM_LEFT: Final = "penstock.upstream.left"
NUM_PROMPT_TOKENS: Final = "penstock.num_prompt_tokens"
NUM_CACHED_TOKENS: Final = "penstock.num_cached_tokens"
NUM_TOKENS: Final = "penstock.num_tokens"
NUM_CONTINUED: Final = "penstock.num_continued_tokens"
"""Of the completion, those that it came to this worker with."""
NUM_PREEMPTIONS: Final = "penstock.num_preemptions"
NUM_DRAFTED: Final = "penstock.speculation.num_drafted_tokens"
NUM_ACCEPTED: Final = "penstock.speculation.num_accepted_tokens"
ENGINE_S: Final = "penstock.engine_s"
KV_BLOCK_S: Final = "penstock.kv_block_s"
HAS_GRAMMAR: Final = "penstock.grammar"
CHUNK_MS: Final = "penstock.chunk_ms"
WAIT_MS: Final = "penstock.worker.queue_ms"
PREFILL_MS: Final = "penstock.worker.prefill_ms"
DECODE_MS: Final = "penstock.worker.decode_ms"
SEQUENCE: Final = "penstock.sequence"
NUM_LEFT_OUT: Final = "penstock.num_left_out"
BATCH: Final = "penstock.batch.id"

# Spans below a request's own, in the order in which they follow each other.
RECEIVE, AUTH, PARSE, LOAD, RENDER = "receive", "auth", "parse", "load", "render"
CACHE_LOOK, ADMIT, QUEUE, ROUTING, WORKER_SPAN = "cache", "admit", "queue", "route", "worker"
UPSTREAM_SPAN: Final = "upstream"
"""In the place of the two before."""
SHARED, REPLAY, STREAM, SETTLE, ANSWER = "shared", "replay", "stream", "settle", "answer"
# What happens within one.
TAKEN_IN, SCHEDULED, CHUNK, PREEMPTED = "taken in", "scheduled", "prefill chunk", "preempted"
FIRST_TOKEN, LAST_TOKEN, LOST = "first token", "last token", "worker lost"

OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
    "/v1/embeddings": "embeddings",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
}
"""By address, for POST; all others are no operation of a model's."""
API_TYPES: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat_completions",
    **dict.fromkeys(("/v1/responses", "/v1/responses/compact"), "responses"),
}


def operation_of(method: str, route: str) -> str | None:
    """None: it asks for something else than a model, be it by another method: for what is kept at that address, or for
    a WebSocket, over which requests come that have spans of their own."""
    return OPERATIONS.get(route) if method == "POST" else None


def is_latest(opt_in: str) -> bool:
    """``opt_in``: what the variable says, a list with commas."""
    return LATEST in [each.strip() for each in opt_in.split(",")]


def gen_ai(latest: bool) -> dict[str, str]:
    """By our words; without those that this version has no name for."""
    return {ours: names[latest] for ours, names in GEN_AI.items() if names[latest]}
