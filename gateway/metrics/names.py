"""Every metric, named once: what it is called, what it counts, and of whom. ``reference`` is the list for the docs.

Names come from three places. ``gen_ai_...`` are OpenTelemetry's for servers of models, with its buckets (semantic
conventions 1.41, by the rules that Prometheus has for them; over OTLP they have their own names back). ``vllm:...`` are
those that dashboards for vLLM read, with its buckets. The others are ours.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "max", "min", "mean", "one"]

DURATIONS_S = tuple(0.01 * 2**power for power in range(14))
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(float(4**power) for power in range(14))
VLLM_TTFT_S = (*TTFT_S, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
VLLM_TPOT_S = (*TPOT_S, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
VLLM_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
VLLM_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One family of time series."""

    name: str
    """As /metrics has it."""
    kind: Kind
    unit: str = ""
    """Seconds are "s", as in OpenTelemetry; empty: a plain number."""
    labels: tuple[str, ...] = ()
    meaning: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, the last one, infinity, left out. Empty: those of what it is read from."""
    merge: Merge = "sum"
    """Of several gateway processes: added up, the largest, the smallest, the mean of what each has of it, or the same
    in each of them."""
    otel_name: str = ""
    """Where OpenTelemetry calls it otherwise."""


def _counter(name: str, meaning: str, *labels: str, unit: str = "", merge: Merge = "sum") -> Metric:
    return Metric(name=name, kind="counter", meaning=meaning, labels=labels, unit=unit, merge=merge)


def _gauge(name: str, meaning: str, *labels: str, unit: str = "", merge: Merge = "sum") -> Metric:
    return Metric(name=name, kind="gauge", meaning=meaning, labels=labels, unit=unit, merge=merge)


def _histogram(
    name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = (), unit: str = "s", otel_name: str = ""
) -> Metric:
    return Metric(
        name=name, kind="histogram", meaning=meaning, labels=labels, buckets=buckets, unit=unit, otel_name=otel_name
    )


_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_ENGINE = ("model_name", "engine")

GEN_AI = (
    _histogram(
        "gen_ai_server_request_duration_seconds",
        "From a request's arrival to its last byte.",
        *(*_GEN_AI, "error_type"),
        buckets=DURATIONS_S,
        otel_name="gen_ai.server.request.duration",
    ),
    _histogram(
        "gen_ai_server_time_to_first_token_seconds",
        "From the arrival of a request that was answered to its first token.",
        *_GEN_AI,
        buckets=TTFT_S,
        otel_name="gen_ai.server.time_to_first_token",
    ),
    _histogram(
        "gen_ai_server_time_per_output_token_seconds",
        "Time for each token behind the first, a mean for each request that was answered.",
        *_GEN_AI,
        buckets=TPOT_S,
        otel_name="gen_ai.server.time_per_output_token",
    ),
    _histogram(
        "gen_ai_client_token_usage",
        "Tokens of a request that are billed, by type: input (cached ones included) or output.",
        *(*_GEN_AI, "gen_ai_token_type"),
        buckets=TOKENS,
        unit="{token}",
        otel_name="gen_ai.client.token.usage",
    ),
    _histogram(
        "gen_ai_client_operation_duration_seconds",
        "The same as the server's duration: what a client sees, its network left out.",
        *(*_GEN_AI, "error_type"),
        buckets=DURATIONS_S,
        otel_name="gen_ai.client.operation.duration",
    ),
)

VLLM = (
    _gauge("vllm:num_requests_running", "Sequences that a worker computes.", *_ENGINE, merge="one"),
    _gauge("vllm:num_requests_waiting", "Sequences that wait within a worker.", *_ENGINE, merge="one"),
    _gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 1 being all of them.", *_ENGINE, merge="one"),
    _gauge(
        "vllm:cache_config_info",
        "1; its labels are how many KV blocks there are, and the tokens of one.",
        *(*_ENGINE, "block_size", "num_gpu_blocks"),
        merge="one",
    ),
    _gauge("vllm:gpu_cache_usage_perc", "The same under its older name.", *_ENGINE, merge="one"),
    _counter("vllm:num_preemptions_total", "Sequences that lost all their KV for others.", *_ENGINE, merge="one"),
    _counter("vllm:prompt_tokens_total", "Tokens of prompts, cached or not.", *_ENGINE, merge="one"),
    _counter("vllm:prompt_tokens_cached_total", "Of these, those that were found.", *_ENGINE, merge="one"),
    _counter(
        "vllm:prompt_tokens_by_source_total",
        "All of them by source: local_compute or local_cache_hit.",
        *_ENGINE,
        "source",
        merge="one",
    ),
    _counter("vllm:generation_tokens_total", "Tokens of answers.", *_ENGINE, merge="one"),
    _counter("vllm:prefix_cache_queries_total", "Tokens of prompts, cached or not.", *_ENGINE, merge="one"),
    _counter("vllm:prefix_cache_hits_total", "Tokens of prompts that were found.", *_ENGINE, merge="one"),
    _counter("vllm:spec_decode_num_drafts_total", "Verified for a sequence in one step.", *_ENGINE, merge="one"),
    _counter("vllm:spec_decode_num_draft_tokens_total", "Tokens that were guessed.", *_ENGINE, merge="one"),
    _counter("vllm:spec_decode_num_accepted_tokens_total", "Guesses that were right.", *_ENGINE, merge="one"),
    _counter("vllm:request_success_total", "Requests that were answered.", "model_name", "finished_reason"),
    _histogram(
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        "model_name",
        buckets=VLLM_TTFT_S,
    ),
    _histogram(
        "vllm:time_per_output_token_seconds",
        "Time for each token behind the first, a mean for each request.",
        "model_name",
        buckets=VLLM_TPOT_S,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "The same under its newer name.",
        "model_name",
        buckets=VLLM_TPOT_S,
    ),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "Gaps between two tokens; each counts as the mean of its request.",
        "model_name",
        buckets=VLLM_TPOT_S,
    ),
    _histogram(
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to its last byte.",
        "model_name",
        buckets=VLLM_LATENCY_S,
    ),
    _histogram(
        "vllm:request_queue_time_seconds",
        "How long a request waited in line for a worker.",
        "model_name",
        buckets=VLLM_LATENCY_S,
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "From when a worker began with a sequence to its first token.",
        *_ENGINE,
        buckets=VLLM_LATENCY_S,
    ),
    _histogram(
        "vllm:request_decode_time_seconds", "From its first token to its last.", *_ENGINE, buckets=VLLM_LATENCY_S
    ),
    _histogram("vllm:request_inference_time_seconds", "Both together.", *_ENGINE, buckets=VLLM_LATENCY_S),
    _histogram(
        "vllm:request_prompt_tokens",
        "Tokens of a request's prompt.",
        "model_name",
        buckets=VLLM_TOKENS,
        unit="{token}",
    ),
    _histogram(
        "vllm:request_generation_tokens",
        "Tokens of a request's answers.",
        "model_name",
        buckets=VLLM_TOKENS,
        unit="{token}",
    ),
)

_CLASS = ("model", "sla_class")

OURS = (
    _gauge("penstock_build_info", "1; its label is the version.", "version", merge="one"),
    _gauge("penstock_gateway_processes", "Gateway processes whose numbers these are."),
    _gauge("penstock_requests_inside", "HTTP requests that are not answered yet."),
    _counter("penstock_http_responses_total", "HTTP answers by status.", "status"),
    _counter("penstock_refusals_total", "Answers that are errors, by OpenAI's code or else by type.", "code"),
    _counter("penstock_requests_total", "Requests in the ledger.", *_CLASS, "endpoint", "status"),
    _counter(
        "penstock_tokens_total", "By type: prompt, of these cached; completion, of these reasoning.", "model", "type"
    ),
    _counter("penstock_cost_total", "What requests cost, in units of the currency.", "model", "currency"),
    _counter("penstock_engine_seconds_total", "Time of engines that requests took.", "model", unit="s"),
    _counter("penstock_kv_block_seconds_total", "KV blocks that requests held, times seconds.", "model", unit="s"),
    _counter(
        "penstock_answer_cache_requests_total",
        "Requests by what the cache of answers had: hit, shared, miss or bypass.",
        "outcome",
    ),
    _gauge("penstock_answer_cache_entries", "Answers kept in this process's memory; none where Redis keeps them."),
    _gauge("penstock_answer_cache_bytes", "What they take.", unit="By"),
    _counter("penstock_tenant_requests_total", "Requests of a tenant.", "tenant"),
    _counter("penstock_tenant_tokens_total", "By type: prompt or completion.", "tenant", "type"),
    _counter("penstock_tenant_cost_total", "In units of the currency.", "tenant"),
    _gauge(
        "penstock_limit_used_ratio",
        "How much of a tenant's own ceiling or budget is used, 1 being all of it; those of its keys and on models are "
        "not told. With Redis the budget alone, as this gateway heard of it last.",
        "tenant",
        "limit",
        merge="max",
    ),
    _histogram("penstock_queue_seconds", "How long requests waited in line.", *_CLASS, buckets=VLLM_LATENCY_S),
    _gauge("penstock_queue_requests", "Requests in line.", *_CLASS),
    _gauge("penstock_queue_tenants", "Tenants that wait.", *_CLASS, merge="max"),
    _gauge("penstock_queue_oldest_seconds", "How long the oldest has waited.", *_CLASS, unit="s", merge="max"),
    _gauge("penstock_queue_returning", "Requests whose worker was lost or leaves, until another goes on.", *_CLASS),
    _counter("penstock_queue_sent_total", "Requests that were given to a worker.", *_CLASS),
    _counter("penstock_queue_refused_total", "Refused by the line: full, slow or timeout.", *_CLASS, "reason"),
    _gauge("penstock_ttft_predicted_seconds", "Of a short request that came now.", *_CLASS, unit="s", merge="max"),
    _histogram("penstock_ttft_prediction_error_seconds", "How far predictions were off, either way.", *_CLASS),
    _gauge(
        "penstock_ttft_prediction_bias_seconds",
        "Their mean with its sign: above zero, tokens came sooner.",
        *_CLASS,
        unit="s",
        merge="mean",
    ),
    _counter("penstock_sla_requests_total", "Requests that count for their class's promise.", "sla_class"),
    _counter("penstock_sla_kept_total", "Of these: first token and pace as promised.", "sla_class"),
    _gauge(
        "penstock_sla_attainment_ratio",
        "Their share, of the last 5 minutes or of the last hour.",
        "sla_class",
        "window",
        merge="mean",
    ),
    _gauge(
        "penstock_sla_burn_rate",
        "How many times faster than metrics.sla_objective allows promises are broken.",
        "sla_class",
        "window",
        merge="mean",
    ),
    _gauge("penstock_sla_objective_ratio", "metrics.sla_objective.", merge="one"),
    _gauge("penstock_ledger_pending_rows", "Rows that are not durable yet."),
    _histogram("penstock_ledger_wait_seconds", "How long answers waited for their rows."),
    _gauge("penstock_ledger_up", "0: the last try to write failed.", merge="min"),
    _gauge("penstock_store_away", "1: PostgreSQL is away, and rows go to the spool.", merge="max"),
    _gauge("penstock_spool_rows", "Rows in the spool."),
    _gauge("penstock_redis_away", "1: Redis cannot be reached.", merge="max"),
    _counter(
        "penstock_sink_events_total", "Sent on by sinks, by outcome: taken or refused for good.", "sink", "outcome"
    ),
    _gauge("penstock_sink_waiting", "1: its receiver takes nothing, or has refused too much.", "sink", merge="max"),
    _counter("penstock_traces_total", "Requests that were worth a trace."),
    _counter("penstock_traces_lost_total", "Of these: nobody was there, or had time, to make their spans."),
    _counter("penstock_spans_total", "By outcome: exported, dropped for want of room, or failed to export.", "outcome"),
    _counter(
        "penstock_otlp_sendings_total",
        "Of these metrics to a collector, by outcome: taken, refused (a part of it) or failed.",
        "outcome",
    ),
    _counter("penstock_log_lines_lost_total", "Of the gateway's log: nobody read them in time, or the disk was full."),
    _histogram("penstock_event_loop_lag_seconds", "How late the event loop's timers are.", buckets=LAG_S),
    _gauge(
        "penstock_workers",
        "Places for workers by state: starting, ready or resting; given_up: the model is not served.",
        "model",
        "state",
        merge="one",
    ),
    _counter(
        "penstock_worker_lives_total", "Processes or connections that have filled a place.", *_ENGINE, merge="max"
    ),
    _gauge("penstock_worker_kv_blocks", "By state: used, cached or free.", *_ENGINE, "state", merge="one"),
    _gauge("penstock_worker_paused", "Sequences that had no part in the last step.", *_ENGINE, merge="one"),
    _gauge("penstock_worker_step_seconds", "Mean of the last steps.", *_ENGINE, unit="s", merge="one"),
    _counter("penstock_worker_busy_seconds_total", "Time in steps.", *_ENGINE, unit="s", merge="one"),
    _counter("penstock_worker_steps_total", "Steps.", *_ENGINE, merge="one"),
    _counter("penstock_worker_displacements_total", "Requests for which others were put aside.", *_ENGINE, merge="one"),
    _counter(
        "penstock_worker_drafter_faults_total", "Requests for which a drafter was switched off.", *_ENGINE, merge="one"
    ),
    _gauge("penstock_worker_adapters", "Adapters in its memory.", *_ENGINE, merge="one"),
    _counter("penstock_grammars_total", "Looked for by the gateway: read, known or refused.", "outcome"),
    _counter("penstock_grammar_read_seconds_total", "Reading grammars, beside the event loop.", unit="s"),
    _gauge("penstock_worker_grammars", "Compiled, and kept for the next request.", *_ENGINE, merge="one"),
    _counter(
        "penstock_worker_grammars_total",
        "Asked for of a worker: compiled, known or refused.",
        *_ENGINE,
        "outcome",
        merge="one",
    ),
    _counter(
        "penstock_worker_grammar_compile_seconds_total",
        "Compiling, beside the steps.",
        *_ENGINE,
        unit="s",
        merge="one",
    ),
    _counter("penstock_worker_masks_total", "Of tokens that a grammar allows.", *_ENGINE, merge="one"),
    _counter(
        "penstock_worker_mask_seconds_total", "That steps have waited for masks.", *_ENGINE, unit="s", merge="one"
    ),
)

_UPSTREAM = ("model", "upstream")
UPSTREAMS = (
    _gauge("penstock_upstream_requests", "Requests that it has.", *_UPSTREAM),
    _gauge("penstock_upstream_up", "1: its breaker lets requests through.", *_UPSTREAM, merge="max"),
    _gauge(
        "penstock_upstream_latency_seconds", "Until its first word, following peaks.", *_UPSTREAM, unit="s", merge="max"
    ),
    _counter("penstock_upstream_requests_total", "Requests that it was sent, with retries and hedges.", *_UPSTREAM),
    _counter("penstock_upstream_failures_total", "Of these: it did not answer, or not to the end.", *_UPSTREAM),
    _counter("penstock_upstream_retries_total", "Requests that were sent again after it failed.", *_UPSTREAM),
    _counter("penstock_upstream_hedges_total", "Requests that were sent to another one as well.", *_UPSTREAM),
    _counter("penstock_upstream_openings_total", "Of its breaker.", *_UPSTREAM),
    _counter("penstock_upstream_without_usage_total", "Answers billed by our own count, for want of its.", *_UPSTREAM),
    _counter("penstock_upstream_disagreements_total", "Answers whose usage was not what we counted.", *_UPSTREAM),
)

METRICS = {metric.name: metric for metric in (*GEN_AI, *VLLM, *OURS, *UPSTREAMS)}


@cache
def version() -> str:
    """Of what is installed; a checkout that is not installed has none."""
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "unknown"


def reference() -> tuple[Metric, ...]:
    """All of them, in the order in which a reader wants them."""
    return (*OURS, *UPSTREAMS, *GEN_AI, *VLLM)
