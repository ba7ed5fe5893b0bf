"""What a real gateway writes while it is busy: every request's line, and nobody's secrets, prompts or answers."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.test_process import PATIENCE_S, serving, until

SAID = "zebra-crossing-at-noon"
"""In every prompt, and in every answer that repeats it."""
UPSTREAM = """
[models.demo]
source = "demo"

[[upstreams]]
name = "gone"
model = "far"
url = "http://127.0.0.1:1/v1"
key_variable = "FAR_KEY"
max_retries = 0
"""
FAR_KEY = "sk-far-0123456789abcdef"
WRONG_KEY = "sk-penstock-wrong0123456789abcdefghijk"


def asked(url: str, path: str, body: Any, key: str, header: str = "authorization") -> tuple[int, bytes, str]:
    """Status, body and the id under which the log must have it."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", header: f"Bearer {key}" if header == "authorization" else key}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read(), answer.headers["x-request-id"]
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read(), refusal.headers["x-request-id"]


def requests_of(key: str) -> list[tuple[str, Any, str, str]]:
    chat = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": SAID}]}
    tool = {"type": "function", "function": {"name": "look", "description": SAID, "parameters": {"type": "object"}}}
    return [
        ("/v1/chat/completions", chat, key, "authorization"),
        ("/v1/chat/completions", {**chat, "stream": True}, key, "authorization"),
        ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "none"}, key, "authorization"),
        ("/v1/chat/completions", {**chat, "model": "far"}, key, "authorization"),
        ("/v1/chat/completions", {**chat, "temperature": SAID}, key, "authorization"),
        ("/v1/chat/completions", {**chat, "response_format": {"type": SAID}}, key, "authorization"),
        ("/v1/chat/completions", f'{{"model": "demo", {SAID}'.encode(), key, "authorization"),
        ("/v1/chat/completions", chat, WRONG_KEY, "authorization"),
        ("/v1/completions", {"model": "demo", "prompt": SAID, "echo": True, "max_tokens": 4}, key, "authorization"),
        ("/v1/completions", {"model": "demo", "prompt": SAID * 9000, "max_tokens": 4}, key, "authorization"),
        ("/v1/messages", chat, key, "x-api-key"),
        ("/v1/responses", {"model": "demo", "input": SAID, "max_output_tokens": 16}, key, "authorization"),
        ("/v1/embeddings", {"model": "demo", "input": SAID}, key, "authorization"),
        ("/api/chat", {"model": "demo", "messages": chat["messages"], "stream": False}, key, "authorization"),
        ("/tokenize", {"model": "demo", "prompt": SAID}, key, "authorization"),
    ]


@pytest.mark.parametrize("form", ["json", "console"])
def test_the_log_has_every_request_and_no_secret_no_prompt_and_no_answer(tmp_path: Path, form: str):
    (tmp_path / "config.toml").write_text(UPSTREAM)
    environment = {"PENSTOCK_LOG__FORMAT": form, "PENSTOCK_LOG__LEVEL": "debug", "FAR_KEY": FAR_KEY}
    with serving(tmp_path, **environment) as house:
        bootstrap = (tmp_path / "data" / "bootstrap.env").read_text().splitlines()
        keys = dict(line.split("=", 1) for line in bootstrap)
        admin_key = keys["PENSTOCK_ADMIN_KEY"]
        ids, statuses = [], []
        for path, body, key, header in requests_of(house.key):
            status, answer, request_id = asked(house.url, path, body, key, header)
            ids.append(request_id)
            statuses.append(status)
            if path == "/v1/completions" and status == 200:
                assert SAID.encode() in answer
        tenant = json.loads(asked(house.url, "/admin/v1/tenants", {"name": "red"}, admin_key)[1])
        new_key = {"tenant_id": tenant["id"], "name": "laptop"}
        _, made, request_id = asked(house.url, "/admin/v1/keys", new_key, admin_key)
        ids.append(request_id)
        house.process.send_signal(signal.SIGTERM)
        assert house.wait() == 0
        log = "".join(house.errors)
    assert {200, 400, 401} <= set(statuses)
    assert [one for one in ids if one not in log] == []
    secrets = [*keys.values(), json.loads(made)["key"], FAR_KEY, WRONG_KEY]
    for secret in secrets:
        assert secret not in log
        assert secret.removeprefix("sk-penstock-")[4:-4] not in log
    assert SAID not in log
    if form == "json":
        lines = [json.loads(line) for line in house.errors]
        assert set(ids) <= {line["request_id"] for line in lines if "request_id" in line}
        assert "stopped" in {line["message"] for line in lines if line.get("worker") == "demo-0"}


def test_workers_say_no_more_than_the_log_s_level_asks_for(tmp_path: Path):
    with serving(tmp_path, PENSTOCK_LOG__LEVEL="warning") as house:
        assert house.answer()
        house.process.send_signal(signal.SIGTERM)
        assert house.wait() == 0
        assert house.errors == []


def test_why_a_worker_does_not_start_is_a_line_of_the_log_where_that_has_objects(tmp_path: Path):
    (tmp_path / "config.toml").write_text('[log]\nformat = "json"\n\n[engine]\ndevices = [99]\n')
    with serving(tmp_path, CUDA_VISIBLE_DEVICES="") as house:
        assert house.wait() == 2
        said = [json.loads(line) for line in house.errors]
        assert [line["level"] for line in said if line.get("worker") == "demo-0"] == ["error"]


def test_a_reader_of_the_log_that_stalls_holds_no_request_no_worker_and_no_end(tmp_path: Path):
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    with serving(tmp_path, errors=writes) as house:
        os.close(writes)
        for _ in range(20):  # of which a line has some 400 bytes
            assert house.answer()
        (worker,) = house.workers()
        os.kill(worker, signal.SIGKILL)  # the next one has things to say, too
        until(lambda: house.workers() not in ([], [worker]))
        until(house.answer)
        house.process.send_signal(signal.SIGTERM)
        assert house.process.wait(PATIENCE_S) == 0
    os.close(reads)
