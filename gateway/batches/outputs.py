"""What a batch leaves: one file with the answers and one with what failed, each only where there is something in it, in
the order of the input."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from gateway import errors, openai
from gateway.background import to_its_end
from gateway.batches.book import Batch, Book
from gateway.batches.journal import WAITING, Journal
from gateway.batches.reading import Index
from gateway.files import File, Staged
from gateway.house import Gateway

PIECE_BYTES = 1 << 20
"""Written at once."""
PURPOSE = "batch_output"

Kept = tuple[Staged, File]
"""What is written, and its row."""

Ending = Literal["completed", "cancelled", "expired", "failed"]
REASONS = {
    "cancelled": ("batch_cancelled", "This request could not be executed before the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "failed": (
        "invalid_api_key",
        "The key that made the batch opens nothing any more: it was revoked, it has expired, or its project was"
        " disabled.",
    ),
}
"""Why lines were never asked: a code of OpenAI's where there is one."""

_json = msgspec.json.encode


def line(
    batch_id: str,
    number: int,
    custom_id: str | None,
    *,
    response: openai.LineResponse | None = None,
    error: openai.LineError | None = None,
) -> bytes:
    """One line of a file, with its end."""
    id = f"batch_req_{batch_id.removeprefix('batch_')}_{number + 1}"
    return _json(openai.BatchOutput(id=id, custom_id=custom_id, response=response, error=error))


def as_text(wrong: list[openai.BatchError]) -> str:
    """For the store. (PostgreSQL has no NUL.)"""
    return _json(wrong).decode().replace("\\u0000", "\\ufffd")


async def finish(gw: Gateway, book: Book, batch: Batch, journal: Journal, index: Index, ending: Ending) -> Batch:
    """Writes both and says that it is over. Until the last step nothing has changed for anybody, so it may be begun
    again. Raises Lost, StorageFull, StoreUnavailable and OSError."""
    files, now = gw.files, int(book.wall())
    batch = await book.finalize(batch.id, now)
    if batch.status == "cancelling":  # so it was told, even if its last line came meanwhile
        ending = "cancelled"
    expires_s = batch.output_expires_s or files.config.batch_expires_s
    num_unasked = journal.num_waiting
    async with files.staged(None) as answers, files.staged(None) as failures:
        await _write(answers, (output for is_answered, output in journal.outputs() if is_answered))
        await _write(failures, (output for is_answered, output in journal.outputs() if not is_answered))
        if num_unasked:
            await _write(failures, _unasked(batch, journal, index, ending))
        kept: dict[str, Kept] = {}
        for word, staged in (("output", answers), ("error", failures)):
            if staged.num_bytes:
                digest, name = await staged.finish(), f"{batch.id}_{word}.jsonl"
                kept[word] = staged, files.row_of(staged, digest, batch.tenant_id, name, PURPOSE, expires_s)
        values: dict[str, Any] = msgspec.structs.asdict(journal.counts)
        values["num_failed"] += num_unasked
        if ending == "failed":
            code, message = REASONS[ending]
            values["errors"] = as_text([openai.BatchError(code=code, message=message)])
        for word, (_, file) in kept.items():
            values[f"{word}_file_id"] = file.id
        values |= {"status": ending, f"{ending}_at": int(book.wall())}
        # Whoever breaks it off could not know whether it was committed, and whose the files are then.
        return await to_its_end(_place(gw, book, batch.id, list(kept.values()), values, journal.path))


async def _place(
    gw: Gateway, book: Book, batch_id: str, kept: list[Kept], values: dict[str, Any], journal: Path
) -> Batch:
    """The files lie there when it is over, and the journal is gone; else they are nowhere. Where nobody knows, all is
    left to be swept up."""
    try:
        for staged, file in kept:
            await gw.files.place(staged, file)
        ended = await book.finish(batch_id, [file for _, file in kept], **values)
    except errors.StoreUnavailable:  # it may have been committed all the same
        raise
    except Exception:
        for _, file in kept:
            with contextlib.suppress(OSError):
                gw.files.path(file.id).unlink(missing_ok=True)
        raise
    await asyncio.to_thread(journal.unlink, missing_ok=True)
    return ended


def _unasked(batch: Batch, journal: Journal, index: Index, ending: Ending) -> Iterator[bytes]:
    code, message = REASONS[ending]
    error = openai.LineError(code=code, message=message)
    waiting = (number for number, state in enumerate(journal.states) if state == WAITING)
    for number, custom_id in index.custom_ids(waiting):
        yield line(batch.id, number, custom_id, error=error)


async def _write(staged: Staged, outputs: Iterator[bytes]) -> None:
    """The iterator runs on a thread."""

    def piece() -> bytes:
        found = bytearray()
        for output in outputs:
            found += output + b"\n"
            if len(found) >= PIECE_BYTES:
                break
        return bytes(found)

    while data := await asyncio.to_thread(piece):
        await staged.write(data)
