"""One round of measuring, gateway and limits interleaved, and what many rounds say together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from benchmarks.gateway import processes, streams
from benchmarks.gateway.peer import Worker
from benchmarks.gateway.processes import Server
from benchmarks.gateway.streams import Streamed

KEY = "sk-benchmark-0000000000000000000000000000"
CONNECTIONS = 32
MODEL_NAME = "demo"
NUM_COMPLETION_TOKENS = 16
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. Answer in one or two short sentences."},
    {
        "role": "user",
        "content": "Letter NUMBER. Where does the river begin, and who lives beside the old mill under the hill?",
    },
]

REQUIRED_RATIO, AIM_RATIO = 0.2, 0.29
REQUIRED_STREAM_RATIO = 0.4
MOST_ADDED_MS = 0.8


class Round(msgspec.Struct):
    """What one round measured, gateway and limits side by side."""

    echo_per_s: float
    proxy_per_s: float
    gateway_per_s: float
    echo_c1_p50_us: int
    proxy_c1_p50_us: int
    gateway_c1_p50_us: int
    gateway_p99_us: int
    gateway_busy: float
    """CPU seconds a second of the gateway under load: near 1 when it is the bottleneck and has the core to itself."""
    gateway_cpu_us: float
    """CPU of the gateway for one request; unlike requests/s it hardly depends on who else uses the machine."""
    echo_cpu_us: float
    loop_cpu_us: float
    """CPU of the bare loop for one chunk."""
    flood_cpu_us: float
    """CPU of the gateway for one token of the flood."""
    turns_cpu_us: float
    loop_tokens_per_s: float
    """A bare handler's writes in a loop."""
    turns_tokens_per_s: float
    """The same, one write in each turn of the event loop."""
    flood_tokens_per_s: float
    flood_tokens_per_chunk: float
    in_step_tokens_per_s: float
    in_step_tokens_per_chunk: float
    in_step_busy: float
    in_step_cpu_us: float
    """CPU of the gateway for a token that is a chunk of its own."""


class Result(msgspec.Struct):
    """Medians over the rounds; ratios are medians of each round's own ratio."""

    requests_ratio: float
    requests_ratio_to_proxy: float
    cpu_ratio: float
    """The echo's CPU for a request over the gateway's: what ``requests_ratio`` is on a machine with nothing else on."""
    added_ms: float
    proxy_added_ms: float
    stream_ratio: float
    """A chunk for every token, against the bare loop's chunks: the one that is required."""
    stream_cpu_ratio: float
    merged_ratio: float
    """The flood against the same loop: many tokens a chunk, so fewer chunks than the loop writes."""
    in_step_ratio: float
    commit_ms: float
    """One fdatasync where the ledger lies; every answer waits for one."""
    gateway_idle_mib: float
    num_ledger_rows: int
    num_answers: int
    request_bytes: int
    answer_bytes: int
    chunk_bytes: int
    num_streams: int
    tokens_a_stream: int
    rounds: list[Round]

    def failures(self) -> list[str]:
        """What misses its mark, in words."""
        # Far from 1 it did not have its core, or waited for the other one: somebody else uses the machine.
        busy = median(r.in_step_busy for r in self.rounds)
        checks = [
            (self.requests_ratio >= REQUIRED_RATIO, f"requests/s are {self.requests_ratio:.3f} of the echo's"),
            (self.added_ms <= MOST_ADDED_MS, f"{self.added_ms:.2f} ms are added at concurrency 1"),
            (
                self.stream_ratio >= REQUIRED_STREAM_RATIO,
                f"tokens/s are {self.stream_ratio:.3f} of a bare SSE loop's, with the gateway {busy:.0%} busy",
            ),
            # wrk drops what is under way when its time is up; those requests have rows and no answer.
            (
                self.num_ledger_rows >= self.num_answers,
                f"{self.num_ledger_rows} ledger rows, {self.num_answers} answers",
            ),
        ]
        return [words for held, words in checks if not held]


class Bench:
    """Everything that runs while measuring."""

    def __init__(
        self,
        folder: Path,
        gateway: Server,
        bare: Server,
        worker: Worker,
        load_core: int,
        seconds: int,
        num_streams: int,
        num_tokens: int,
    ) -> None:
        self._gateway = gateway
        self._bare = bare
        self._worker = worker
        self._load_core = load_core
        self._seconds = seconds
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._body = folder / "request.json"
        self._first_number = 0
        self.num_answers = 0
        """Finished requests of the gateway, as its clients saw them."""

    async def round(self) -> Round:
        echo, proxy = f"{self._bare.url}/echo", f"{self._bare.url}/proxy"
        chat = f"{self._gateway.url}/v1/chat/completions"
        cpu = _Cpu(self._bare)
        echo_32 = await self._wrk(echo, CONNECTIONS)
        echo_cpu_us = cpu.us_each(echo_32.num_requests)
        cpu = _Cpu(self._gateway)
        gateway_32 = await self._wrk(chat, CONNECTIONS)
        gateway_cpu_us, gateway_busy = cpu.us_each(gateway_32.num_requests), cpu.busy()
        proxy_32 = await self._wrk(proxy, CONNECTIONS)
        echo_1 = await self._wrk(echo, 1)
        gateway_1 = await self._wrk(chat, 1)
        proxy_1 = await self._wrk(proxy, 1)
        body = self._body.read_bytes()
        cpu = _Cpu(self._bare)
        loop = await streams.read_bare(f"{self._bare.url}/stream", self._num_streams, self._num_tokens, body)
        loop_cpu_us = cpu.us_each(loop.num_tokens)
        cpu = _Cpu(self._gateway)
        flood = await self._streamed(in_step=False)
        flood_cpu_us = cpu.us_each(flood.num_tokens)
        cpu = _Cpu(self._bare)
        turns = await streams.read_bare(f"{self._bare.url}/paced", self._num_streams, self._num_tokens, body)
        turns_cpu_us = cpu.us_each(turns.num_tokens)
        cpu = _Cpu(self._gateway)
        in_step = await self._streamed(in_step=True)
        return Round(
            echo_per_s=echo_32.requests_per_s,
            proxy_per_s=proxy_32.requests_per_s,
            gateway_per_s=gateway_32.requests_per_s,
            echo_c1_p50_us=echo_1.p50_us,
            proxy_c1_p50_us=proxy_1.p50_us,
            gateway_c1_p50_us=gateway_1.p50_us,
            gateway_p99_us=gateway_32.p99_us,
            gateway_busy=gateway_busy,
            gateway_cpu_us=gateway_cpu_us,
            echo_cpu_us=echo_cpu_us,
            loop_cpu_us=loop_cpu_us,
            flood_cpu_us=flood_cpu_us,
            turns_cpu_us=turns_cpu_us,
            loop_tokens_per_s=loop.tokens_per_s,
            turns_tokens_per_s=turns.tokens_per_s,
            flood_tokens_per_s=flood.tokens_per_s,
            flood_tokens_per_chunk=flood.tokens_per_chunk,
            in_step_tokens_per_s=in_step.tokens_per_s,
            in_step_tokens_per_chunk=in_step.tokens_per_chunk,
            in_step_busy=cpu.busy(),
            in_step_cpu_us=cpu.us_each(in_step.num_tokens),
        )

    async def _wrk(self, url: str, connections: int) -> processes.Wrk:
        figures = await processes.wrk(
            url, connections, self._seconds, self._load_core, self._body, KEY, self._first_number
        )
        self._first_number += figures.num_requests
        if url.startswith(self._gateway.url):
            self.num_answers += figures.num_requests
        return figures

    async def _streamed(self, in_step: bool) -> Streamed:
        url = f"{self._gateway.url}/v1/chat/completions"
        fields: dict[str, object] = {
            "model": MODEL_NAME,
            "messages": MESSAGES,
            "stream_options": {"include_usage": True},
        }
        run = await streams.read_gateway(url, KEY, fields, self._worker, self._num_streams, self._num_tokens, in_step)
        self.num_answers += self._num_streams
        return run


class _Cpu:
    """What a server takes from here on."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._cpu_s = server.cpu_s()
        self._began_at = perf_counter()

    def us_each(self, num: int) -> float:
        return 1e6 * (self._server.cpu_s() - self._cpu_s) / num

    def busy(self) -> float:
        return (self._server.cpu_s() - self._cpu_s) / (perf_counter() - self._began_at)


def summary(rounds: Sequence[Round], **facts: Any) -> Result:
    """Medians of ratios: what changes from round to round on a shared machine changes both sides of a ratio."""
    return Result(
        requests_ratio=median(r.gateway_per_s / r.echo_per_s for r in rounds),
        requests_ratio_to_proxy=median(r.gateway_per_s / r.proxy_per_s for r in rounds),
        added_ms=median(r.gateway_c1_p50_us - r.echo_c1_p50_us for r in rounds) / 1e3,
        proxy_added_ms=median(r.proxy_c1_p50_us - r.echo_c1_p50_us for r in rounds) / 1e3,
        cpu_ratio=median(r.echo_cpu_us / r.gateway_cpu_us for r in rounds),
        stream_ratio=median(r.in_step_tokens_per_s / r.loop_tokens_per_s for r in rounds),
        stream_cpu_ratio=median(r.loop_cpu_us / r.in_step_cpu_us for r in rounds),
        merged_ratio=median(r.flood_tokens_per_s / r.loop_tokens_per_s for r in rounds),
        in_step_ratio=median(r.in_step_tokens_per_s / r.turns_tokens_per_s for r in rounds),
        rounds=list(rounds),
        **facts,
    )
