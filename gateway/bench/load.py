"""Sends a schedule to a server and records what came back. One process, one loop, as little work a token as possible.

Bounded in count by its schedule and in time by its deadline plus one call's timeout; cancelled, it keeps what finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import aiohttp
import msgspec

from gateway.bench.arrivals import Due
from gateway.bench.measures import Outcome
from gateway.bench.prompts import Fit, Prompts
from gateway.client import Answer, CallFailed, Events, Failure, Usage, decode_answer, refusal, unreachable

_encode = msgspec.json.Encoder().encode
_HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-store"}
"""What is measured is answering, not finding an answer of an earlier round."""
_FIT_WORDS = (24, 120)


@dataclass(frozen=True, slots=True)
class Target:
    """What every request of a run has in common."""

    model: str
    chat: bool = True
    """/v1/chat/completions; False: /v1/completions."""
    stream: bool = True
    ignore_eos: bool = False
    """Sent only when set: not every server knows it."""
    temperature: float = 0.0

    @property
    def path(self) -> str:
        return "chat/completions" if self.chat else "completions"

    def body(self, prompt: str, max_tokens: int) -> bytes:
        fields: dict[str, object] = {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature}
        if self.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if self.stream:
            fields["stream"] = True
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return _encode(fields)


@dataclass(slots=True)
class Run:
    """One run as it goes: read by the progress line, condensed at the end."""

    outcomes: list[Outcome] = field(default_factory=list)
    """Finished requests, failed ones included, in the order in which they finished."""
    num_started: int = 0
    num_pieces: int = 0
    """Pieces of text received so far, by all requests."""


async def closed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    dues: Sequence[Due],
    prompts: Prompts,
    concurrency: int,
    max_s: float,
    run: Run,
) -> None:
    """``concurrency`` clients, each sending its next request when its last is answered; none begins after ``max_s``."""
    numbered = iter(enumerate(dues))
    deadline = perf_counter() + max_s

    async def client() -> None:
        for number, due in numbered:
            body = target.body(prompts.make(number, due), due.num_completion_tokens)
            now = perf_counter()
            if now >= deadline:
                return
            await _one(session, target, body, now, run)

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(dues))):
            clients.create_task(client())


async def open_loop(
    session: aiohttp.ClientSession, target: Target, dues: Sequence[Due], prompts: Prompts, run: Run
) -> None:
    """Every request at its instant, however many are still unanswered."""
    began_at = perf_counter()
    async with asyncio.TaskGroup() as requests:
        for number, due in enumerate(dues):
            body = target.body(prompts.make(number, due), due.num_completion_tokens)
            due_at = began_at + due.at_s
            if (wait_s := due_at - perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            requests.create_task(_one(session, target, body, due_at, run))


async def learn_fit(session: aiohttp.ClientSession, target: Target, seed: int) -> Fit:
    """How many tokens the server sees in our words, by two short requests. Raises CallFailed."""
    plain = Fit(per_word=1.0, overhead=0.0)
    prompts = Prompts(seed, plain)
    points = []
    for number, num_words in enumerate(_FIT_WORDS):
        prompt = prompts.make(number, Due(0.0, num_words, 1))
        outcome = await warm_up(session, target, prompt, 1)
        points.append((len(prompt.split()), outcome.num_prompt_tokens))
    return Fit.through(points[0], points[1])


async def warm_up(session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int) -> Outcome:
    """One request outside the measurement. Raises CallFailed."""
    run = Run()
    await _one(session, target, target.body(prompt, max_tokens), perf_counter(), run)
    if run.outcomes[0].error is not None:
        raise CallFailed(run.outcomes[0].error)
    return run.outcomes[0]


async def _one(session: aiohttp.ClientSession, target: Target, body: bytes, due_at: float, run: Run) -> None:
    """One request, its outcome appended to ``run``; whatever goes wrong on the way is part of the outcome."""
    outcome = Outcome(due_at)
    run.num_started += 1
    outcome.sent_at = perf_counter()
    try:
        async with session.post(target.path, data=body, headers=_HEADERS) as response:
            if response.status != 200:
                outcome.error = refusal(response.status, await response.read())
            elif target.stream:
                await _read_stream(response, outcome, run)
            else:
                answer = decode_answer(await response.read())
                outcome.error = _error_in(answer)
                _count(outcome, answer.usage)
    except msgspec.DecodeError as error:
        outcome.error = f"unreadable answer: {error}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcome.error = unreachable(error)
    outcome.finished_at = perf_counter()
    if not outcome.counted_by_server:
        outcome.num_completion_tokens = len(outcome.chunk_ats)
    run.outcomes.append(outcome)


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome, run: Run) -> None:
    events = Events()
    done = False
    async for data in response.content.iter_any():
        now = perf_counter()
        for payload in events.feed(data):
            if payload == b"[DONE]":
                done = True
                continue
            answer = decode_answer(payload)
            if _has_text(answer):
                outcome.chunk_ats.append(now)
                run.num_pieces += 1
            if answer.usage is not None:
                _count(outcome, answer.usage)
            elif answer.error is not None:
                outcome.error = _error_in(answer)
    if not done and outcome.error is None:
        outcome.error = "the stream ended before [DONE]"


def _has_text(answer: Answer) -> bool:
    for choice in answer.choices:
        delta = choice.delta
        if delta is not None and (delta.content or delta.reasoning_content or delta.tool_calls):
            return True
        if choice.text:
            return True
    return False


def _count(outcome: Outcome, usage: Usage | None) -> None:
    if usage is not None:
        outcome.counted_by_server = True
        outcome.num_prompt_tokens = usage.prompt_tokens
        outcome.num_completion_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        outcome.num_cached_tokens = (details.cached_tokens or 0) if details else 0


def _error_in(answer: Answer) -> str | None:
    error = answer.error
    if error is None:
        return None
    return (error.message or str(error.code)) if isinstance(error, Failure) else error
