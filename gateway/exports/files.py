"""An export to a file, which goes on where it was interrupted.

Until it is whole its pieces lie beside the file, in ``FILE.pieces``, each a file that is whole, with a note of where
the next one begins. Then they become the file, in one rename. Which rows belong to the period is as it was when the
first piece was begun; a period that was closed meanwhile is begun anew, since then it is settled which they are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from gateway.exports import Order
from gateway.exports.formats import writer_of
from gateway.exports.pieces import Export, Piece, Place
from gateway.exports.spans import Period

NOTE = "note.json"


class Note(msgspec.Struct):
    """What the directory of pieces holds."""

    order: Order
    period: Period
    """What it had when the pieces were begun."""
    num_pieces: int = 0
    num_read: int = 0
    end: Place | None = None


class InTheWay(Exception):
    """What lies where the export should go is not ours to change; the message says what."""


class Pieces:
    """Those of one file."""

    def __init__(self, path: Path, export: Export) -> None:
        """Raises InTheWay, and OSError."""
        if path.exists():
            raise InTheWay(f"{path} is there already")
        self._path = path
        self._directory = path.with_name(path.name + ".pieces")
        self._directory.mkdir(exist_ok=True)
        try:
            self.note = msgspec.json.decode((self._directory / NOTE).read_bytes(), type=Note)
        except FileNotFoundError:
            self.note = Note(export.order, export.period)
        except msgspec.DecodeError as error:
            raise InTheWay(f"{self._directory / NOTE} cannot be read ({error}); remove the directory") from None
        if self.note.order != export.order:
            raise InTheWay(f"{self._directory} has pieces of another export; remove it, or name another file")
        if self.note.period.digest != export.period.digest:
            self.note = Note(export.order, export.period)

    def add(self, export: Export, piece: Piece) -> None:
        """Durable, one after another."""
        with _whole(self._piece(self.note.num_pieces)) as sink:
            write_table(sink, export, [piece])
        note = self.note
        self.note = Note(note.order, note.period, note.num_pieces + 1, note.num_read + piece.num_read, piece.end)
        with _whole(self._directory / NOTE) as sink:
            sink.write(msgspec.json.encode(self.note))

    def join(self, export: Export) -> None:
        """The pieces become the file."""
        with _whole(self._path) as sink:
            if export.order.format == "parquet" and self.note.num_pieces:
                self._join_parquet(sink)
            else:
                self._concatenate(sink, export)
        shutil.rmtree(self._directory)

    def _concatenate(self, sink: BinaryIO, export: Export) -> None:
        write_table(sink, export, [])
        has_heading = export.order.format != "jsonl"
        for number in range(self.note.num_pieces):
            with self._piece(number).open("rb") as piece:
                if has_heading:
                    piece.readline()
                shutil.copyfileobj(piece, sink)

    def _join_parquet(self, sink: BinaryIO) -> None:
        from pyarrow import parquet

        first = parquet.read_schema(self._piece(0))
        with parquet.ParquetWriter(sink, first, compression="zstd") as writer:
            for number in range(self.note.num_pieces):
                writer.write_table(parquet.ParquetFile(self._piece(number)).read())

    def _piece(self, number: int) -> Path:
        return self._directory / f"{number:06d}"


async def write_file(export: Export, path: Path, tell: Callable[[int], None]) -> int:
    """Writes the export to ``path``; the number of rows of the ledger that are in it. ``tell`` hears how many more have
    come. Raises InTheWay, OSError, and what the database raises."""
    pieces = Pieces(path, export)
    tell(pieces.note.num_read)
    async for piece in export.of(pieces.note.period).pieces(pieces.note.end):
        pieces.add(export, piece)
        tell(piece.num_read)
    pieces.join(export)
    return pieces.note.num_read


async def write_stream(export: Export, sink: BinaryIO, tell: Callable[[int], None] = lambda num_read: None) -> int:
    """The same to a sink that cannot be gone back in."""
    writer = writer_of(export.order.format, sink, export.columns)
    num_read = 0
    async for piece in export.pieces():
        writer.write(piece.rows)
        tell(piece.num_read)
        num_read += piece.num_read
    writer.close()
    return num_read


def write_table(sink: BinaryIO, export: Export, pieces: list[Piece]) -> None:
    """A table of these pieces."""
    writer = writer_of(export.order.format, sink, export.columns)
    for piece in pieces:
        writer.write(piece.rows)
    writer.close()


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is there when all of it is on the disk, or not at all."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as sink:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())
    draft.rename(path)
