"""A batch's input, read once from end to end: where each line is, and what is wrong with those that are wrong.

Nothing of it stays in memory but places; a line is read again when it is its turn. What its body asks for is looked at
only as far as lines are sorted by it: the rest is found out when it is asked, and is that line's alone.
"""

from __future__ import annotations

import os
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from gateway import openai
from policies.lines import likeness

MAX_ERRORS = 1000
"""Named one by one; how many more there are is said."""
NEWLINE = b"\n"
UNREADABLE = ("invalid_json_line", "duplicate_key", "too_many_parts")
NO_KEY = ("", b"", b"")
"""Of a line that is not asked."""
MAX_LINES_READ, MAX_BYTES_READ = 64, 4 << 20
"""At once, when it is their turn."""

_line = msgspec.json.Decoder(openai.BatchLine)
_body = msgspec.json.Decoder(openai.BatchLineBody)


class Index:
    """Where the lines are. They are numbered from 0; empty ones do not count."""

    def __init__(self, path: Path) -> None:
        self.errors: list[openai.BatchError] = []
        """With anything in it, no line is asked."""
        self.num_errors = 0
        self.unread: list[tuple[int, str | None, openai.LineError]] = []
        """Lines that are no JSON, or no clear one, with their custom ids where they have any. Each of them fails
        alone."""
        self.models: set[str] = set()
        self.order: list[int] = []
        """The lines in the order in which they are best asked."""
        self._path = path
        self._models: list[str] = []
        self._offsets = array("Q")
        self._sizes = array("Q")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, offset: int, size: int) -> None:
        self._offsets.append(offset)
        self._sizes.append(size)

    def wrong(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        """``line``: from 1, and empty ones count."""
        self.num_errors += 1
        if self.num_errors <= MAX_ERRORS:
            self.errors.append(openai.BatchError(code=code, message=message, param=param, line=line))

    def malformed(self, raw: bytes, error: openai.Malformed, line: int, param: str | None) -> None:
        """The line that was added last."""
        code = "invalid_json_line" if error.code == "invalid_json" else error.code or "invalid_line"
        if code in UNREADABLE:
            try:
                custom_id = _line.decode(raw).custom_id
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                custom_id = None
            told = openai.LineError(code=code, message=f"Line {line}: {error}")
            self.unread.append((len(self) - 1, custom_id, told))
        self.wrong(code, str(error), line, param)

    def close(self) -> None:
        """No more is found wrong."""
        if self.num_errors == len(self.unread) < len(self):
            self.errors.clear()
        elif self.num_errors > MAX_ERRORS:
            more = self.num_errors - MAX_ERRORS
            self.errors.append(openai.BatchError(code="too_many_errors", message=f"{more} more lines are wrong."))

    def sort(self, keys: Sequence[tuple[str, bytes, bytes]], groups: bool) -> None:
        """All lines that were read are good, and these are theirs."""
        self._models = [key[0] for key in keys]
        self.order = sorted(range(len(keys)), key=keys.__getitem__) if groups else list(range(len(keys)))

    def model_of(self, number: int) -> str:
        return self._models[number]

    def lines(self, numbers: Iterable[int]) -> list[tuple[int, openai.BatchLine]]:
        """As many of the first of them as are worth a way to the disk. Runs on a thread; raises OSError."""
        found: list[tuple[int, openai.BatchLine]] = []
        num_bytes = 0
        reading = os.open(self._path, os.O_RDONLY)
        try:
            for number in numbers:
                raw = os.pread(reading, self._sizes[number], self._offsets[number])
                found.append((number, _line.decode(raw)))
                num_bytes += len(raw)
                if len(found) == MAX_LINES_READ or num_bytes >= MAX_BYTES_READ:
                    break
        finally:
            os.close(reading)
        return found

    def custom_ids(self, numbers: Iterable[int]) -> Iterator[tuple[int, str | None]]:
        """Of these lines, which were read. Runs on a thread; raises OSError."""
        with self._path.open("rb") as reading:
            for number in numbers:
                reading.seek(self._offsets[number])
                yield number, _line.decode(reading.read(self._sizes[number])).custom_id


class LostIndex(Index):
    """Of a file that cannot be read any more: so many lines, and nobody knows what they were called."""

    def __init__(self, path: Path, num_lines: int) -> None:
        super().__init__(path)
        self._num_lines = num_lines

    def __len__(self) -> int:
        return self._num_lines

    def custom_ids(self, numbers: Iterable[int]) -> Iterator[tuple[int, str | None]]:
        return ((number, None) for number in numbers)


def read(
    path: Path, endpoint: str, max_lines: int, max_line_bytes: int, may_use: Callable[[str], bool], groups: bool
) -> Index:
    """Runs on a thread, for as long as the disk takes. ``may_use``: whether there is a model of this name for whoever
    asks; ``groups``: lines that begin alike follow each other. Raises OSError."""
    index = Index(path)
    custom_ids: dict[str, int] = {}
    keys: list[tuple[str, bytes, bytes]] = []
    known: dict[str, bool] = {}
    offset = number = 0
    with path.open("rb") as reading:
        if reading.read(len(BOM_UTF8)) == BOM_UTF8:  # which editors on Windows put there
            offset = len(BOM_UTF8)
        reading.seek(offset)
        while raw := reading.readline(max_line_bytes + 1):
            number += 1
            size = len(raw)
            if size > max_line_bytes and not raw.endswith(NEWLINE):
                index.wrong("line_too_large", f"The line is longer than {max_line_bytes} bytes.", number)
                while raw and not raw.endswith(NEWLINE):
                    raw = reading.readline(1 << 20)
                    size += len(raw)
            elif raw.strip():
                if len(index) == max_lines:
                    index.wrong("too_many_lines", f"There are more lines than the {max_lines} that a batch may have.")
                    break
                index.add(offset, size)
                _look(index, raw, number, endpoint, custom_ids, keys, known, may_use)
            offset += size
    if not number or not (len(index) or index.num_errors):
        index.wrong("empty_file", "The file has no lines.")
    index.close()
    if not index.errors:
        index.sort(keys, groups)
    return index


def _look(
    index: Index,
    raw: bytes,
    number: int,
    endpoint: str,
    custom_ids: dict[str, int],
    keys: list[tuple[str, bytes, bytes]],
    known: dict[str, bool],
    may_use: Callable[[str], bool],
) -> None:
    """At one line; ``custom_ids``, ``keys`` and ``known`` grow with it."""
    try:
        line = openai.decoded(_line, raw)
    except openai.Malformed as error:
        keys.append(NO_KEY)
        return index.malformed(raw, error, number, error.param)
    first = custom_ids.setdefault(line.custom_id, number)
    if first != number:
        what = f"The custom_id {line.custom_id[:64]!r} is that of line {first} already."
        index.wrong("duplicate_custom_id", what, number, "custom_id")
    if line.method != "POST":
        index.wrong("invalid_method", "The method of a line is 'POST'.", number, "method")
    if line.url != endpoint:
        what = f"The url {line.url[:64]!r} is not the batch's endpoint, which is '{endpoint}'."
        index.wrong("mismatched_endpoint", what, number, "url")
    try:
        body = openai.decoded(_body, bytes(line.body))
    except openai.Malformed as error:
        param = "body" if error.param is None else f"body.{error.param}"
        keys.append(NO_KEY)
        return index.malformed(raw, error, number, param)
    for name, wanted in (("stream", body.stream), ("background", body.background)):
        if wanted:
            index.wrong("invalid_value", f"A line is answered in a file: leave '{name}' out.", number, f"body.{name}")
    if body.model not in known:
        known[body.model] = may_use(body.model)
    if not known[body.model]:
        what = f"The model `{body.model[:64]}` does not exist or you do not have access to it."
        index.wrong("model_not_found", what, number, "body.model")
    index.models.add(body.model)
    keys.append(likeness(body.model, *body.said))
    return None
