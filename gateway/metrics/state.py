"""What stands at this moment: queues, workers, caches, the ledger and what it leans on, read where each keeps it."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.house import Gateway
from gateway.ledger.spool import SpooledWriter
from gateway.metrics.counts import Sample
from gateway.metrics.names import version
from gateway.telemetry import Bucket


async def samples(gw: Gateway, spool: SpooledWriter | None, num_inside: int) -> list[Sample]:
    """Of this process, its workers included."""
    said = [
        Sample("penstock_build_info", (version(),), 1),
        Sample("penstock_gateway_processes", (), 1),
        Sample("penstock_requests_inside", (), num_inside),
        Sample("penstock_ledger_pending_rows", (), gw.ledger.num_pending),
        Sample("penstock_ledger_up", (), float(not gw.ledger.is_failing)),
        _times("penstock_ledger_wait_seconds", (), gw.ledger.added.view().buckets, gw.ledger.added.sum_ms),
    ]
    if spool is not None:
        said += [
            Sample("penstock_store_away", (), float(spool.is_away)),
            Sample("penstock_spool_rows", (), spool.num_rows),
        ]
    if gw.redis is not None:
        said.append(Sample("penstock_redis_away", (), float(gw.redis.is_away)))
    else:
        held = await gw.cache.held_in_all()
        said.append(Sample("penstock_answer_cache_entries", (), held.num_entries))
        said.append(Sample("penstock_answer_cache_bytes", (), held.num_bytes))
    return [*said, *_traces(gw), *_grammars(gw), *_queues(gw), *_workers(gw), *_upstreams(gw), *_sinks(gw)]


def _traces(gw: Gateway) -> Iterator[Sample]:
    if gw.tracing is None:
        return
    sender = gw.tracing.sender
    yield Sample("penstock_traces_total", (), gw.tracing.num_kept)
    yield Sample("penstock_traces_lost_total", (), sender.num_lost)
    for outcome, num in (
        ("exported", sender.count.num_exported),
        ("dropped", sender.count.num_dropped),
        ("failed", sender.count.num_failed),
    ):
        yield Sample("penstock_spans_total", (outcome,), num)


def _grammars(gw: Gateway) -> Iterator[Sample]:
    grammars = gw.grammars
    for outcome, num in (
        ("read", grammars.num_read),
        ("known", grammars.num_known_hits),
        ("refused", grammars.num_refused),
    ):
        yield Sample("penstock_grammars_total", (outcome,), num)
    yield Sample("penstock_grammar_read_seconds_total", (), grammars.read_s)


def _queues(gw: Gateway) -> Iterator[Sample]:
    for view in (*gw.dispatch.queues(), *gw.upstreams.queues()):
        who = (view.model, view.sla_class)
        yield Sample("penstock_queue_requests", who, view.num_waiting)
        yield Sample("penstock_queue_tenants", who, view.num_tenants)
        yield Sample("penstock_queue_oldest_seconds", who, view.oldest_wait_s)
        yield Sample("penstock_queue_returning", who, view.num_returning)
        yield Sample("penstock_queue_sent_total", who, view.num_sent)
        yield Sample("penstock_queue_refused_total", (*who, "full"), view.num_refused_full)
        yield Sample("penstock_queue_refused_total", (*who, "slow"), view.num_refused_slow)
        yield Sample("penstock_queue_refused_total", (*who, "timeout"), view.num_timed_out)
        if view.predicted_ttft_ms is not None:
            yield Sample("penstock_ttft_predicted_seconds", who, 1e-3 * view.predicted_ttft_ms)
        error = view.ttft_error
        if error.num:
            sum_ms = error.num * (error.mean_ms or 0.0)
            yield _times("penstock_ttft_prediction_error_seconds", who, error.buckets, sum_ms)
            bias_s = 1e-3 * (error.bias_ms or 0.0)
            yield Sample("penstock_ttft_prediction_bias_seconds", who, bias_s, (error.num,))


def _workers(gw: Gateway) -> Iterator[Sample]:
    for model in gw.dispatch.given_up():
        yield Sample("penstock_workers", (model, "given_up"), 1)
    resting = gw.gateways.resting
    for model, worker, _ in gw.dispatch.seated():
        facts, stats = worker.facts, worker.stats
        state = "starting" if facts is None else "resting" if worker.name in resting else "ready"
        yield Sample("penstock_workers", (model, state), 1)
        who = (model, worker.name)
        yield Sample("penstock_worker_lives_total", who, worker.num_lives)
        for name, times in (
            ("vllm:request_prefill_time_seconds", worker.phases.prefill),
            ("vllm:request_decode_time_seconds", worker.phases.decode),
            ("vllm:request_inference_time_seconds", worker.phases.inference),
        ):
            yield _times(name, who, times.view().buckets, times.sum_ms)
        if facts is None or stats is None:
            continue
        yield Sample("vllm:cache_config_info", (*who, str(facts.block_size), str(facts.num_blocks)), 1)
        used = stats.num_used_blocks / max(1, stats.num_blocks)
        for name, value in (
            ("vllm:num_requests_running", stats.num_running),
            ("vllm:num_requests_waiting", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", used),
            ("vllm:gpu_cache_usage_perc", used),
            ("vllm:num_preemptions_total", stats.num_preemptions),
            ("vllm:prompt_tokens_total", stats.num_prompt_tokens),
            ("vllm:prompt_tokens_cached_total", stats.num_cached_tokens),
            ("vllm:generation_tokens_total", stats.num_generated_tokens),
            ("vllm:prefix_cache_queries_total", stats.num_prompt_tokens),
            ("vllm:prefix_cache_hits_total", stats.num_cached_tokens),
            ("vllm:spec_decode_num_drafts_total", stats.num_drafts),
            ("vllm:spec_decode_num_draft_tokens_total", stats.num_drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens_total", stats.num_accepted_tokens),
            ("penstock_worker_paused", stats.num_paused),
            ("penstock_worker_step_seconds", 1e-3 * stats.step_ms),
            ("penstock_worker_busy_seconds_total", stats.busy_s),
            ("penstock_worker_steps_total", stats.num_steps),
            ("penstock_worker_displacements_total", stats.num_displacements),
            ("penstock_worker_drafter_faults_total", stats.num_drafter_faults),
            ("penstock_worker_adapters", stats.num_adapters),
            ("penstock_worker_grammars", stats.num_grammars),
            ("penstock_worker_grammar_compile_seconds_total", stats.grammar_compile_s),
            ("penstock_worker_masks_total", stats.num_masks),
            ("penstock_worker_mask_seconds_total", stats.mask_s),
        ):
            yield Sample(name, who, value)
        for source, num in (
            ("local_compute", stats.num_prompt_tokens - stats.num_cached_tokens),
            ("local_cache_hit", stats.num_cached_tokens),
        ):
            yield Sample("vllm:prompt_tokens_by_source_total", (*who, source), num)
        for state, num in (
            ("used", stats.num_used_blocks),
            ("cached", stats.num_cached_blocks),
            ("free", stats.num_free_blocks),
        ):
            yield Sample("penstock_worker_kv_blocks", (*who, state), num)
        for outcome, num in (
            ("compiled", stats.num_grammars_compiled),
            ("known", stats.num_grammar_hits),
            ("refused", stats.num_grammars_refused),
        ):
            yield Sample("penstock_worker_grammars_total", (*who, outcome), num)


def _upstreams(gw: Gateway) -> Iterator[Sample]:
    for known in gw.upstreams.known():
        view = gw.upstreams.view(known.terms.name)
        if view is None:
            continue
        who = (known.terms.model, known.terms.name)
        yield Sample("penstock_upstream_requests", who, view.num_open)
        yield Sample("penstock_upstream_up", who, float(view.state != "open"))
        if view.latency_ms is not None:
            yield Sample("penstock_upstream_latency_seconds", who, 1e-3 * view.latency_ms)
        for name, num in (
            ("requests", view.num_asked),
            ("failures", view.num_failed),
            ("retries", view.num_retries),
            ("hedges", view.num_hedges),
            ("openings", view.num_openings),
            ("without_usage", view.num_without_usage),
            ("disagreements", view.num_disagreements),
        ):
            yield Sample(f"penstock_upstream_{name}_total", who, num)


def _sinks(gw: Gateway) -> Iterator[Sample]:
    for sink in gw.sinks:
        yield Sample("penstock_sink_waiting", (sink.name,), float(sink.is_waiting))
        for outcome, num in (("taken", sink.num_taken), ("refused", sink.num_refused)):
            yield Sample("penstock_sink_events_total", (sink.name, outcome), num)


def _times(name: str, labels: tuple[str, ...], buckets: list[Bucket], sum_ms: float) -> Sample:
    bounds = tuple(bucket.max_ms / 1e3 for bucket in buckets if bucket.max_ms is not None)
    return Sample(name, labels, 1e-3 * sum_ms, tuple(bucket.num for bucket in buckets), bounds)
