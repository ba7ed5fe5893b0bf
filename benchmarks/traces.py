"""Recorded traffic as values: arrivals of the Azure and the Mooncake traces, with their lengths scaled to a machine.

Azure's ``AzureLLMInferenceDataset2023`` (Splitwise, ISCA '24): a CSV of TIMESTAMP, ContextTokens, GeneratedTokens.
Mooncake's ``conversation_trace.jsonl`` (FAST '25): timestamp in ms, input_length, output_length, hash_ids, one id for
each block of 512 tokens; equal ids stand for equal prefixes. Neither carries text.
"""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

MOONCAKE_BLOCK = 512
"""Tokens of one of its ids."""


class Recorded(NamedTuple):
    """One request of a trace."""

    at_s: float
    """After the first one."""
    num_prompt_tokens: int
    num_completion_tokens: int
    block_ids: tuple[int, ...] = ()
    """Mooncake's, of the full blocks of the prompt."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(path: Path) -> list[Recorded]:
    """Either trace, told apart by the end of its name (.csv, .jsonl), in order of time."""
    return _azure(path) if path.suffix == ".csv" else _mooncake(path)


def scaled(
    trace: list[Recorded], *, pace: float = 1.0, lengths: float = 1.0, longest: int | None = None
) -> list[Recorded]:
    """As if ``pace`` times as many came in the same time, ``lengths`` times as long each, a prompt and its completion
    at most ``longest`` tokens each (None: as long as they are). Block ids stay, so their size scales with the lengths.
    """

    def length(num_tokens: int) -> int:
        num_scaled = max(1, round(num_tokens * lengths))
        return num_scaled if longest is None else min(longest, num_scaled)

    return [
        Recorded(
            request.at_s / pace,
            length(request.num_prompt_tokens),
            length(request.num_completion_tokens),
            request.block_ids,
        )
        for request in trace
    ]


def _azure(path: Path) -> list[Recorded]:
    with path.open(newline="") as file:
        # Seven digits after the second; a datetime takes six.
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return [Recorded((at - start).total_seconds(), prompt, completion) for at, prompt, completion in rows]


def _mooncake(path: Path) -> list[Recorded]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    lines = [decoder.decode(line) for line in path.read_bytes().splitlines() if line]
    lines.sort(key=lambda line: line.timestamp)
    start = lines[0].timestamp
    return [
        Recorded(
            (line.timestamp - start) / 1e3,
            line.input_length,
            line.output_length,
            line.hash_ids[: line.input_length // MOONCAKE_BLOCK],
        )
        for line in lines
    ]
