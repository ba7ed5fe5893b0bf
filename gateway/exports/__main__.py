"""An export in a process of its own: ``python -m gateway.exports`` reads a ``Task`` as MessagePack from standard input
and writes the export to standard output. The gateway's requests must not feel it, so it has the lowest priority."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from typing import BinaryIO

import msgspec

from gateway import store
from gateway.exports.files import write_stream
from gateway.exports.pieces import Export
from gateway.exports.process import Task


class Behind(io.RawIOBase):
    """A sink that leaves out the first bytes."""

    def __init__(self, sink: BinaryIO, num_left_out: int) -> None:
        self._sink = sink
        self._num_left_out = num_left_out

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        num_skipped = min(self._num_left_out, view.nbytes)
        self._num_left_out -= num_skipped
        self._sink.write(view[num_skipped:])
        return view.nbytes


async def run(task: Task, sink: BinaryIO) -> None:
    async with store.beside(task.store) as rooms:
        await write_stream(await Export.begin(rooms, task.order), sink)


def main() -> None:
    os.nice(19)
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Task)
    sink = sys.stdout.buffer
    asyncio.run(run(task, Behind(sink, task.num_left_out) if task.num_left_out else sink))  # type: ignore[arg-type]
    sink.flush()


if __name__ == "__main__":
    main()
