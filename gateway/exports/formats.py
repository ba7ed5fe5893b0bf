"""Rows to bytes. The same rows in the same pieces are the same bytes."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, BinaryIO, Protocol, TextIO

import msgspec

from gateway.exports import Format
from gateway.exports.columns import Columns, Row, Type, Value

CONTENT_TYPES: dict[Format, str] = {
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/x-ndjson",
    "parquet": "application/vnd.apache.parquet",
    "focus": "text/csv; charset=utf-8",
}
_LINE_END = "\r\n"


class Writer(Protocol):
    """Of one table to one sink, which stays open."""

    def write(self, rows: Sequence[Row]) -> None:
        """One piece."""

    def close(self) -> None:
        """The end of the table; it has one also without rows."""


def writer_of(format: Format, sink: BinaryIO, columns: Columns) -> Writer:
    match format:
        case "csv" | "focus":
            return CsvWriter(sink, columns)
        case "jsonl":
            return JsonLinesWriter(sink, columns)
        case "parquet":
            return ParquetWriter(sink, columns)


class CsvWriter:
    """RFC 4180, with a heading, in UTF-8; lines end with a line feed. Null is empty."""

    def __init__(self, sink: BinaryIO, columns: Columns) -> None:
        self._text = io.TextIOWrapper(sink, "utf-8", newline="", write_through=True)
        # csv quotes what its own line ends are made of: readers end a row at a carriage return that is not quoted.
        self._csv = csv.writer(_LineFeeds(self._text), lineterminator=_LINE_END)
        self._csv.writerow([column.name for column in columns])

    def write(self, rows: Sequence[Row]) -> None:
        self._csv.writerows([[_as_text(value) for value in row] for row in rows])

    def close(self) -> None:
        self._text.detach()


class _LineFeeds:
    """Takes rows, each of them whole, and ends them with a line feed alone."""

    def __init__(self, text: TextIO) -> None:
        self._text = text

    def write(self, row: str) -> None:
        self._text.write(f"{row.removesuffix(_LINE_END)}\n")


def _as_text(value: Value) -> Value:
    match value:
        case float():  # never 1.5e-05, which not every reader takes
            return f"{Decimal(repr(value)):f}"
        case Decimal():
            return f"{value:f}"
        case datetime.datetime():
            return f"{value:%Y-%m-%dT%H:%M:%SZ}"
    return value


class JsonLinesWriter:
    """An object a line; money is a number with all its digits."""

    def __init__(self, sink: BinaryIO, columns: Columns) -> None:
        self._sink = sink
        self._names = [column.name for column in columns]
        self._encoder = msgspec.json.Encoder(decimal_format="number")

    def write(self, rows: Sequence[Row]) -> None:
        objects = [dict(zip(self._names, [_plain(value) for value in row], strict=True)) for row in rows]
        self._sink.write(self._encoder.encode_lines(objects))

    def close(self) -> None:
        """There is nothing to end."""


def _plain(value: Value) -> Value:
    return f"{value:%Y-%m-%dT%H:%M:%SZ}" if isinstance(value, datetime.datetime) else value


class ParquetWriter:
    """A row group a piece, compressed with Zstandard."""

    def __init__(self, sink: BinaryIO, columns: Columns) -> None:
        import pyarrow  # needs more memory than all the rest here, so only where it is used
        from pyarrow import parquet

        pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # its own keeps 30 MB more of what was freed
        self._pyarrow = pyarrow
        self._schema = pyarrow.schema([(column.name, _arrow_type(pyarrow, column.type)) for column in columns])
        self._file = pyarrow.PythonFile(sink, mode="w")
        self._parquet = parquet.ParquetWriter(self._file, self._schema, compression="zstd")

    def write(self, rows: Sequence[Row]) -> None:
        arrays = [
            self._pyarrow.array(values, field.type)
            for values, field in zip(zip(*rows, strict=True), self._schema, strict=True)
        ]
        self._parquet.write_table(self._pyarrow.Table.from_arrays(arrays, schema=self._schema), len(rows))

    def close(self) -> None:
        self._parquet.close()


def _arrow_type(pyarrow: Any, type_: Type) -> Any:
    match type_:
        case "text":
            return pyarrow.string()
        case "count":
            return pyarrow.int64()
        case "number":
            return pyarrow.float64()
        case "money":
            return pyarrow.decimal128(38, 6)
        case "price":
            return pyarrow.decimal128(38, 10)
        case "instant":
            return pyarrow.timestamp("s", "UTC")
        case "day":
            return pyarrow.date32()
