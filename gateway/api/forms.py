"""Forms that bring a file: its bytes go to the disk as they come, and the other fields are few and short."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway import openai
from gateway.bodies import PIECE_BYTES as BODY_PIECE_BYTES
from gateway.errors import BodyTimeout, InvalidRequest, UnsupportedMediaType
from gateway.files import PIECE_BYTES, Staged
from gateway.house import Gateway
from gateway.unpacking import UnpackedStream, encoding_of

MAX_FIELDS, MAX_FIELD_BYTES = 16, 4096
MAX_NAME_CHARS = 255

T = TypeVar("T")


class Patience:
    """With a client that sends a body: as with other bodies, every ``BODY_PIECE_BYTES`` of it, as they come over the
    wire, give it ``stall_s`` more. The time that a disk takes is not the client's."""

    def __init__(self, content: StreamReader, stall_s: float) -> None:
        self._content = content
        self._stall_s = self._left_s = stall_s
        self._due_bytes = BODY_PIECE_BYTES

    async def awaited(self, arriving: Coroutine[Any, Any, T]) -> T:
        """What comes of it. Raises BodyTimeout."""
        now = asyncio.get_running_loop().time
        began_at = now()
        try:
            async with asyncio.timeout(self._left_s):
                came = await arriving
        except TimeoutError:
            raise BodyTimeout() from None
        self._left_s -= now() - began_at
        if (num_bytes := self._content.total_bytes) >= self._due_bytes:
            self._left_s, self._due_bytes = self._stall_s, num_bytes + BODY_PIECE_BYTES
        return came


async def received(
    gw: Gateway, request: web.Request, name: str, staged: Staged, check: Callable[[int], None]
) -> tuple[dict[str, Any], str]:
    """The other fields, and what the file is called, all of which has been written then. ``name``: of its field;
    ``check``: of ``Files.quota``. Raises UnsupportedMediaType, InvalidRequest, Malformed and BodyTimeout."""
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType(f"Unsupported content type '{request.content_type}': send multipart/form-data")
    fields: dict[str, str] = {}
    filename, num_fields = None, 0
    patience = Patience(request.content, gw.settings.server.stall_s)
    async with _parts(request, patience) as reader:
        while (part := await patience.awaited(reader.next())) is not None:
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise InvalidRequest("Each part of the body needs a name")
            if part.name == name:
                if filename is not None:
                    raise InvalidRequest(f"There is more than one '{name}'", param=name)
                filename = _storable(part.filename or "upload")
                await _stage(patience, part, staged, check)
            elif num_fields == MAX_FIELDS:  # also of one that is there again and again
                raise InvalidRequest(f"The body has more than {MAX_FIELDS} fields")
            else:
                num_fields += 1
                fields[part.name] = await _field(patience, part)
    if filename is None:
        raise openai.Malformed(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    return _nested(fields), filename


@contextlib.asynccontextmanager
async def _parts(request: web.Request, patience: Patience) -> AsyncIterator[MultipartReader]:
    encoding = encoding_of(request.headers)
    try:
        if encoding is None:
            yield await request.multipart()
        else:
            async with UnpackedStream(request.content, encoding) as stream:
                yield MultipartReader(request.headers, stream.reader)
                num_bytes = 0  # whether it is whole is known at its end, and there is hardly anything up to there
                while data := await patience.awaited(stream.reader.readany()):
                    num_bytes += len(data)
                    if num_bytes > MAX_FIELD_BYTES:
                        raise InvalidRequest("There is more behind the last part of the body")
    except (ValueError, AssertionError, RuntimeError, EOFError, HttpProcessingError) as error:
        # What aiohttp says of a broken body.
        why = error.message if isinstance(error, HttpProcessingError) else str(error)
        raise InvalidRequest(f"The body could not be read as multipart/form-data: {why}") from None


async def _stage(patience: Patience, part: BodyPartReader, staged: Staged, check: Callable[[int], None]) -> None:
    piece, num_bytes = bytearray(), 0
    while not part.at_eof():
        data = await patience.awaited(part.read_chunk(1 << 16))
        num_bytes += len(data)
        check(num_bytes)
        piece += data
        if len(piece) >= PIECE_BYTES:
            await staged.write(bytes(piece))
            piece.clear()
    await staged.write(bytes(piece))


async def _field(patience: Patience, part: BodyPartReader) -> str:
    value = bytearray()
    while not part.at_eof():
        value += await patience.awaited(part.read_chunk(MAX_FIELD_BYTES))
        if len(value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"'{part.name}' is longer than {MAX_FIELD_BYTES} bytes", param=part.name)
    return value.decode("utf-8", "replace")


def _nested(fields: dict[str, str]) -> dict[str, Any]:
    """A form has no objects: ``expires_after[seconds]`` is how OpenAI's clients write one."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        outer, bracket, inner = name.partition("[")
        if bracket and inner.endswith("]"):
            among = nested.setdefault(outer, {})
            if isinstance(among, dict):
                among[inner[:-1]] = value
        else:
            nested[name] = value
    return nested


def _storable(filename: str) -> str:
    """A name to be shown; nothing is opened by it. Clients spell three of its characters as HTML's forms do (WHATWG
    HTML, 4.10.21.8). (PostgreSQL has no NUL, and UTF-8 no lone surrogates.)"""
    for spelled, char in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        filename = filename.replace(spelled, char)
    name = filename.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    return name[:MAX_NAME_CHARS]
