"""The texts of all requests of one turn of the event loop, read by the tokenizer in one call.

A prompt read right after another costs far less than one read alone, presumably because the tokenizer's tables are in
the processor's caches then (benchmarks/gateway.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Together:
    """Belongs to one event loop."""

    def __init__(self, read: Callable[[list[str]], list[list[int]]]) -> None:
        self._read = read
        self._waiting: list[tuple[list[str], asyncio.Future[list[list[int]]]]] = []

    async def read(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text. Raises what the tokenizer raises for one of them."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._read_all)
        answer: asyncio.Future[list[list[int]]] = loop.create_future()
        self._waiting.append((texts, answer))
        return await answer

    def _read_all(self) -> None:
        waiting, self._waiting = [(texts, answer) for texts, answer in self._waiting if not answer.done()], []
        try:
            read = iter(self._read([text for texts, _ in waiting for text in texts]))
        except Exception:  # of one text, and the others shall not hear of it
            for texts, answer in waiting:
                try:
                    answer.set_result(self._read(texts))
                except Exception as error:
                    answer.set_exception(error)
        else:
            for texts, answer in waiting:
                answer.set_result([next(read) for _ in texts])
