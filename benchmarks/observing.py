"""What watching costs the gateway: its throughput with tracing and without, in interleaved rounds.

    python -m benchmarks.observing [--rounds 6] [--seconds 2] [--ratio 0.1] [--together]

Two gateways share one core and take turns: one as it is, one whose traces go to a real OTLP receiver in a process of
its own. A scripted worker on the real wire, the load and the receiver have the other core, and so has the process that
makes the spans, unless ``--together`` leaves it on the gateway's. Needs wrk and two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import click
import msgspec
import uvloop
from tokenizers import Tokenizer

from benchmarks.gateway import peer, processes
from benchmarks.gateway.__main__ import CONFIG, MODEL, TEXT, _memory
from benchmarks.gateway.processes import BenchmarkError, Server
from benchmarks.gateway.rounds import CONNECTIONS, KEY, MESSAGES, MODEL_NAME, NUM_COMPLETION_TOKENS
from policies.wire import Ready

REQUIRED = 0.97
"""Of the throughput without."""


class Run(msgspec.Struct):
    """One run of wrk against one gateway."""

    requests_per_s: float
    cpu_us: float
    """Of the gateway's process for one request."""
    exporter_cpu_us: float
    """Of the process beside it, for one request of all, kept or not."""


class Result(msgspec.Struct):
    """Medians over the rounds; ratios are medians of each round's own."""

    throughput: float
    cpu: float
    """The gateway's CPU for a request with tracing, over that without."""
    num_requests: int
    num_spans: int
    """That the receiver has got."""
    plain: list[Run]
    traced: list[Run]


class Side:
    """One gateway."""

    def __init__(self, server: Server, exporter: int | None) -> None:
        self.server = server
        self._exporter = Server("", exporter) if exporter is not None else None
        self.num_requests = 0

    async def run(self, seconds: int, core: int, body: Path) -> Run:
        before, before_exporter = self.server.cpu_s(), self._exporter_s()
        url = f"{self.server.url}/v1/chat/completions"
        figures = await processes.wrk(url, CONNECTIONS, seconds, core, body, KEY, self.num_requests)
        self.num_requests += figures.num_requests
        return Run(
            figures.requests_per_s,
            1e6 * (self.server.cpu_s() - before) / figures.num_requests,
            1e6 * (self._exporter_s() - before_exporter) / figures.num_requests,
        )

    def _exporter_s(self) -> float:
        return 0.0 if self._exporter is None else self._exporter.cpu_s()


@contextlib.asynccontextmanager
async def side(
    name: str, folder: Path, place: Path | None, core: int, variables: Mapping[str, str], other_core: int | None
) -> AsyncIterator[Side]:
    """A gateway of its own ledger; its exporter, if it has one, on ``other_core``; None: where the gateway is."""
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=place))
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        ready = Ready(MODEL_NAME, 8192, tokenizer.get_vocab_size(), [0, 2], 32, 4096, 256, "none", "none", os.getpid())
        token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
        listening, connected = await peer.listen_as_worker(folder / f"{name}.socket", ready, token_ids)
        stack.callback(listening.close)
        config = folder / f"{name}.toml"
        config.write_text(CONFIG.format(data_dir=json.dumps(data), socket=folder / f"{name}.socket"))
        arguments = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        environ = {"PENSTOCK_API_KEY": KEY, "PENSTOCK_ADMIN_KEY": f"{KEY}-admin", **variables}
        async with processes.server(arguments, core, folder / f"{name}.log", environ) as server:
            async with asyncio.timeout(10.0):
                await connected
            exporter = _exporter_of(server.pid)
            if exporter is not None and other_core is not None:
                _pin(exporter, other_core)
            yield Side(server, exporter)


def _pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def _exporter_of(pid: int) -> int | None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"gateway.tracing" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


async def measure(num_rounds: int, seconds: int, ratio: float, together: bool) -> Result:
    """Raises BenchmarkError."""
    core, load_core = processes.check()
    os.sched_setaffinity(0, {load_core})
    place = _memory()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        body = folder / "request.json"
        body.write_text(json.dumps({"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": NUM_COMPLETION_TOKENS}))
        receiving = [sys.executable, "-m", "benchmarks.observing", "--receive"]
        receiver = await stack.enter_async_context(processes.server(receiving, load_core, folder / "receiver.log"))
        endpoint, counts = receiver.url, receiver.url.replace("http://", "").split("/")[1]
        variables = {
            "PENSTOCK_TRACING__ENDPOINT": endpoint.rsplit("/", 1)[0],
            "PENSTOCK_TRACING__SAMPLE_RATIO": str(ratio),
            "PENSTOCK_TRACING__MAX_QUEUED_SPANS": "200000",
        }
        plain = await stack.enter_async_context(side("plain", folder, place, core, {}, None))
        traced = await stack.enter_async_context(
            side("traced", folder, place, core, variables, None if together else load_core)
        )
        for each in (plain, traced):  # what is made once is made
            await each.run(1, load_core, body)
        runs: dict[Side, list[Run]] = {plain: [], traced: []}
        for number in range(num_rounds):
            order = (plain, traced) if number % 2 == 0 else (traced, plain)
            for each in order:
                runs[each].append(await each.run(seconds, load_core, body))
            click.echo(f"round {number + 1}: {_line(runs[plain][-1], runs[traced][-1])}", err=True)
        await asyncio.sleep(2.0)  # the last spans are on their way
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{counts}/") as answer:
            num_spans = int(await answer.text())
    pairs = list(zip(runs[plain], runs[traced], strict=True))
    return Result(
        throughput=median(with_.requests_per_s / without.requests_per_s for without, with_ in pairs),
        cpu=median(with_.cpu_us / without.cpu_us for without, with_ in pairs),
        num_requests=traced.num_requests,
        num_spans=num_spans,
        plain=runs[plain],
        traced=runs[traced],
    )


def _line(without: Run, with_: Run) -> str:
    return (
        f"{without.requests_per_s:,.0f} and {with_.requests_per_s:,.0f} requests/s "
        f"({with_.requests_per_s / without.requests_per_s:.3f}), {without.cpu_us:.1f} and {with_.cpu_us:.1f} us "
        f"of the gateway's CPU ({with_.cpu_us / without.cpu_us:.3f}), {with_.exporter_cpu_us:.1f} us beside it"
    )


async def receive() -> None:
    """An OTLP receiver over gRPC, and its count of spans over HTTP."""
    import grpc
    from aiohttp import web
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    os.nice(19)  # it stands for another machine
    num_spans = 0

    class Service(services.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            nonlocal num_spans
            num_spans += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    services.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def count(_: web.Request) -> web.Response:
        return web.Response(text=str(num_spans))

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
@click.option("--rounds", "num_rounds", type=click.IntRange(1, 100), default=6, show_default=True)
@click.option("--seconds", type=click.IntRange(1, 60), default=2, show_default=True, help="Of each run of wrk.")
@click.option("--ratio", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Of requests, kept.")
@click.option("--together", is_flag=True, help="Spans are made on the gateway's core, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--receive", "receives", is_flag=True, hidden=True)
def main(num_rounds: int, seconds: int, ratio: float, together: bool, as_json: bool, receives: bool) -> None:
    """What tracing costs the gateway's throughput, in interleaved rounds."""
    if receives:
        uvloop.run(receive())
        return
    try:
        result = uvloop.run(measure(num_rounds, seconds, ratio, together))
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
    click.echo(
        f"throughput with tracing is {result.throughput:.3f} of that without (at least {REQUIRED}), CPU for a request "
        f"{result.cpu:.3f}; {result.num_spans:,} spans came of {result.num_requests:,} requests"
    )
    sys.exit(0 if result.throughput >= REQUIRED else 1)


if __name__ == "__main__":
    main()
