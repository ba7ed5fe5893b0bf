"""What reading a body costs, and how long one holds the event loop: ``python -m benchmarks.bodies [--rounds 5]``.

First chats as they mostly are: the time of ``parse_chat``, and how much of it is for keys that are there twice.
Then bodies of about 10 MB, parsed and tokenised as the endpoints do it for a context of 131,072 tokens, while a task
beside them wakes up every half millisecond: the longest gap between two of its turns, of the gap that an idle loop has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import timeit
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from gateway import openai
from gateway.bodies import parsed
from gateway.errors import GatewayError
from gateway.text import Text
from tests.gateway.texts import model_directory

CONTEXT = 131_072
BEAT_S = 0.0005
TIMES = 2000
DECODER = msgspec.json.Decoder(openai.ChatRequest)
PLAIN = "You are a helpful assistant who answers in short sentences. "


def chat(*contents: str, **others: Any) -> bytes:
    """As the official client writes it."""
    messages = [{"role": "user" if number % 2 else "system", "content": each} for number, each in enumerate(contents)]
    return json.dumps({"model": "demo", "messages": messages, **others}, separators=(",", ":")).encode()


TYPICAL = {
    "two messages": chat(PLAIN, "What is the capital of the valley?", temperature=0.7, stream=True),
    "two messages, lines and quotes": chat(PLAIN * 4, 'Say "yes" or "no".\n' * 20, temperature=0.7, max_tokens=64),
    "seven messages": chat(PLAIN * 4, *[PLAIN * 5] * 6, temperature=0.7),
}
LONG = {
    "one text": chat("x", "hello world " * 850_000),
    "one text, JSON": chat("x", json.dumps([{"a": 1, "bcd": "e"}] * 400_000)),
    "15,000 messages": chat(*["hello " * 100] * 15_000),
    "200,000 messages": chat(*["hello"] * 200_000),
    "3,000,000 lists": chat("x")[:-1] + b', "tool_choice": [' + b"[]," * 3_000_000 + b"1]}",
}


def only_decoded(body: bytes) -> None:
    openai.check_chat(DECODER.decode(body))


def best_us(work: Callable[[], object], rounds: int) -> float:
    return min(timeit.repeat(work, number=TIMES, repeat=rounds)) / TIMES * 1e6


async def gap_ms(work: Callable[[], Awaitable[object]]) -> tuple[float, float, str]:
    """The longest between two turns of the loop, how long it took, and what came of it."""
    turns: list[float] = []

    async def beat() -> None:
        while True:
            turns.append(time.perf_counter())
            await asyncio.sleep(BEAT_S)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(10 * BEAT_S)
    begun_at = time.perf_counter()
    try:
        await work()
        became = "taken"
    except (openai.Malformed, GatewayError) as error:
        became = getattr(error, "code", None) or "refused"
    ended_at = time.perf_counter()
    await asyncio.sleep(2 * BEAT_S)
    beating.cancel()
    return 1e3 * max(after - before for before, after in pairwise(turns)), 1e3 * (ended_at - begun_at), became


async def long_bodies(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        text = Text.load(model_directory(Path(directory)))
        idle = [(await gap_ms(lambda: asyncio.sleep(0.05)))[0] for _ in range(rounds)]
        print(f"idle: a gap of {statistics.median(idle):.1f} ms")
        for name, body in LONG.items():

            async def work(body: bytes = body) -> None:
                call = await parsed(openai.parse_chat, body)
                await text.encode_chat(call.messages, max_tokens=CONTEXT)

            gaps, times, became = zip(*[await gap_ms(work) for _ in range(rounds)], strict=True)
            print(
                f"{name}, {len(body) / 1e6:.1f} MB: longest gap {statistics.median(gaps):.1f} ms (to {max(gaps):.1f}),"
                f" {statistics.median(gaps) / statistics.median(idle):.0f} times the idle one's,"
                f" {became[0]} after {statistics.median(times):.0f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for name, body in TYPICAL.items():
        whole = best_us(partial(openai.parse_chat, body), 4 * rounds)
        decoding = best_us(partial(only_decoded, body), 4 * rounds)
        print(
            f"{name}, {len(body)} bytes: {whole:.2f} µs, {whole - decoding:.2f} of it to see that no key is there twice"
        )
    asyncio.run(long_bodies(rounds))


if __name__ == "__main__":
    main()
