"""Batches: ``python -m benchmarks.batches lines [--lines 10000] [--rounds 2]``, ``whole`` or ``prefixes``.

``lines``: the same lines in a batch and one by one over HTTP, by as many clients as a batch may have lines under way,
in turns in one gateway. A worker that answers by a script takes no time, so what is measured is the gateway.
``whole``: one batch of 50,000 lines, from its creation to its end. ``prefixes``: the demo model on one thread and with
little KV; lines of many groups, each with a beginning of its own, one group's far from each other in the file: asked in
the order of the file and in that of their beginnings, in turns, with new beginnings each time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from policies import settings
from tests.batches import CHAT, OVER, as_file, line
from tests.builders import scripted
from tests.house import House, running

NUM_CLIENTS = settings.Batches().max_in_flight
WORDS = ("fox", "hedgehog", "river", "stone", "valley", "miller", "daughter", "seven", "morning", "garden", "apple")


async def batch_s(house: House, some: Iterable[dict[str, Any]]) -> tuple[float, Any]:
    """From its creation to its end, and the batch."""
    async with house.client(timeout=300) as client:
        file = await client.files.create(file=("in.jsonl", as_file(some)), purpose="batch")
        began_at = time.monotonic()
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while batch.status not in OVER:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
        took_s = time.monotonic() - began_at
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert not batch.request_counts.failed, batch
    return took_s, batch


async def one_by_one_s(house: House, some: list[dict[str, Any]]) -> float:
    """The same lines, each a request that a client waits for."""
    left = iter([json.dumps(each["body"]).encode() for each in some])
    headers = {"authorization": f"Bearer {house.key}", "content-type": "application/json"}
    async with aiohttp.ClientSession(house.url, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for body in left:
                async with session.post(CHAT, data=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()

        began_at = time.monotonic()
        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        return time.monotonic() - began_at


async def lines(house: House, num_lines: int, num_rounds: int) -> str:
    told = []
    for number in range(num_rounds):
        some = [line(f"{number}-{index}", max_tokens=16) for index in range(num_lines)]
        alone_s = await one_by_one_s(house, some)
        together_s, _ = await batch_s(house, some)
        told.append(
            f"{num_lines} lines: {num_lines / together_s:.0f} a second in a batch, {num_lines / alone_s:.0f} one by "
            f"one over HTTP: {alone_s / together_s:.2f}"
        )
    return "\n".join(told)


async def whole(house: House, num_lines: int) -> str:
    took_s, batch = await batch_s(house, (line(f"{index}", max_tokens=16) for index in range(num_lines)))
    rows = await house.ledger_rows(status=200)
    assert len(rows) == num_lines
    assert sum(row.num_completion_tokens for row in rows) == batch.usage.output_tokens
    return f"{num_lines} lines in {took_s:.1f} s, {num_lines / took_s:.0f} a second; the ledger agrees"


def of_groups(num_groups: int, num_each: int, num_words: int, chance: random.Random) -> list[dict[str, Any]]:
    """The first of each group, then the second of each, and so on."""
    beginnings = [" ".join(chance.choices(WORDS, k=num_words)) for _ in range(num_groups)]
    return [
        line(
            f"{group}-{number}",
            messages=[{"role": "user", "content": f"{beginnings[group]}. {number} + {number} ="}],
            max_tokens=4,
        )
        for number in range(num_each)
        for group in range(num_groups)
    ]


async def prefixes(house: House, num_rounds: int) -> str:
    chance, told = random.Random(1), []
    book = house.gw.batches
    await batch_s(house, of_groups(4, 2, 50, chance))  # what is compiled, or read, at the first request
    for _ in range(num_rounds):
        found = []
        for groups in (False, True):
            book.config = msgspec.structs.replace(book.config, group_by_prefix=groups)
            took_s, batch = await batch_s(house, of_groups(48, 12, 150, chance))
            found.append((took_s, batch.usage.input_tokens_details.cached_tokens / batch.usage.input_tokens))
        (file_s, file_share), (group_s, group_share) = found
        told.append(
            f"in the file's order {file_s:.2f} s and {file_share:.0%} of the prompts' tokens cached, grouped "
            f"{group_s:.2f} s and {group_share:.0%}: {file_s / group_s:.2f} times as fast"
        )
    return "\n".join(told)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=("lines", "whole", "prefixes"))
    options.add_argument("--lines", type=int, default=0)
    options.add_argument("--rounds", type=int, default=2)
    chosen = options.parse_args()
    engine = settings.Engine(device="cpu", num_threads=1, max_kv_bytes=16 << 20)
    sections: dict[str, Any] = {"command": scripted("--tokens-per-step", 16)}
    if chosen.what == "prefixes":
        sections = {
            "models": {"demo": settings.Model(engine=engine)},
            "batches": settings.Batches(max_in_flight=8),
        }
    with tempfile.TemporaryDirectory() as directory, running(Path(directory), **sections) as house:
        if chosen.what == "lines":
            told = asyncio.run(lines(house, chosen.lines or 10_000, chosen.rounds))
        elif chosen.what == "whole":
            told = asyncio.run(whole(house, chosen.lines or 50_000))
        else:
            told = asyncio.run(prefixes(house, chosen.rounds))
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
