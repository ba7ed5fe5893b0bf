"""What watching costs the gateway: its throughput with metrics and without, with traces and without, in one run.

    python -m benchmarks.observing [--seconds 60] [--times 2] [--ratio 0.1]

One gateway on a core of its own (``observed``), in which metrics and traces are switched on and off while it runs:
two processes of the same code differ by more than either costs. It takes turns of a fraction of a second: with nothing,
with metrics, and with traces besides, which go to a real OTLP receiver in a process of its own. A scripted worker on
the real wire and the load have the other core, and so has, on two cores, the process that makes the spans. What that
takes of the load's core is no cost of the gateway's, so there are two turns with traces: "traced", while it is stopped
and makes its spans between two turns, and "beside", while it works as well. The load is stopped between turns. All of
it starts anew ``--times`` times. Needs wrk and two cores.

What changes on a machine that others use, too, changes within seconds, so turns are short and many. Each is held
against the other of its round, and the mean of the middle half of these ratios counts: a few turns that others
disturbed would decide the mean of all, and a median goes in steps, since all clients are answered together, by one
commit. How firm it is is told by drawing rounds again (bootstrap).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import aiohttp
import click
import msgspec
import uvloop

from benchmarks.gateway import peer, processes
from benchmarks.gateway.processes import BenchmarkError, Server
from benchmarks.gateway.rounds import CONNECTIONS, KEY, MESSAGES, MODEL_NAME, NUM_COMPLETION_TOKENS
from benchmarks.gateway.served import in_memory, served
from benchmarks.observed import SIGNALS

REQUIRED_TRACED, REQUIRED_METERED = 0.97, 0.98
"""Of the throughput without."""
TURN_S, SETTLING_S = 0.2, 0.02
"""Of a turn the first part does not count: the load has just been woken."""
ANSWERED_S = 0.005
"""So long after it its last requests are answered."""
CATCH_UP_S = 0.03
"""For the spans of a turn, before the next one begins."""
NUM_DRAWS, CONFIDENCE = 1000, 0.95


class Turn(msgspec.Struct):
    """One of one gateway."""

    requests_per_s: float
    cpu_us: float
    """Of the gateway's process for one request."""
    exporter_cpu_us: float
    """Of the process beside it, for one request of all, kept or not."""


class Ratio(msgspec.Struct):
    middle: float
    """Interquartile mean."""
    least: float
    most: float
    """It lies between these with the probability CONFIDENCE."""

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.least:.3f} to {self.most:.3f})"


class Result(msgspec.Struct):
    ratios: dict[str, Ratio]
    """By kind of turn, the throughput of that without what it adds."""
    cpu_ratios: dict[str, Ratio]
    """CPU of the gateway for a request, likewise."""
    num_requests: int
    """That had a chance to be kept as traces."""
    num_spans: int
    """That the receiver has got."""
    turns: dict[str, list[Turn]]


COMPARED = {"metered": "bare", "traced": "metered", "beside": "metered"}
REQUIRED = {"metered": REQUIRED_METERED, "traced": REQUIRED_TRACED}


class Side:
    """The gateway and its load."""

    def __init__(self, server: Server, worker: peer.Worker, exporter: int) -> None:
        self._server = server
        self._worker = worker
        self._exporter = Server("", exporter)
        self._wrk = 0

    @property
    def num_requests(self) -> int:
        return self._worker.num_answered

    @contextlib.asynccontextmanager
    async def loaded(self, seconds: int, core: int, body: Path) -> AsyncIterator[None]:
        """By wrk, but only in turns."""
        url = f"{self._server.url}/v1/chat/completions"
        load = asyncio.create_task(processes.wrk(url, CONNECTIONS, seconds, core, body, KEY, 0))
        while not (started := _children()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (self._wrk,) = started
        await asyncio.sleep(1.0)  # what is made once is made
        os.kill(self._wrk, signal.SIGSTOP)
        os.kill(self._exporter.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._server.pid, SIGNALS["bare"])
            os.kill(self._exporter.pid, signal.SIGCONT)
            os.kill(self._wrk, signal.SIGCONT)
            await load

    async def turn(self, kind: str) -> Turn:
        os.kill(self._server.pid, SIGNALS[kind])
        if kind == "beside":
            os.kill(self._exporter.pid, signal.SIGCONT)
        os.kill(self._wrk, signal.SIGCONT)
        await asyncio.sleep(SETTLING_S)
        before = self._now()
        await asyncio.sleep(TURN_S - SETTLING_S)
        seconds, cpu_s, exporter_s, num = (then - now for now, then in zip(before, self._now(), strict=True))
        os.kill(self._wrk, signal.SIGSTOP)
        if not num:
            raise BenchmarkError("nothing was answered for a whole turn: this machine has too much other work")
        await asyncio.sleep(ANSWERED_S)
        os.kill(self._exporter.pid, signal.SIGCONT)
        await asyncio.sleep(CATCH_UP_S)
        os.kill(self._exporter.pid, signal.SIGSTOP)
        return Turn(num / seconds, 1e6 * cpu_s / num, 1e6 * exporter_s / num)

    def _now(self) -> tuple[float, float, float, int]:
        """Seconds of the clock, of the gateway's CPU and of the one beside it, and requests so far."""
        return time.perf_counter(), self._server.cpu_s(), self._exporter.cpu_s(), self.num_requests


def _children() -> set[int]:
    """Of this process, that are wrk by now."""
    told = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in told if Path(f"/proc/{pid}/comm").read_text() == "wrk\n"}


@contextlib.asynccontextmanager
async def side(
    name: str, folder: Path, core: int, other_core: int, variables: Mapping[str, str]
) -> AsyncIterator[Side]:
    """A gateway with a ledger of its own; what makes its spans is on ``other_core``."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=in_memory()) as data:
        async with served(folder, Path(data), core, name, "benchmarks.observed", variables) as (server, worker):
            exporter = _exporter_of(server.pid)
            _pin(exporter, other_core)
            yield Side(server, worker, exporter)


def _pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task.name), {core})


def _exporter_of(pid: int) -> int:
    """Raises BenchmarkError."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"gateway.tracing" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise BenchmarkError("the gateway has started no process that makes spans")


async def measure(seconds: int, num_times: int, ratio: float) -> Result:
    """Raises BenchmarkError."""
    core, load_core = processes.check()
    other_core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {load_core})
    turns: dict[str, list[Turn]] = {kind: [] for kind in SIGNALS}
    num_requests = 0
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        body = folder / "request.json"
        body.write_text(json.dumps({"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": NUM_COMPLETION_TOKENS}))
        receiving = [sys.executable, "-m", "benchmarks.observing", "--receive"]
        receiver = await stack.enter_async_context(processes.server(receiving, other_core, folder / "receiver.log"))
        endpoint, _, counts = receiver.url.rpartition("/")
        variables = {
            "PENSTOCK_TRACING__ENDPOINT": endpoint,
            "PENSTOCK_TRACING__SAMPLE_RATIO": str(ratio),
            "PENSTOCK_TRACING__MAX_QUEUED_SPANS": "200000",
        }
        for time_ in range(num_times):
            async with (
                side(f"gateway-{time_}", folder, core, other_core, variables) as one,
                one.loaded(seconds + 2, core=load_core, body=body),
            ):
                num_requests += one.num_requests  # all is on from the beginning
                kinds = list(SIGNALS)
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    for kind in kinds:
                        num_before = one.num_requests
                        turns[kind].append(await one.turn(kind))
                        if kind in ("traced", "beside"):
                            num_requests += one.num_requests - num_before
                    kinds.reverse()
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{counts}/") as answer:
            num_spans = int(await answer.text())
    per_s = {kind: [each.requests_per_s for each in told] for kind, told in turns.items()}
    cpu_us = {kind: [each.cpu_us for each in told] for kind, told in turns.items()}
    return Result(
        ratios={kind: compared(per_s[kind], per_s[without]) for kind, without in COMPARED.items()},
        cpu_ratios={kind: compared(cpu_us[kind], cpu_us[without]) for kind, without in COMPARED.items()},
        num_requests=num_requests,
        num_spans=num_spans,
        turns=turns,
    )


def compared(with_: Sequence[float], without: Sequence[float]) -> Ratio:
    """Each with the other of its round."""
    ratios, random = [one / other for one, other in zip(with_, without, strict=True) if other], Random(0)
    drawn = sorted(_middle(random.choices(ratios, k=len(ratios))) for _ in range(NUM_DRAWS))
    outside = round(NUM_DRAWS * (1 - CONFIDENCE) / 2)
    return Ratio(_middle(ratios), drawn[outside], drawn[-1 - outside])


def _middle(ratios: Sequence[float]) -> float:
    quarter = len(ratios) // 4
    return fmean(sorted(ratios)[quarter : len(ratios) - quarter])


async def receive() -> None:
    """An OTLP receiver over gRPC, and its count of spans over HTTP. It stands for another machine: what it was sent is
    looked into when somebody asks."""
    import grpc
    from aiohttp import web
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

    os.nice(19)
    received: list[bytes] = []

    def export(request: bytes, context: Any) -> Any:
        received.append(request)
        return messages.ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        export, response_serializer=messages.ExportTraceServiceResponse.SerializeToString
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def count(_: web.Request) -> web.Response:
        requests = map(messages.ExportTraceServiceRequest.FromString, received)
        scopes = (scope for request in requests for each in request.resource_spans for scope in each.scope_spans)
        return web.Response(text=str(sum(len(scope.spans) for scope in scopes)))

    application = web.Application()
    application.router.add_get("/", count)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    print(f"receiver ready on http://127.0.0.1:{port}/{address[1]}", flush=True)
    await asyncio.Event().wait()


@click.command()
@click.option("--seconds", type=click.IntRange(1, 3600), default=60, show_default=True, help="Each time.")
@click.option("--times", "num_times", type=click.IntRange(1, 100), default=2, show_default=True, help="Started anew.")
@click.option("--ratio", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Of requests, kept.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--receive", "receives", is_flag=True, hidden=True)
def main(seconds: int, num_times: int, ratio: float, as_json: bool, receives: bool) -> None:
    """What metrics and traces cost the gateway's throughput, in interleaved turns."""
    if receives:
        uvloop.run(receive())
        return
    try:
        result = uvloop.run(measure(seconds, num_times, ratio))
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
    for name, told in result.turns.items():
        per_s, cpu_us = fmean(each.requests_per_s for each in told), fmean(each.cpu_us for each in told)
        beside_us = fmean(each.exporter_cpu_us for each in told)
        click.echo(f"{name}: {per_s:,.0f} requests/s, {cpu_us:.1f} us of CPU for one, {beside_us:.1f} us beside it")
    for kind, without in COMPARED.items():
        required = f" (at least {REQUIRED[kind]})" if kind in REQUIRED else ""
        click.echo(f"{kind} of {without}: requests/s {result.ratios[kind]}{required}, CPU {result.cpu_ratios[kind]}")
    click.echo(f"{result.num_spans:,} spans came of {result.num_requests:,} requests")
    sys.exit(0 if all(result.ratios[kind].middle >= least for kind, least in REQUIRED.items()) else 1)


if __name__ == "__main__":
    main()
