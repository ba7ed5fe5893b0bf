"""A worker that computes nothing: a real process on the real wire that answers by a script, or misbehaves by one.

    python -m tests.scripted_worker [--num-tokens 16] [--fault die] '{"name": "w", "listen": "unix:/path", ...}'

The last argument is a worker's settings, as a gateway gives them to a child. All sequences that move in a step share
one frame, as with the real engine. Steps follow each other as fast as the gateway reads, or every ``--step-s``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from policies import framing, settings, wire

FAULTS = ("garbage", "silence", "die", "mute", "refuse", "stranger")
"""garbage: bytes that are no frame; silence: nothing at all any more; die: exit 7; mute: alive, but no answers;
refuse: Failed for each request; stranger: a delta for a request that was never submitted."""


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser()
    options.add_argument("--num-tokens", type=int, help="of each answer, at most max_tokens; else max_tokens")
    options.add_argument("--token-ids", default="72,105,33,32", help="repeated through each answer")
    options.add_argument("--tokens-per-step", type=int, default=1)
    options.add_argument("--step-s", type=float, default=0.0, help="0: as fast as they are read")
    options.add_argument("--max-sequences", type=int, default=256)
    options.add_argument("--num-blocks", type=int, default=1024, help="of 32 tokens")
    options.add_argument("--max-model-tokens", type=int, default=8192)
    options.add_argument("--vocab-size", type=int, default=32_000)
    options.add_argument("--stats-s", type=float, default=1.0)
    options.add_argument("--cost-weights", default="", help="what it says that steps cost; seconds, comma-separated")
    options.add_argument("--version", type=int, default=wire.VERSION)
    options.add_argument("--exit-at-start", type=int, help="with this status, before it listens")
    options.add_argument("--waits-for", type=Path, help="a file: it starts when that is there")
    options.add_argument("--fault", choices=FAULTS)
    options.add_argument("--after", type=int, default=0, help="the fault begins with this Submit; 0: before any")
    options.add_argument("--emitted", type=Path, help="a file: who got how many tokens, before they leave")
    options.add_argument("--once", help="a file: the fault happens only if it can be created")
    options.add_argument("settings")
    return options


class Sequence:
    """One answer being written."""

    __slots__ = ("index", "num_left", "num_written", "request_id", "stops_early")

    def __init__(self, submit: wire.Submit, index: int, num_tokens: int | None) -> None:
        ceiling = submit.sampling.max_tokens
        self.request_id = submit.request_id
        self.index = index
        whole = ceiling if num_tokens is None else min(num_tokens, ceiling)
        self.stops_early = whole < ceiling
        self.num_written = len(submit.emitted_token_ids.get(index, ()))
        self.num_left = max(0, whole - self.num_written)


class Gateway(asyncio.Protocol):
    """One gateway's connection."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker
        self._frames = framing.frames_to_worker()
        self._sequences: dict[tuple[str, int], Sequence] = {}
        self._stepping: asyncio.Handle | None = None
        self._paused = False
        self._num_steps = 0
        self.asks = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        options = self._worker.options
        self.send(wire.Hello(options.version, self._worker.settings.name))
        self.send(
            wire.Ready(
                model=self._worker.settings.model,
                max_model_tokens=options.max_model_tokens,
                vocab_size=options.vocab_size,
                eos_token_ids=[0],
                block_size=32,
                num_blocks=options.num_blocks,
                max_sequences=options.max_sequences,
                device="cpu",
                dtype="float32",
                pid=os.getpid(),
            )
        )
        self._worker.gateways.add(self)
        self._worker.misbehave(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._worker.gateways.discard(self)
        self._sequences.clear()
        self.transport = None

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            match message:
                case wire.Hello():
                    self.asks = message.asks
                case wire.Submit():
                    self._submit(message)
                case wire.Cancel(request_id, index):
                    self._cancel(request_id, index)
                case wire.LoadAdapter(adapter):
                    self.send(wire.AdapterLoaded(adapter, "digest", rank=8, num_bytes=1024))
                case wire.Drain():
                    self._worker.draining = True
                    self._worker.leave_if_done()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._go()

    def send(self, message: wire.Message) -> None:
        if self.transport is not None and not self._worker.silent:
            self.transport.write(framing.encode(message))

    def stats(self) -> None:
        gateways, num_blocks = self._worker.gateways, self._worker.options.num_blocks
        num_open = sum(gateway.num_open for gateway in gateways)
        num_running = min(num_open, self._worker.options.max_sequences)
        self.send(
            wire.Stats(
                num_waiting=num_open - num_running,
                num_running=num_running,
                num_blocks=num_blocks,
                num_used_blocks=num_open,
                num_cached_blocks=0,
                num_free_blocks=max(0, num_blocks - num_open),
                num_prefill_tokens=0,
                num_decode_tokens=0,
                num_cached_tokens=0,
                num_steps=self._num_steps,
                num_preemptions=0,
                step_ms=0.0,
                cost_weights=self._worker.cost_weights,
                num_gateways=sum(gateway.asks for gateway in gateways),
            )
        )

    @property
    def num_open(self) -> int:
        return len(self._sequences)

    def _submit(self, submit: wire.Submit) -> None:
        worker = self._worker
        worker.num_submits += 1
        worker.misbehave(self)
        if worker.fault == "refuse":
            return self.send(wire.Failed(submit.request_id, "overloaded", "scripted to refuse"))
        if worker.fault == "mute":
            return
        for index in submit.indices:
            sequence = Sequence(submit, index, worker.options.num_tokens)
            self._sequences[submit.request_id, index] = sequence
        self._go()

    def _cancel(self, request_id: str, index: int | None) -> None:
        gone = [key for key in self._sequences if key[0] == request_id and index in (None, key[1])]
        if gone:
            finish = wire.Finish("cancelled", 0, 0, 0.0, 0.0, 0.0)
            self.send(wire.StepOutput([wire.Delta(*key, token_ids=[], finish=finish) for key in gone]))
        for key in gone:
            del self._sequences[key]
        self._worker.leave_if_done()

    def _go(self) -> None:
        if self._stepping is None and self._sequences and not self._paused:
            loop = asyncio.get_running_loop()
            step_s = self._worker.options.step_s
            self._stepping = loop.call_later(step_s, self._step) if step_s else loop.call_soon(self._step)

    def _step(self) -> None:
        self._stepping = None
        self._num_steps += 1
        token_ids, width = self._worker.token_ids, self._worker.options.tokens_per_step
        deltas, emitted = [], []
        for key, sequence in list(self._sequences.items()):
            num_tokens = min(width, sequence.num_left)
            emitted.append(f"{sequence.request_id} {sequence.index} {sequence.num_written} {num_tokens}\n")
            start = sequence.num_written % self._worker.num_script_tokens
            sequence.num_written += num_tokens
            sequence.num_left -= num_tokens
            finish = None
            if not sequence.num_left:
                stops = sequence.stops_early
                finish = wire.Finish("stop" if stops else "length", 0, 0, 0.0, 0.0, 0.0, has_end_token=stops)
                del self._sequences[key]
            tokens = token_ids[start : start + num_tokens]
            deltas.append(wire.Delta(sequence.request_id, sequence.index, tokens, finish=finish))
        if deltas:
            self._worker.note("".join(emitted))
            self.send(wire.StepOutput(deltas))
        self._go()
        self._worker.leave_if_done()


class ScriptedWorker:
    """The process: its script, and whom it serves."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.settings = msgspec.json.decode(options.settings, type=settings.WorkerSettings)
        self.cost_weights = tuple(float(weight) for weight in options.cost_weights.split(",") if weight)
        script = [int(token_id) for token_id in options.token_ids.split(",")]
        self.num_script_tokens = len(script)
        self.token_ids = script * (options.tokens_per_step // len(script) + 2)
        """Long enough for one step from any place in the script."""
        self.gateways: set[Gateway] = set()
        self.num_submits = 0
        self.fault: str | None = None
        """The one that has begun."""
        self.silent = False
        self.draining = False
        self._left = asyncio.Event()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._emitted = None if options.emitted is None else os.open(options.emitted, flags)

    def note(self, lines: str) -> None:
        """What is written here outlives the process, however it ends."""
        if self._emitted is not None:
            os.write(self._emitted, lines.encode())

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._left.set)
        if self.settings.exit_with_stdin:
            loop.add_signal_handler(signal.SIGINT, lambda: None)
            await loop.connect_read_pipe(lambda: Parent(self._left), sys.stdin)
        kind, _, where = self.settings.listen.partition(":")
        if kind == "unix":
            Path(where).unlink(missing_ok=True)  # noqa: ASYNC240
            server = await loop.create_unix_server(lambda: Gateway(self), where)
        else:
            host, _, port = where.rpartition(":")
            server = await loop.create_server(lambda: Gateway(self), host, int(port))
        async with server:
            while not self._left.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._left.wait(), self.options.stats_s)
                for gateway in self.gateways:
                    gateway.stats()
            for gateway in list(self.gateways):
                if gateway.transport is not None:
                    gateway.transport.close()

    def misbehave(self, gateway: Gateway) -> None:
        """Begins the fault, if its time has come."""
        if self.options.fault is None or self.num_submits < self.options.after:
            return
        if self.options.once is not None and self.fault is None:
            try:
                Path(self.options.once).touch(exist_ok=False)
            except FileExistsError:
                return
        self.fault = self.options.fault
        match self.fault:
            case "garbage" if gateway.transport is not None:
                gateway.transport.write(b"\x00\x00\x00\x05hello")
            case "silence":
                self.silent = True
            case "die":
                os._exit(7)
            case "stranger":
                gateway.send(wire.StepOutput([wire.Delta("req_of_nobody", 0, [1])]))

    def leave_if_done(self) -> None:
        if self.draining and not any(gateway.num_open for gateway in self.gateways):
            self._left.set()


class Parent(asyncio.Protocol):
    """Standard input: its end means that the gateway is gone."""

    def __init__(self, left: asyncio.Event) -> None:
        self._left = left

    def connection_lost(self, error: Exception | None) -> None:
        self._left.set()


async def main() -> None:
    await ScriptedWorker(parser().parse_args()).run()


if __name__ == "__main__":
    chosen = parser().parse_args()
    if chosen.exit_at_start is not None:
        print(f"penstock worker: scripted to exit with {chosen.exit_at_start}", file=sys.stderr)
        sys.exit(chosen.exit_at_start)
    while chosen.waits_for is not None and not chosen.waits_for.exists():
        time.sleep(0.01)
    uvloop.run(main())
