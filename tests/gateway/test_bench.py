"""The load generator: its arithmetic, its schedules, and what it reports about a small server that is really there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench import arrivals, measures, plot
from gateway.bench.arrivals import Due, TraceError
from gateway.bench.measures import Outcome
from gateway.bench.prompts import Fit, Prompts
from gateway.cli import main
from gateway.client import Events, api_root, find_admin_key, find_key
from policies.distribution import percentile
from tests.builders import PATIENCE_S
from tests.gateway.compatible_server import CompatibleServer, compatible_server

ROOT = Path(__file__).parents[2]


async def bench_serve(server: CompatibleServer, *options: str) -> tuple[int, str, str]:
    """`penstock bench serve` as a process: exit code, standard output, standard error."""
    process = await start(server, *options)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def start(server: CompatibleServer, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-c",
            "from gateway.bench.command import bench; bench()",
            "serve",
            "--url",
            server.url,
            *options,
        ),
        cwd=ROOT,
        env=os.environ | {"PENSTOCK_API_KEY": "sk-test"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


# Arithmetic


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 100))
def test_a_percentile_lies_within_the_values_and_leaves_its_share_below(values, percent):
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert ordered[0] <= found <= ordered[-1]
    below = sum(value <= found * (1 + 1e-12) for value in ordered)
    assert below >= int((len(ordered) - 1) * percent / 100)


def test_percentiles_are_those_of_numpy():
    assert [percentile([1.0, 2.0, 3.0, 10.0], p) for p in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 7.9, 10])


def test_latencies_count_from_the_instant_a_request_was_due():
    late = Outcome(
        due_at=1.0, sent_at=3.0, finished_at=6.0, chunk_ats=array("d", [4.0, 4.5, 5.5]), num_completion_tokens=6
    )
    report = measures.report([late])
    assert report.ttft_ms
    assert report.tpot_ms
    assert report.itl_ms
    assert report.e2e_ms
    assert report.send_lag_ms
    assert report.ttft_ms.p50 == 3000
    assert report.e2e_ms.p50 == 5000
    assert report.tpot_ms.p50 == 300, "(last - first) / (n - 1), n in tokens"
    assert (report.itl_ms.num, report.itl_ms.max) == (2, 1000)
    assert report.send_lag_ms.p50 == 2000
    assert report.tokens_per_chunk == 2


def test_failed_requests_count_as_errors_alone():
    good = Outcome(0.0, 0.0, 2.0, array("d", [1.0]), num_completion_tokens=10)
    bad = Outcome(0.0, 0.0, 4.0, array("d", [0.5]), num_completion_tokens=99, error="timed out")
    report = measures.report([good, bad, bad])
    assert (report.num_ok, report.num_errors, report.errors) == (1, 2, {"timed out": 2})
    assert report.num_completion_tokens == 10
    assert report.completion_tokens_per_s == 10 / 4
    assert report.ttft_ms
    assert report.ttft_ms.num == 1


def test_nothing_measured_is_a_report_too():
    report = measures.report([])
    assert (report.num_requests, report.ttft_ms, report.requests_per_s) == (0, None, 0.0)
    assert measures.tokens_over_time([]) == ([], [])


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 20), st.integers(1, 100)), min_size=1, max_size=30))
def test_throughput_over_time_adds_up_to_all_tokens(shapes):
    outcomes = [
        Outcome(
            due, due, due + 5.0, array("d", [due + 5.0 * i / max(1, n) for i in range(n)]), num_completion_tokens=tokens
        )
        for due, n, tokens in shapes
    ]
    middles, tokens_per_s = measures.tokens_over_time(outcomes, num_bins=7)
    bin_s = 2 * middles[0]
    assert sum(tokens_per_s) * bin_s == pytest.approx(sum(tokens for _, _, tokens in shapes))


# Schedules


def test_poisson_arrivals_keep_their_rate_and_repeat_with_their_seed():
    dues = arrivals.poisson(20_000, 50.0, 10, 5, seed=7)
    assert dues == arrivals.poisson(20_000, 50.0, 10, 5, seed=7)
    assert dues != arrivals.poisson(20_000, 50.0, 10, 5, seed=8)
    assert dues[-1].at_s == pytest.approx(20_000 / 50.0, rel=0.03)
    gaps = [after.at_s - before.at_s for before, after in pairwise(dues)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05), "exponential gaps deviate by their mean"


def test_a_trace_in_azures_form_is_read_and_scaled():
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,396,109\n"
        "2023-11-16 18:15:47.6805900,8,1\n"
    )
    assert arrivals.trace(text, time_scale=0.5, length_scale=0.1) == [Due(0.0, 37, 4), Due(0.5, 1, 1), Due(2.0, 40, 11)]


def test_a_trace_in_mooncakes_form_keeps_its_shared_prefixes():
    text = (
        '{"timestamp": 27000, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}\n\n'
        '{"timestamp": 30000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 9]}\n'
    )
    dues = arrivals.trace(text, 1.0, 1.0)
    assert dues == [Due(0.0, 1030, 500, (0, 1, 2)), Due(3.0, 1100, 20, (0, 1, 9))]
    fit = Fit(per_word=1.0, overhead=0.0)
    prompts = Prompts(0, fit)
    first, second = (prompts.make(number, due).split() for number, due in enumerate(dues))
    assert (len(first), len(second)) == (1030, 1100)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024 : len(first)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        "a,b\n1,2\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n",
        "{no json}\n",
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_a_sentence(text):
    with pytest.raises(TraceError, match="trace"):
        arrivals.trace(text, 1.0, 1.0)


@pytest.mark.parametrize("number", ["inf", "nan"])
@pytest.mark.parametrize("option", ["--rate", "--duration", "--timeout", "--time-scale", "--length-scale"])
def test_a_number_without_end_is_refused(option, number):
    said = CliRunner().invoke(main, ["bench", "serve", "--url", "http://127.0.0.1:9", option, number])
    assert said.exit_code == 2
    assert f"Invalid value for '{option}'" in said.output


def test_a_schedule_is_bounded_in_count_and_time():
    dues = [Due(float(i), 1, 1) for i in range(10)]
    assert len(arrivals.bounded(dues, 5, 100.0)) == 5
    assert len(arrivals.bounded(dues, 100, 3.0)) == 4


# Prompts


def test_prompts_have_the_wanted_length_and_nothing_in_common():
    fit = Fit.through((24, 5 + 2 * 24), (120, 5 + 2 * 120))
    assert (fit.per_word, fit.overhead) == (2.0, 5.0)
    prompts = Prompts(3, fit)
    texts = [prompts.make(number, Due(0.0, 205, 1)) for number in range(50)]
    assert len({text.split()[0] for text in texts}) == 50
    assert all(abs(5 + 2 * len(text.split()) - 205) <= 6 for text in texts)
    assert texts[7] == Prompts(3, fit).make(7, Due(0.0, 205, 1))


def test_prompts_share_as_long_a_prefix_as_asked():
    prompts = Prompts(3, Fit(1.0, 0.0), num_shared_tokens=40)
    one, two = (prompts.make(number, Due(0.0, 100, 1)).split() for number in range(2))
    assert one[:40] == two[:40]
    assert one[40] != two[40]


def test_a_fit_through_nonsense_is_the_default():
    assert Fit.through((24, 0), (120, 0)) == Fit() == Fit.through((24, 90), (120, 80))


# The client's end of the API


@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"").strip()), max_size=8),
    st.data(),
)
def test_events_are_the_same_however_the_bytes_are_cut(payloads, data):
    stream = b": comment\r\n\r\n" + b"".join(b"event: x\ndata: " + payload + b"\r\n\n" for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    events, found = Events(), []
    for start_, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += events.feed(stream[start_:end])
    assert found == payloads


def test_an_address_may_be_typed_in_any_of_the_usual_ways():
    for url in ("localhost:8080", "http://localhost:8080/", "http://localhost:8080/v1", "http://localhost:8080/v1/"):
        assert api_root(url) == "http://localhost:8080/v1"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://[::1", "http://[::1]:x", "ftp://here", "http://", ""]
)
@pytest.mark.parametrize("command", [("bench", "serve"), ("chat", "Hello"), ("tenants", "list")])
def test_what_is_no_address_is_refused_where_it_was_typed(command, url):
    said = CliRunner().invoke(main, [*command, "--url", url])
    assert said.exit_code == 2, said.output
    assert f"Invalid value for '--url': {url!r} is no address of a server" in said.output


def test_a_key_is_read_without_the_end_of_its_line(monkeypatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-env\r")
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "sk-admin\r\n")
    assert find_key(None, "127.0.0.1:8080") == "sk-env"
    assert find_admin_key(None, "127.0.0.1:8080") == "sk-admin"
    assert find_key(" sk-given\n", "127.0.0.1:8080") == "sk-given"


def test_the_local_servers_key_is_found_and_stays_on_this_machine(tmp_path, monkeypatch):
    for name in ("PENSTOCK_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_STORE__DATA_DIR", str(tmp_path))
    (tmp_path / "bootstrap.env").write_text("PENSTOCK_API_KEY=sk-here\nPENSTOCK_ADMIN_KEY=sk-admin\n")
    assert find_key(None, "127.0.0.1:8080") == "sk-here"
    assert find_key(None, "https://elsewhere.example") is None
    assert find_key("sk-given", "127.0.0.1:8080") == "sk-given"
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-env")
    assert find_key(None, "https://elsewhere.example") == "sk-env"


# The whole command


async def test_a_closed_loop_is_reported_in_full(tmp_path):
    picture = tmp_path / "run.png"
    async with compatible_server() as server:
        code, out, _ = await bench_serve(
            server, "--requests", "20", "--concurrency", "4", "--input-tokens", "65", "--json", "--plot", str(picture)
        )
    report = json.loads(out)
    assert code == 0
    assert (report["num_ok"], report["num_errors"], report["model"]) == (20, 0, "tiny")
    assert report["num_completion_tokens"] == 60
    assert report["num_cached_tokens"] == 60
    assert abs(report["num_prompt_tokens"] / 20 - 65) < 6, "prompts have about the length that was asked for"
    assert report["ttft_ms"]["num"] == report["tpot_ms"]["num"] == 20
    assert report["itl_ms"]["num"] == 40
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert set(server.keys) == {"Bearer sk-test"}
    measured = server.requests[-20:]
    assert len({request["messages"][0]["content"] for request in measured}) == 20
    assert all(request["stream"] and request["stream_options"] == {"include_usage": True} for request in measured)
    assert not any("ignore_eos" in request for request in measured)


async def test_an_open_loop_on_completions_without_streams_has_only_whole_answers():
    async with compatible_server() as server:
        server.with_usage = False
        options = "--rate 200 --requests 10 --no-stream --endpoint completions --ignore-eos --output-tokens 9 --json"
        code, out, _ = await bench_serve(server, *options.split())
    report = json.loads(out)
    assert code == 0
    assert (report["num_ok"], report["ttft_ms"], report["e2e_ms"]["num"]) == (10, None, 10)
    assert report["counted_by_server"] is False
    last = server.requests[-1]
    assert (last["max_tokens"], last["ignore_eos"], "messages" in last, "stream" in last) == (9, True, False, False)


async def test_without_usage_pieces_are_counted_and_the_report_says_so():
    async with compatible_server() as server:
        server.with_usage = False
        code, out, _ = await bench_serve(server, "--requests", "5")
    assert code == 0
    assert "15 completion tokens, counted by pieces" in out


async def test_a_trace_may_begin_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,3\n", "utf-8-sig")
    async with compatible_server() as server:
        code, out, err = await bench_serve(server, "--trace", str(path), "--warmup", "0", "--json")
    assert code == 0, err
    assert json.loads(out)["num_ok"] == 1


async def test_a_trace_is_replayed(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{i / 10},100,{i + 1}\n" for i in range(10)))
    async with compatible_server() as server:
        code, out, _ = await bench_serve(server, "--trace", str(path), "--time-scale", "0.1", "--json")
    assert code == 0
    assert json.loads(out)["num_ok"] == 10
    # Each has a connection of its own, so two that are sent soon after each other may come in any order.
    assert sorted(request["max_tokens"] for request in server.requests[-10:]) == list(range(1, 11))


async def test_a_server_that_fails_every_request_ends_in_exit_code_1():
    async with compatible_server() as server:
        server.fail_with = 503
        code, out, err = await bench_serve(server, "--requests", "5")
    assert (code, out) == (1, "")
    assert "HTTP 503: no room left" in err


async def test_streams_that_break_off_are_errors():
    async with compatible_server() as server:
        server.num_whole_streams = 3  # the requests before the measured ones must pass
        code, out, _ = await bench_serve(server, "--requests", "5")
    assert code == 1
    assert "5 x the stream ended before [DONE]" in out


async def test_an_interrupted_run_prints_what_was_measured():
    async with compatible_server() as server:
        process = await start(server, "--requests", "100000", "--concurrency", "1", "--json")
        async with asyncio.timeout(PATIENCE_S):
            while len(server.requests) < 20:
                await server.asked.wait()
                server.asked.clear()
            server.hold = asyncio.Event()
            await server.held.wait()
            process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
            await server.cancelled.wait()
    report = json.loads(out)
    assert process.returncode == 0
    assert report["interrupted"] is True
    assert 0 < report["num_ok"] < 100_000
    assert report["num_errors"] == 0


def test_a_picture_of_failures_alone_can_be_drawn(tmp_path):
    plot.draw([Outcome(0.0, finished_at=1.0, error="timed out")], "0 tokens/s", "nothing worked", tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 1000


@pytest.mark.parametrize("command", ["serve", "engine"])
@pytest.mark.parametrize("name", ["nowhere/run.png", "run.doc"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, command, name):
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "bench", command, "--plot", tmp_path / name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"cannot write the picture to {tmp_path / name}: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
