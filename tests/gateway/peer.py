"""A worker's end of the real wire, played by a test: what arrives is looked at, what leaves is said token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from policies import framing, terms, wire
from tests.builders import PATIENCE_S


class Peer:
    """Listens on a Unix socket and speaks as the worker of one model would. For one gateway."""

    def __init__(
        self,
        max_model_tokens: int = 4096,
        vocab_size: int = 600,
        max_sequences: int = 64,
        pooling: wire.Pooling | None = None,
        num_dimensions: int = 0,
    ) -> None:
        self.max_model_tokens = max_model_tokens
        self.max_sequences = max_sequences
        self.vocab_size = vocab_size
        self.pooling, self.num_dimensions = pooling, num_dimensions
        self._messages: asyncio.Queue[wire.ToWorker] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> str:
        self._server = await asyncio.start_unix_server(self._serve, path)
        return f"unix:{path}"

    async def close(self) -> None:
        self.hang_up()
        if self._server is not None:
            self._server.close()

    async def submitted(self) -> wire.Submit:
        """The next request."""
        message = await self._next()
        assert isinstance(message, wire.Submit), message
        return message

    async def cancelled(self) -> wire.Cancel:
        """The next request that nobody wants any more."""
        message = await self._next()
        assert isinstance(message, wire.Cancel), message
        return message

    def say(
        self,
        submit: wire.Submit,
        token_ids: Sequence[int],
        reason: terms.FinishReason | None = None,
        *,
        index: int = 0,
        num_cached_tokens: int = 0,
        logprobs: list[wire.TokenLogprob] | None = None,
        **spent: float,
    ) -> None:
        """One step of one sequence; where it stops, its last token is its end token. ``spent`` is what else its
        ``Finish`` says."""
        finish = None
        if reason is not None:
            times = {"queue_s": 0.0, "prefill_s": 0.0, "decode_s": 0.0, **spent}
            ends = reason == "stop" and bool(token_ids)
            finish = wire.Finish(reason, num_cached_tokens, 0, **times, has_end_token=ends)  # type: ignore[arg-type]
        self.send(wire.StepOutput([wire.Delta(submit.request_id, index, list(token_ids), logprobs, finish)]))

    def send(self, message: wire.Message) -> None:
        assert self._writer is not None
        self._writer.write(framing.encode(message))

    def report(self, draining: bool = False) -> None:
        """That it has nothing to do."""
        counts = dict.fromkeys(("num_waiting", "num_running", "num_used_blocks", "num_cached_blocks"), 0)
        counts |= dict.fromkeys(("num_prefill_tokens", "num_decode_tokens", "num_cached_tokens"), 0)
        counts |= {"num_blocks": 64, "num_free_blocks": 64, "num_steps": 0, "num_preemptions": 0}
        self.send(wire.Stats(**counts, step_ms=0.0, draining=draining))

    def hang_up(self) -> None:
        """Goes away as a worker that died."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    def is_quiet(self) -> bool:
        """Nothing came that was not looked at."""
        return self._messages.empty()

    async def _next(self) -> wire.ToWorker:
        async with asyncio.timeout(PATIENCE_S):
            return await self._messages.get()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.send(wire.Hello(wire.VERSION, "peer"))
        self.send(
            wire.Ready(
                model="demo",
                max_model_tokens=self.max_model_tokens,
                vocab_size=self.vocab_size,
                eos_token_ids=[3],
                block_size=32,
                num_blocks=64,
                max_sequences=self.max_sequences,
                device="cpu",
                dtype="float32",
                pid=1,
                pooling=self.pooling,
                num_dimensions=self.num_dimensions,
            )
        )
        frames = framing.frames_to_worker()
        while data := await reader.read(1 << 16):
            for message in frames.feed(data):
                if not isinstance(message, wire.Hello):
                    self._messages.put_nowait(message)
