"""When which request is due: a closed loop, a Poisson stream, or the recorded hour of somebody's service.

Pure: a schedule is a list of ``Due``, and its text is made elsewhere.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import msgspec

TRACE_BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""


class TraceError(ValueError):
    """The trace file cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Due:
    """One request of a schedule."""

    at_s: float
    """Seconds after the start; in a closed loop 0 for all, as each waits for its turn instead."""
    num_prompt_tokens: int
    num_completion_tokens: int
    block_ids: tuple[int, ...] = ()
    """Equal leading ids mean equal leading text (Mooncake's hash_ids); empty: a prompt like no other."""


class TraceLine(msgspec.Struct):
    """One line of a Mooncake trace; timestamp in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def at_once(num_requests: int, num_prompt_tokens: int, num_completion_tokens: int) -> list[Due]:
    """A closed loop's requests: all due as soon as a client is free."""
    return [Due(0.0, num_prompt_tokens, num_completion_tokens)] * num_requests


def poisson(
    num_requests: int, rate_per_s: float, num_prompt_tokens: int, num_completion_tokens: int, seed: int
) -> list[Due]:
    """Independent arrivals at ``rate_per_s`` on average: exponential gaps, the same ones for the same seed."""
    rng = random.Random(seed)
    dues, at_s = [], 0.0
    for _ in range(num_requests):
        at_s += rng.expovariate(rate_per_s)
        dues.append(Due(at_s, num_prompt_tokens, num_completion_tokens))
    return dues


def trace(text: str, time_scale: float, length_scale: float) -> list[Due]:
    """A recorded trace, JSON lines as Mooncake's or CSV as Azure's 2023 one, in order of arrival and beginning at 0.

    ``time_scale`` multiplies the instants (0.5: twice as fast), ``length_scale`` the lengths, which never fall below 1.
    Raises TraceError.
    """
    rows = list(_mooncake(text) if text.lstrip().startswith("{") else _azure(text))
    if not rows:
        raise TraceError("the trace holds no request")
    began_at = min(at_s for at_s, _, _, _ in rows)

    def scaled(length: int) -> int:
        return max(1, round(length * length_scale))

    return sorted(
        (
            Due((at_s - began_at) * time_scale, scaled(inputs), scaled(outputs), ids)
            for at_s, inputs, outputs, ids in rows
        ),
        key=lambda due: due.at_s,
    )


def bounded(dues: list[Due], max_requests: int, max_s: float) -> list[Due]:
    """The part of a schedule that is due within ``max_s``, and no more than ``max_requests`` of it."""
    return [due for due in dues if due.at_s <= max_s][:max_requests]


def _mooncake(text: str) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    decode = msgspec.json.Decoder(TraceLine).decode
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"line {number} of the trace: {error}") from error
            yield row.timestamp / 1e3, row.input_length, row.output_length, tuple(row.hash_ids)


def _azure(text: str) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    reader = csv.DictReader(text.splitlines())
    for number, row in enumerate(reader, 2):
        try:
            at = row["TIMESTAMP"].strip()
            # Seven digits of a second, one more than Python keeps; traces from elsewhere may have plain seconds.
            at_s = datetime.fromisoformat(at[:26]).timestamp() if ":" in at else float(at)
            yield at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise TraceError(
                f"line {number} of the trace is no row of TIMESTAMP,ContextTokens,GeneratedTokens: {error}"
            ) from error
