"""`penstock chat`: a conversation with a running server in the terminal, or one question from a script.

The answer goes to standard output, everything about it to standard error, so a script gets the answer alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import click
import msgspec

from gateway.client import (
    CallFailed,
    Events,
    Failure,
    Finite,
    Unreachable,
    api_root,
    decode_answer,
    find_key,
    list_models,
    lost,
    open_session,
    refusal,
    server_option,
)
from gateway.terminal.tables import leave_unread, printable

if TYPE_CHECKING:
    import aiohttp

HELP = """\
/clear           forget the conversation
/model [NAME]    the models there are; or talk to another one
/system [TEXT]   what the model is told first; without text: nothing
/help            these lines
/exit            leave, as does Ctrl-D; Ctrl-C stops an answer"""


@dataclass(slots=True)
class Conversation:
    """What has been said, and how the next answer is asked for."""

    model: str
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def request(self) -> bytes:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, object] = {
            "model": self.model,
            "messages": system + self.turns,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return msgspec.json.encode(body)


@dataclass(slots=True)
class Reply:
    """One answer as it comes in; instants in seconds."""

    asked_at: float
    text: str = ""
    first_at: float | None = None
    last_at: float = 0.0
    num_tokens: int = 0
    """As the server counted, else pieces of text."""
    finish_reason: str | None = None
    stopped: bool = False
    """By the person, before its end."""

    def status(self) -> str:
        """The line under an answer: tokens, TTFT, tokens/s."""
        parts = [f"{self.num_tokens} tokens"]
        if self.first_at is not None:
            parts.append(f"first after {1e3 * (self.first_at - self.asked_at):,.0f} ms")
            if self.num_tokens > 1 and self.last_at > self.first_at:
                parts.append(f"{(self.num_tokens - 1) / (self.last_at - self.first_at):,.0f} tokens/s")
        if self.stopped:
            parts.append("stopped")
        elif self.finish_reason == "length":
            parts.append("cut at the token limit")
        elif self.finish_reason == "content_filter":
            parts.append("cut by a filter")
        return " · ".join(parts)


async def ask(session: aiohttp.ClientSession, talk: Conversation, reply: Reply, show: Callable[[str], None]) -> None:
    """Streams the answer to the last turn into ``reply``, each piece to ``show`` as it comes. Raises CallFailed, and
    what ``show`` raises."""
    done = False
    async with contextlib.aclosing(_payloads(session, talk)) as payloads:
        async for payload in payloads:
            if payload == b"[DONE]":
                done = True
            else:
                _take(payload, reply, show)
    if not done:
        raise CallFailed("the server broke off before the end of its answer")


async def _payloads(session: aiohttp.ClientSession, talk: Conversation) -> AsyncGenerator[bytes]:
    """Those of the stream that answers. Raises CallFailed."""
    import aiohttp

    events = Events()
    try:
        body = talk.request()
    except UnicodeEncodeError as error:
        raise CallFailed("a model is sent UTF-8 text, and this is none") from error
    try:
        headers = {"Content-Type": "application/json"}
        async with session.post("chat/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise CallFailed(refusal(response.status, await response.read()))
            async for data in response.content.iter_any():
                for payload in events.feed(data):
                    yield payload
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise lost(error) from error


def _take(payload: bytes, reply: Reply, show: Callable[[str], None]) -> None:
    """One chunk of a stream."""
    try:
        answer = decode_answer(payload)
    except msgspec.DecodeError as unread:
        raise CallFailed(f"the server sent what cannot be read: {unread}") from unread
    if answer.error is not None:
        error = answer.error
        raise CallFailed((error.message or str(error.code)) if isinstance(error, Failure) else error)
    if answer.usage is not None:
        reply.num_tokens = answer.usage.completion_tokens
    for choice in answer.choices:
        reply.finish_reason = choice.finish_reason or reply.finish_reason
        if choice.delta and (text := choice.delta.content or choice.delta.refusal):
            reply.last_at = perf_counter()
            if reply.first_at is None:
                reply.first_at = reply.last_at
            reply.num_tokens += 1
            reply.text += text
            show(text)


class Terminal:
    """The conversation in a terminal; its one event loop runs only while an answer or a list is awaited."""

    def __init__(self, runner: asyncio.Runner, session: aiohttp.ClientSession, talk: Conversation) -> None:
        from rich.console import Console

        self._runner = runner
        self._session = session
        self._talk = talk
        self._notes = Console(stderr=True, highlight=False)

    def converse(self) -> None:
        """Until Ctrl-D or /exit."""
        self._say(f"{self._talk.model} · /help for commands, Ctrl-D to leave")
        while True:
            try:
                line = input("\n> ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                self._say("\nCtrl-D leaves")
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(*line.partition(" ")[::2])
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        """One question and its answer; what was said stays said, except a question that got no answer at all."""
        self._talk.turns.append({"role": "user", "content": line})
        reply = Reply(perf_counter())
        try:
            self._runner.run(ask(self._session, self._talk, reply, _show))
        except KeyboardInterrupt:
            reply.stopped = True
        except CallFailed as error:
            if reply.text:
                click.echo()
            self._say(str(error), "red")
        if not reply.text:
            self._talk.turns.pop()
            if reply.stopped:
                self._say("\nstopped")
            return
        self._talk.turns.append({"role": "assistant", "content": reply.text})
        click.echo()
        self._say(reply.status())

    def _command(self, name: str, rest: str) -> None:
        rest = rest.strip()
        match name:
            case "/help":
                self._say(HELP)
            case "/clear":
                self._talk.turns.clear()
                self._say("forgotten")
            case "/system":
                self._talk.system = rest
                self._say("the model is told this first" if rest else "the model is told nothing first")
            case "/model":
                self._model(rest)
            case _:
                self._say(f"there is no {name}; /help lists the commands")

    def _model(self, name: str) -> None:
        try:
            models = self._runner.run(list_models(self._session))
        except CallFailed as error:
            self._say(str(error), "red")
        except KeyboardInterrupt:
            self._say("stopped")
        else:
            if name in models:
                self._talk.model = name
            elif name:
                self._say(f"the server has no model {name}", "red")
            self._say("  ".join(f"[{model}]" if model == self._talk.model else model for model in models))

    def _say(self, text: str, style: str = "dim") -> None:
        sys.stdout.flush()
        self._notes.print(text, style=style, markup=False, soft_wrap=True)


def _show(text: str) -> None:
    """A piece of an answer, at once; to a terminal without control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@click.command()
@click.argument("prompt", required=False)
@server_option
@click.option("--key", help="API key [PENSTOCK_API_KEY, the local server's bootstrap.env, OPENAI_API_KEY].")
@click.option("--model", help="Model name [the first that the server lists].")
@click.option("--system", default="", help="What the model is told first.")
@click.option("--max-tokens", type=click.IntRange(1), help="Ceiling on one answer [the server's].")
@click.option("--temperature", type=Finite(0, 2), help="[the server's]")
def chat(
    prompt: str | None,
    url: str,
    key: str | None,
    model: str | None,
    system: str,
    max_tokens: int | None,
    temperature: float | None,
) -> None:
    """Talk to a running server. With PROMPT, or text on standard input, print one answer and nothing else."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is refused where it would be sent
    if not sys.stdin.isatty() and not prompt:
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise click.UsageError("standard input holds no prompt.")
    with asyncio.Runner() as runner:
        session = runner.run(_opened(url, key))
        try:
            models = runner.run(list_models(session))
            if not model and not models:
                raise CallFailed("no model is ready yet; try again in a moment")
            talk = Conversation(model or models[0], system, max_tokens, temperature)
            if prompt:
                talk.turns.append({"role": "user", "content": prompt})
                runner.run(ask(session, talk, Reply(perf_counter()), _show))
                click.echo()
            else:
                # Imported for what it does to input(): history and editing of the line.
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401
                Terminal(runner, session, talk).converse()
        except CallFailed as error:
            hint = f"; start a server with `penstock serve`, or name another with --url (now {api_root(url)})"
            is_away = isinstance(error, Unreachable)
            click.echo(f"penstock chat: {error}{hint if is_away else ''}", err=True)
            sys.exit(2 if is_away else 1)
        except OSError as error:  # of standard output: what calls meet are CallFailed
            leave_unread(error)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            runner.run(session.close())


async def _opened(url: str, key: str | None) -> aiohttp.ClientSession:
    return open_session(url, find_key(key, url), timeout_s=3600.0)
