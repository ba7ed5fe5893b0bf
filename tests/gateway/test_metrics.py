"""What operators measure: counted once, told in every format, bounded whatever clients send."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
from decimal import Decimal

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gateway.ledger.tally import Columns
from gateway.metrics import limits, names, shared
from gateway.metrics.counts import OTHER, Counts, Names, Sample, Spread
from gateway.metrics.exposition import Exposition
from gateway.metrics.families import Families, gathered, merged
from gateway.tracing.names import OPERATIONS
from policies import wire
from policies.observing import Metrics, Tracing
from policies.policy import Budget, Policy, Price
from policies.policy import Limits as Ceilings
from policies.settings import CLASSES
from policies.upstreams.terms import Upstream
from tests.builders import an_entry, until
from tests.gateway.conftest import ADMIN_KEY, Front

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


async def scraped(front: Front, accept: str = "", **headers: str) -> tuple[int, str]:
    """By somebody without a key, unless ``headers`` have one."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(front.url + "/metrics", headers={"accept": accept, **headers}) as answer,
    ):
        return answer.status, await answer.text()


def values(text: str) -> dict[tuple[str, ...], float]:
    """By name and labels, those in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_grammars_are_counted_by_what_became_of_them(front: Front):
    for kind in ("digit", "digit", "unreadable"):
        schema = {"type": "object", "properties": {"a": {"const": kind}}} if kind == "digit" else {"type": "nothing"}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        asked = front.chat(response_format=form)
        if kind == "digit":
            front.peer.say(await front.peer.submitted(), [5, 3], "stop")
        await asyncio.gather(asked, return_exceptions=True)
    told = values((await scraped(front))[1])
    outcomes = {outcome: told["penstock_grammars_total", outcome] for outcome in ("read", "known", "refused")}
    assert outcomes == {"read": 2, "known": 1, "refused": 1}
    assert told["penstock_grammar_read_seconds_total",] > 0


async def test_traces_are_counted_by_what_became_of_them(open_front):
    nobody = Tracing(endpoint="http://127.0.0.1:9", protocol="http/protobuf", sample_ratio=1.0)
    async with open_front(tracing=nobody) as front:
        sender = front.gw.tracing.sender
        await until(lambda: sender.is_there)
        await front.answered()
        await until(lambda: sender.count.num_failed > 0)
        sender.process.kill()
        await until(lambda: not sender.is_there)
        sender.send([b""])  # whatever it is, it is not looked at
        told = values((await scraped(front))[1])
    assert told["penstock_traces_total",] == told["penstock_traces_lost_total",] == 1
    assert told["penstock_spans_total", "failed"] == sender.count.num_failed
    assert told["penstock_spans_total", "exported"] == told["penstock_spans_total", "dropped"] == 0


async def test_what_was_asked_and_answered_is_counted_in_every_vocabulary(front: Front):
    await front.answered()
    status, text = await scraped(front)
    assert status == 200
    told = values(text)
    (row,) = front.rows()
    assert told["penstock_requests_total", "/v1/chat/completions", "demo", "standard", "200"] == 1
    assert told["penstock_tokens_total", "demo", "completion"] == row["num_completion_tokens"]
    assert told["penstock_tenant_tokens_total", row["tenant_id"], "prompt"] == row["num_prompt_tokens"]
    assert told["gen_ai_server_request_duration_seconds_count", "", "chat", "penstock", "demo"] == 1
    assert told["gen_ai_client_token_usage_sum", "chat", "penstock", "demo", "input"] == row["num_prompt_tokens"]
    assert told["vllm:e2e_request_latency_seconds_count", "demo"] == 1
    assert told["vllm:request_success_total", row["finish_reason"], "demo"] == 1
    assert told["penstock_sla_requests_total", "standard"] == told["penstock_sla_kept_total", "standard"] == 1
    assert told["penstock_sla_attainment_ratio", "standard", "5m"] == 1.0
    assert told["penstock_workers", "demo", "ready"] == 1
    assert told["penstock_queue_sent_total", "demo", "standard"] == 1


async def test_what_a_worker_does_is_told_as_dashboards_for_vllm_read_it(front: Front):
    asked = front.chat()
    submit = await front.peer.submitted()
    front.peer.say(submit, [5, 3], "stop", queue_s=9.0, prefill_s=0.4, decode_s=2.0)
    await asked
    stats = wire.Stats(0, 0, 64, 0, 0, 64, 100, 1, 40, 0, 0, 0.0, num_adapters=3, num_generated_tokens=2)
    stats = msgspec.structs.replace(stats, num_drafts=5, num_drafted_tokens=20, num_accepted_tokens=8)
    stats = msgspec.structs.replace(stats, num_prompt_tokens=90)  # some of them were computed twice
    front.peer.send(stats)
    (_, worker, _), *_ = front.gw.dispatch.seated()
    await until(lambda: worker.stats == stats)
    told = values((await scraped(front))[1])
    who = (worker.name, "demo")
    for phase, seconds in (("prefill", 0.4), ("decode", 2.0), ("inference", 2.4)):
        assert told[f"vllm:request_{phase}_time_seconds_sum", *who] == pytest.approx(seconds)
        assert told[f"vllm:request_{phase}_time_seconds_count", *who] == 1
    assert told["vllm:request_prefill_time_seconds_bucket", worker.name, "0.3", "demo"] == 0
    assert told["vllm:request_prefill_time_seconds_bucket", worker.name, "0.5", "demo"] == 1
    assert told["vllm:prompt_tokens_total", *who] == told["vllm:prefix_cache_queries_total", *who] == 90
    assert told["vllm:prompt_tokens_cached_total", *who] == 40
    assert told["vllm:prompt_tokens_by_source_total", *who, "local_compute"] == 50
    assert told["vllm:prompt_tokens_by_source_total", *who, "local_cache_hit"] == 40
    assert told["vllm:generation_tokens_total", *who] == 2
    drafts = {
        name: told[f"vllm:spec_decode_num_{name}_total", *who] for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert drafts == {"drafts": 5, "draft_tokens": 20, "accepted_tokens": 8}
    assert told["penstock_worker_adapters", *who] == 3
    facts = worker.facts
    assert told["vllm:cache_config_info", str(facts.block_size), *who, str(facts.num_blocks)] == 1


async def test_how_much_of_its_limits_a_tenant_has_used_is_read_where_they_are_held(open_front):
    policy = Policy(
        limits=Ceilings(requests_per_minute=10, tokens_per_day=1000, concurrent_requests=4),
        model_limits={"*": Ceilings(tokens_per_minute=5000)},
        budget=Budget(Decimal("0.001"), "day"),
        prices={"*": Price(prompt=Decimal(1), completion=Decimal(2))},
    )

    async def used(front: Front) -> dict[str, float]:
        (_, text), (tenant,) = await scraped(front), front.gw.directory.tenants()
        told = {key[1:]: value for key, value in values(text).items() if key[0] == "penstock_limit_used_ratio"}
        assert {whose for _, whose in told} <= {tenant.id}
        return {limit: value for (limit, _), value in told.items()}

    async with open_front(policies={"default": policy}) as front:
        assert await used(front) == {}
        asked = front.chat(max_tokens=5)
        submit = await front.peer.submitted()
        assert (await used(front))["concurrent_requests"] == 0.25  # although there is no row yet
        front.peer.say(submit, [5, 6, 3], "stop")
        await asked
        (row,) = await front.settled(1)
        num_tokens = row["num_prompt_tokens"] + row["num_completion_tokens"]
        assert await used(front) == {
            "requests_per_minute": 0.1,
            "tokens_per_day": pytest.approx(num_tokens / 1000),
            "concurrent_requests": 0.0,
            "budget": pytest.approx(row["cost_micros"] / 1000),
        }
        assert list(limits.samples(front.gw, Names(0), 0)) == []
        assert {sample.labels[0] for sample in limits.samples(front.gw, Names(1), 1)} == {row["tenant_id"]}
        gone = Names(1)
        gone.known("ten_that_was_deleted")
        assert list(limits.samples(front.gw, gone, 1)) == []


async def test_both_formats_are_read_by_their_own_parsers_and_promtool(front: Front):
    await front.answered()
    await front.post("/v1/chat/completions", {"model": "nobody", "messages": []})
    _, plain = await scraped(front)
    _, open_ = await scraped(front, OPENMETRICS)
    assert open_.endswith("# EOF\n")
    families = list(openmetrics.text_string_to_metric_families(open_))
    assert {family.name for family in families} >= {"penstock_requests", "vllm:e2e_request_latency_seconds"}
    assert values(plain)["penstock_refusals_total", "empty_array"] == 1
    promtool = shutil.which("promtool")
    assert promtool, "promtool is in Debian's package prometheus"
    checked = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=plain, capture_output=True, text=True
    )
    # Its style guide minds nothing but names that dashboards for vLLM already read.
    ours = [line for line in (checked.stdout + checked.stderr).splitlines() if line and not line.startswith("vllm:")]
    assert ours == []


@pytest.mark.parametrize(
    ("access", "headers", "expected"),
    [
        ("loopback", {}, 200),
        ("loopback", {"x-forwarded-for": "9.9.9.9"}, 401),
        ("loopback", {"authorization": f"Bearer {ADMIN_KEY}"}, 200),
        ("admin", {}, 401),
        ("admin", {"authorization": f"Bearer {ADMIN_KEY}"}, 200),
        ("open", {"x-forwarded-for": "9.9.9.9"}, 200),
    ],
)
async def test_who_may_read_is_configured(open_front, access, headers, expected):
    async with open_front(metrics=Metrics(access=access)) as front:
        status, _ = await scraped(front, **headers)
        assert status == expected


async def test_what_a_process_says_of_itself_is_read_by_the_others(open_front, tmp_path, monkeypatch):
    far = Upstream(name="far-1", model="far", url="http://127.0.0.1:1/v1", probe_s=0.0)
    async with open_front(upstreams=(far,)) as front:
        await front.answered()
        own = await front.gw.metrics.families(front.gw)
    assert "penstock_upstream_up" in own
    (tmp_path / "metrics").mkdir()
    mine = shared.Files(tmp_path / "metrics")
    monkeypatch.setattr(shared.os, "getpid", lambda: 4_000_000)
    shared.Files(tmp_path / "metrics").write(own)
    assert mine.others() == [own]


async def test_nothing_is_there_when_it_is_switched_off(open_front):
    async with open_front(metrics=Metrics(enabled=False)) as front:
        assert (await scraped(front))[0] == 404


def test_a_million_names_make_no_more_series_than_are_allowed():
    counts = Counts(CLASSES, max_models=3, max_tenants=2)
    row = an_entry()
    for start in range(0, 100_000, 1000):
        some = [msgspec.structs.replace(row, model=f"m{n}", tenant_id=f"t{n}") for n in range(start, start + 1000)]
        counts.take(Columns(some, CLASSES))
    families = gathered(counts.samples("USD", 0.99))
    models = {labels[0] for labels in families["penstock_requests_total"]}
    tenants = families["penstock_tenant_requests_total"]
    assert models == {"m0", "m1", "m2", OTHER}
    assert {labels[0]: sample.value for labels, sample in tenants.items()} == {"t0": 1, "t1": 1, OTHER: 99_998}
    assert sum(len(series) for series in families.values()) < 300


def test_what_is_asked_again_tells_what_has_come_meanwhile():
    exposition = Exposition()

    def told(num: int, *others: Sample) -> dict[tuple[str, ...], float]:
        spread = Sample("penstock_ledger_wait_seconds", (), 0.5 * num, (num, 1), (1.0,))
        return values(exposition.text(gathered([spread, *others]), "")[0].decode())

    assert told(1)["penstock_ledger_wait_seconds_bucket", "1"] == 1
    other = Sample("penstock_queue_seconds", ("m", "c"), 0.25, (0, 1), (2.0,))
    again = told(4, other)
    assert again["penstock_ledger_wait_seconds_bucket", "1"] == 4
    assert again["penstock_ledger_wait_seconds_count",] == 5
    assert again["penstock_ledger_wait_seconds_sum",] == 2.0
    assert again["penstock_queue_seconds_bucket", "+Inf", "m", "c"] == 1
    assert told(4) == {key: value for key, value in again.items() if "m" not in key}


def test_names_that_break_formats_are_shown_as_names():
    counts = Counts(CLASSES, 10, 10)
    odd = 'a"b\\c\nd{}'
    counts.take(Columns([an_entry(model=odd)], CLASSES))
    text, _ = Exposition().text(gathered(counts.samples("USD", 0.99)), "")
    assert any(odd in labels for labels in values(text.decode()))


@given(st.lists(st.floats(0, 1e5), max_size=60))
def test_one_count_gives_each_histogram_what_it_would_have_counted_itself(seen):
    fine = Spread(tuple(sorted({*names.DURATIONS_S, *names.VLLM_LATENCY_S})))
    for value in seen:
        fine.add(value)
    for bounds in (names.DURATIONS_S, names.VLLM_LATENCY_S):
        own = Spread(bounds)
        for value in seen:
            own.add(value)
        assert fine.within(bounds) == tuple(own.counts)


@given(st.lists(st.tuples(st.floats(0, 1e5) | st.sampled_from(names.LAG_S), st.integers(1, 4)), max_size=60))
def test_quantities_are_counted_together_as_one_by_one(seen):
    one_by_one, repeated, together, each = (Spread(names.LAG_S) for _ in range(4))
    for value, num in seen:
        one_by_one.add(value)
        for _ in range(num):
            repeated.add(value)
    together.add_all([value for value, _ in seen])
    each.add_each([value for value, _ in seen], [num for _, num in seen])
    assert (together.counts, together.sum) == (one_by_one.counts, pytest.approx(one_by_one.sum))
    assert (each.counts, each.sum) == (repeated.counts, pytest.approx(repeated.sum))


def test_processes_are_added_up_as_each_metric_says():
    def process(num: int, longest: float) -> Families:
        return gathered(
            [
                Sample("penstock_requests_total", ("m", "c", "e", "200"), num),
                Sample("penstock_queue_oldest_seconds", ("m", "c"), longest),
                Sample("vllm:num_requests_running", ("m", "w"), 7),
                Sample("penstock_ledger_wait_seconds", (), 0.5, (num, 1), (1.0,)),
            ]
        )

    families = merged([process(2, 1.0), process(3, 4.0)])
    assert families["penstock_requests_total"]["m", "c", "e", "200"].value == 5
    assert families["penstock_queue_oldest_seconds"]["m", "c"].value == 4.0
    assert families["vllm:num_requests_running"]["m", "w"].value == 7
    assert families["penstock_ledger_wait_seconds"][()].counts == (5, 2)


def test_a_share_of_several_processes_is_that_of_all_their_requests():
    def process(num: int, num_kept: int, is_up: bool, num_lives: int) -> Families:
        counts = Counts(CLASSES, 10, 10)
        times_ms = [1.0] * num_kept + [1e6] * (num - num_kept)
        rows = [an_entry(sla_class="standard", ttft_ms=ms, duration_ms=ms) for ms in times_ms]
        counts.take(Columns(rows, CLASSES))
        return gathered(
            [
                *counts.samples("USD", 0.9),
                Sample("penstock_ledger_up", (), is_up),
                Sample("penstock_worker_lives_total", ("m", "w"), num_lives),
                Sample("penstock_ttft_prediction_bias_seconds", ("m", "c"), float(num_kept), (num,)),
            ]
        )

    for processes in itertools.permutations([process(1, 1, True, 3), process(99, 49, False, 1)]):
        families = merged(processes)
        assert families["penstock_sla_attainment_ratio"]["standard", "5m"].value == pytest.approx(0.5)
        assert families["penstock_sla_burn_rate"]["standard", "1h"].value == pytest.approx(5.0)
        assert families["penstock_ttft_prediction_bias_seconds"]["m", "c"].value == pytest.approx((1 + 99 * 49) / 100)
        assert families["penstock_ledger_up"][()].value == 0
        assert families["penstock_worker_lives_total"]["m", "w"].value == 3


def test_what_two_lines_of_a_process_have_is_put_together_as_each_metric_says():
    who = ("m", "c")
    families = gathered(
        [
            Sample(name, who, value)
            for name in ("penstock_queue_oldest_seconds", "penstock_queue_requests")
            for value in (4, 3)
        ]
        + [Sample("penstock_workers", ("m", "ready"), 1)] * 2
    )
    assert families["penstock_queue_oldest_seconds"][who].value == 4
    assert families["penstock_queue_requests"][who].value == 7
    assert families["penstock_workers"]["m", "ready"].value == 2


def test_what_a_dead_process_counted_stays_counted(tmp_path, monkeypatch):
    (tmp_path / "1-1").write_bytes(b"of an earlier family")
    mine = shared.Files(tmp_path)
    monkeypatch.setattr(shared.os, "getpid", lambda: 4_000_000)
    other = shared.Files(tmp_path)
    other.write(
        gathered(
            [
                Sample("penstock_tenant_requests_total", ("t",), 5),
                Sample("penstock_workers", ("m", "s"), 1),
                Sample("vllm:generation_tokens_total", ("m", "w"), 7),  # the worker did, and may have begun anew
            ]
        )
    )
    everything = ["penstock_tenant_requests_total", "penstock_workers", "vllm:generation_tokens_total"]
    assert [sorted(each) for each in mine.others()] == [everything]
    (path,) = [path for path in tmp_path.iterdir() if path.name.endswith("-4000000")]
    shared.os.utime(path, (0, 0))
    assert [sorted(each) for each in mine.others()] == [["penstock_tenant_requests_total"]]
    path.write_bytes(b"\xc1")
    assert mine.others() == []


def test_every_metric_is_in_the_reference_with_its_meaning():
    told = names.reference()
    assert {metric.name for metric in told} == set(names.METRICS)
    for metric in told:
        assert metric.meaning.endswith("."), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name


def test_an_operation_is_called_in_metrics_as_it_is_in_traces():
    counts = Counts(CLASSES, 10, 10)
    counts.take(Columns([an_entry(endpoint=endpoint) for endpoint in OPERATIONS], CLASSES))
    told = gathered(counts.samples("USD", 0.99))["gen_ai_server_request_duration_seconds"]
    assert {labels[0] for labels in told} == set(OPERATIONS.values())
