"""`penstock chat` against a small server that is really there: from a script, and with somebody typing."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.builders import PATIENCE_S
from tests.gateway.compatible_server import compatible_server

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "from gateway.terminal.chat import chat; chat()")
ENVIRONMENT = os.environ | {"PENSTOCK_API_KEY": "sk-test", "TERM": "dumb", "COLUMNS": "200"}


async def run_chat(*arguments: str | bytes, typed: str | bytes = "") -> tuple[int | None, str, str]:
    """The command with ``typed`` piped in: exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *arguments),
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate(typed.encode() if isinstance(typed, str) else typed)
    return process.returncode, out.decode(), err.decode()


class Person:
    """Somebody at a terminal with the chat open."""

    def __init__(self, process: asyncio.subprocess.Process, terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._seen = b""
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(terminal, self._read)

    def _read(self) -> None:
        try:
            self._seen += os.read(self._terminal, 4096)
        except OSError:
            # What a terminal says when the other side has left.
            asyncio.get_running_loop().remove_reader(self._terminal)
        self._more.set()

    def types(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    async def reads(self, text: str) -> str:
        """Waits for ``text`` and takes it and all before it off the screen."""
        async with asyncio.timeout(PATIENCE_S):
            while text.encode() not in self._seen:
                self._more.clear()
                await self._more.wait()
        seen, _, self._seen = self._seen.partition(text.encode())
        return seen.decode() + text


@asynccontextmanager
async def person(*arguments: str) -> AsyncIterator[Person]:
    ours, theirs = os.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, *arguments),
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # The terminal becomes its controlling one, so that Ctrl-C reaches it as it does a person's.
            preexec_fn=lambda: os.login_tty(theirs),
        )
        os.close(theirs)
        at_terminal = Person(process, ours)
        try:
            yield at_terminal
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            asyncio.get_running_loop().remove_reader(ours)
    finally:
        os.close(ours)


async def test_a_script_gets_the_answer_and_nothing_else():
    async with compatible_server() as server:
        code, out, err = await run_chat(
            "Count to three", "--url", server.url, "--system", "Be brief.", "--max-tokens", "9"
        )
    assert (code, out, err) == (0, "one two three\n", "")
    assert server.requests[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count to three"},
    ]
    assert (server.requests[0]["max_tokens"], server.keys) == (9, ["Bearer sk-test"])


async def test_the_environment_may_name_the_server_as_for_every_command(monkeypatch):
    async with compatible_server() as server:
        monkeypatch.setitem(ENVIRONMENT, "PENSTOCK_URL", server.url)
        code, out, err = await run_chat("Count to three")
        assert (code, out, err) == (0, "one two three\n", "")
        monkeypatch.setitem(ENVIRONMENT, "PENSTOCK_URL", "http://127.0.0.1:9")
        code, out, err = await run_chat("Count to three", "--url", server.url)
    assert (code, out, err) == (0, "one two three\n", "")


async def test_a_prompt_may_come_through_a_pipe():
    async with compatible_server() as server:
        code, out, _ = await run_chat("--url", server.url, typed="Count\nto three\n")
    assert (code, out) == (0, "one two three\n")
    assert server.requests[0]["messages"][-1]["content"] == "Count\nto three"


async def test_bytes_that_are_no_text_are_refused_in_a_sentence():
    async with compatible_server() as server:
        piped = await run_chat("--url", server.url, typed=b"caf\xe9")
        named = await run_chat(b"caf\xe9", "--url", server.url)
    assert piped == named == (1, "", "penstock chat: a model is sent UTF-8 text, and this is none\n")
    assert not server.requests


async def test_output_that_nobody_takes_is_no_fault_of_the_server():
    async def left_by(output: int) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "hello", "--url", server.url),
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=output,
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(output)
        async with asyncio.timeout(PATIENCE_S):
            _, err = await process.communicate()
        return process.returncode, err.decode()

    reads, writes = os.pipe()
    os.close(reads)
    async with compatible_server() as server:
        assert await left_by(writes) == (1, "")
        code, err = await left_by(os.open("/dev/full", os.O_WRONLY))
    assert (code, err) == (1, "penstock: standard output cannot be written: No space left on device\n")


async def test_without_a_server_one_sentence_says_how_to_start_one():
    code, out, err = await run_chat("hello", "--url", "http://127.0.0.1:9")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "penstock serve" in err


async def test_who_has_no_key_that_opens_hears_where_to_put_one(front):
    code, out, err = await run_chat("hello", "--url", front.url, "--key", "sk-of-nobody")
    said = "penstock chat: HTTP 401: Incorrect API key provided. Give a key with --key, or in PENSTOCK_API_KEY.\n"
    assert (code, out, err) == (1, "", said)


async def test_a_refusal_is_told_in_the_servers_own_words():
    async with compatible_server() as server:
        server.fail_with = 429
        code, out, err = await run_chat("hello", "--url", server.url)
    assert (code, out) == (1, "")
    assert err == "penstock chat: HTTP 429: no room left\n"


async def test_a_stream_that_breaks_off_is_no_answer():
    async with compatible_server() as server:
        server.num_whole_streams = 0
        code, _, err = await run_chat("hello", "--url", server.url)
    assert code == 1
    assert "broke off" in err


async def test_a_conversation_remembers_what_was_said():
    async with compatible_server() as server, person("--url", server.url) as someone:
        await someone.reads("> ")
        someone.types("hello\n")
        await someone.reads("one two three")
        status = await someone.reads("> ")
        assert "3 tokens · first after" in status
        someone.types("and again\n")
        await someone.reads("> ")
        someone.types("/clear\n")
        await someone.reads("forgotten")
        someone.types("/system Be kind.\n")
        await someone.reads("> ")
        someone.types("afresh\n")
        await someone.reads("> ")
        someone.types("/exit\n")
        assert await someone.process.wait() == 0
    assert [message["content"] for message in server.requests[1]["messages"]] == ["hello", "one two three", "and again"]
    assert [message["content"] for message in server.requests[2]["messages"]] == ["Be kind.", "afresh"]


async def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    async with compatible_server() as server, person("--url", server.url) as someone:
        server.hold = asyncio.Event()
        await someone.reads("> ")
        someone.types("hello\n")
        await someone.reads("one ")
        someone.types("\x03")
        assert "stopped" in await someone.reads("> ")
        async with asyncio.timeout(PATIENCE_S):
            await server.cancelled.wait()
        server.hold = None
        someone.types("go on\n")
        await someone.reads("one two three")
        await someone.reads("> ")
        someone.types("\x04")
        assert await someone.process.wait() == 0
    assert [message["content"] for message in server.requests[1]["messages"]] == ["hello", "one ", "go on"]


async def test_a_failed_question_can_be_asked_again():
    async with compatible_server() as server, person("--url", server.url) as someone:
        server.fail_with = 503
        await someone.reads("> ")
        someone.types("hello\n")
        await someone.reads("HTTP 503: no room left")
        server.fail_with = None
        await someone.reads("> ")
        someone.types("hello\n")
        await someone.reads("one two three")
    assert [len(request["messages"]) for request in server.requests] == [1, 1]


async def test_an_answer_cannot_steer_the_terminal():
    words = ("red\x1b[31m ", "bell\x07 ", "title\x1b]0;mine\x07 ", "c1\x9b2J", " end")
    async with compatible_server(words=words) as server, person("--url", server.url) as someone:
        await someone.reads("> ")
        someone.types("hello\n")
        screen = await someone.reads(" end")
    answer = screen.partition("red")[2]
    assert not any(control in answer for control in "\x1b\x07\x9b")


async def test_models_can_be_listed_and_only_real_ones_chosen():
    async with compatible_server() as server, person("--url", server.url) as someone:
        await someone.reads("> ")
        someone.types("/model\n")
        await someone.reads("[tiny]")
        await someone.reads("> ")
        someone.types("/model huge\n")
        await someone.reads("the server has no model huge")
