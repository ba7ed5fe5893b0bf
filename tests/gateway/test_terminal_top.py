"""`penstock top` against the real gateway: as lines of JSON, as text, and in a terminal that is left with q."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gateway import live
from gateway.terminal import view
from tests.builders import PATIENCE_S, ROOT
from tests.gateway.conftest import ADMIN_KEY


@pytest.fixture(autouse=True)
def short_seconds(monkeypatch) -> None:
    monkeypatch.setattr(live, "TICK_S", 0.05)


def begun(front, *arguments: str, **streams: int) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        "PENSTOCK_URL": front.url,
        "PENSTOCK_ADMIN_KEY": ADMIN_KEY,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "140",
        "LINES": "40",
        "TERM": "xterm",
    }
    command = [sys.executable, "-m", "gateway", "top", *arguments]
    return subprocess.Popen(command, env=environ, **{"stdout": subprocess.PIPE, **streams})


async def told(process: subprocess.Popen[bytes]) -> str:
    output, _ = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert process.returncode == 0
    return output.decode()


async def test_whoever_reads_the_lines_may_have_enough_of_them(front):
    process = begun(front, "--json", stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert await asyncio.to_thread(process.stdout.readline)
    process.stdout.close()
    assert await asyncio.to_thread(process.stderr.read) == b""
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 1


async def test_a_request_is_seen_with_its_tenant_its_worker_and_its_tokens(front):
    asked = front.chat()
    submit = await front.peer.submitted()
    snapshot = json.loads(await told(begun(front, "--json", "--once")))
    (stream,) = snapshot["streams"]
    assert (stream["request_id"], stream["state"], stream["sla_class"]) == (submit.request_id, "prefill", "standard")
    front.peer.say(submit, [5, 6])
    async with asyncio.timeout(PATIENCE_S):
        while not (snapshot := json.loads(await told(begun(front, "--json", "--once"))))["streams"][0][
            "num_completion_tokens"
        ]:
            pass
    assert [(one["state"], one["num_completion_tokens"]) for one in snapshot["streams"]] == [("decode", 2)]
    text = await told(begun(front))
    assert submit.request_id in text
    assert "default" in text
    front.peer.say(submit, [3], "stop")
    await asked


def typed(far: int, text: str, answer: bytes) -> str:
    """Types ``answer`` when ``text`` is on the screen; everything that was seen on it until the other end is closed."""
    seen, is_typed = "", False
    try:
        while data := os.read(far, 65536):
            seen += data.decode(errors="replace")
            if text in seen and not is_typed:
                os.write(far, answer)
                is_typed = True
    except OSError:  # so a terminal says that its other end is closed
        pass
    return seen


async def test_a_terminal_is_drawn_anew_each_second_until_q(front):
    far, near = pty.openpty()
    process = begun(front, stdin=near, stdout=near, stderr=near)
    os.close(near)
    try:
        async with asyncio.timeout(PATIENCE_S):
            seen = await asyncio.to_thread(typed, far, "Open for longest", b"xq")
            assert await asyncio.to_thread(process.wait) == 0
    finally:
        process.kill()
        os.close(far)
    assert "\x1b[?1049h" in seen, "it has a screen of its own"
    assert "\x1b[?1049l" in seen, "and gives the old one back"


async def test_a_gateway_that_was_never_there_is_a_sentence(tmp_path: Path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_URL": "http://127.0.0.1:1"}
    command = [sys.executable, "-m", "gateway", "top"]
    ended = await asyncio.to_thread(
        subprocess.run, command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "there is no gateway at http://127.0.0.1:1" in ended.stderr


def a_snapshot(num_streams: int) -> bytes:
    times = {"num": 0, "p50": None, "p90": None, "p99": None}
    rates = ("requests", "failures", "prompt_tokens", "completion_tokens", "prefill_tokens", "decode_tokens")
    stream = {
        "request_id": "req_\x1b[2Jx",
        "tenant_id": "ten_1",
        "model": "demo",
        "sla_class": "standard",
        "worker": None,
        "state": "waiting",
        "age_s": 1.0,
        "num_prompt_tokens": 3,
        "num_completion_tokens": 0,
    }
    return json.dumps(
        {
            "at": 0.0,
            "num_gateways": 1,
            "num_open": num_streams,
            **{f"{name}_per_s": 1.0 for name in rates},
            "ttft_ms": times,
            "tpot_ms": times,
            "classes": [],
            "workers": [],
            "tenants": [],
            "streams": [stream] * num_streams,
        }
    ).encode()


def test_workers_of_one_name_are_told_apart_by_their_gateways():
    snapshot = json.loads(a_snapshot(0))
    names = ("num_blocks", "num_running", "num_waiting", "prefill_tokens_per_s", "decode_tokens_per_s", "step_ms")
    worker = {"model": "demo", "state": "ready", **dict.fromkeys(names, 0)}
    places = [("demo-0", "one:12:a"), ("demo-0", "two:7:b"), ("demo-1", "two:7:b")]
    snapshot["workers"] = [{**worker, "name": name, "gateway": gateway} for name, gateway in places]
    drawn = view.View()
    drawn.take(json.dumps(snapshot).encode())
    console = Console(file=io.StringIO(), width=140)
    console.print(drawn.drawn(140, 40))
    words = [line.split("   ")[0].strip() for line in console.file.getvalue().splitlines()]
    assert [word for word in words if word.startswith("demo-")] == ["demo-0 of one:12", "demo-0 of two:7", "demo-1"]


@pytest.mark.parametrize("size", [(140, 40), (125, 30), (80, 24), (40, 10)])
def test_it_fits_the_terminal(size):
    drawn = view.View()
    drawn.take(a_snapshot(50))
    console = Console(width=size[0], height=size[1], force_terminal=True, file=io.StringIO())
    with console.capture() as captured:
        console.print(drawn.drawn(*size))
    lines = captured.get().splitlines()
    assert len(lines) <= max(size[1], 22)
    assert "req_\x1b[2J" not in captured.get()


def test_a_sparkline_is_as_high_as_its_highest():
    assert view.sparkline([0.0, 4.0, 8.0]) == " ▄█"
    assert view.sparkline([0.0, 0.0]) == "  "
    assert view.bar(2.0, 4).plain == "████ 200%"
