"""Forms that bring a file: its bytes go to the disk as they come, and the other fields are few and short."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway import openai
from gateway.errors import BodyTimeout, InvalidRequest, UnsupportedMediaType
from gateway.files import PIECE_BYTES, Staged
from gateway.house import Gateway
from gateway.unpacking import UnpackedStream, encoding_of

MAX_FIELDS, MAX_FIELD_BYTES = 16, 4096
MAX_NAME_CHARS = 255

T = TypeVar("T")


async def received(
    gw: Gateway, request: web.Request, name: str, staged: Staged, check: Callable[[int], None]
) -> tuple[dict[str, Any], str]:
    """The other fields, and what the file is called, all of which has been written then. ``name``: of its field;
    ``check``: of ``Files.quota``. Raises UnsupportedMediaType, InvalidRequest, Malformed and BodyTimeout."""
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType(f"Unsupported content type '{request.content_type}': send multipart/form-data")
    fields: dict[str, str] = {}
    filename, num_fields = None, 0
    async with _parts(gw, request) as reader:
        while (part := await _in_time(gw, reader.next())) is not None:
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise InvalidRequest("Each part of the body needs a name")
            if part.name == name:
                if filename is not None:
                    raise InvalidRequest(f"There is more than one '{name}'", param=name)
                filename = _storable(part.filename or "upload")
                await _stage(gw, part, staged, check)
            elif num_fields == MAX_FIELDS:  # also of one that is there again and again
                raise InvalidRequest(f"The body has more than {MAX_FIELDS} fields")
            else:
                num_fields += 1
                fields[part.name] = await _field(gw, part)
    if filename is None:
        raise openai.Malformed(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    return _nested(fields), filename


@contextlib.asynccontextmanager
async def _parts(gw: Gateway, request: web.Request) -> AsyncIterator[MultipartReader]:
    encoding = encoding_of(request.headers)
    try:
        if encoding is None:
            yield await request.multipart()
        else:
            async with UnpackedStream(request.content, encoding) as stream:
                yield MultipartReader(request.headers, stream.reader)
                num_bytes = 0  # whether it is whole is known at its end, and there is hardly anything up to there
                while data := await _in_time(gw, stream.reader.readany()):
                    num_bytes += len(data)
                    if num_bytes > MAX_FIELD_BYTES:
                        raise InvalidRequest("There is more behind the last part of the body")
    except (ValueError, AssertionError, RuntimeError, EOFError, HttpProcessingError) as error:
        # What aiohttp says of a broken body.
        why = error.message if isinstance(error, HttpProcessingError) else str(error)
        raise InvalidRequest(f"The body could not be read as multipart/form-data: {why}") from None


async def _stage(gw: Gateway, part: BodyPartReader, staged: Staged, check: Callable[[int], None]) -> None:
    piece, num_bytes = bytearray(), 0
    while not part.at_eof():
        data = await _in_time(gw, part.read_chunk(1 << 16))
        num_bytes += len(data)
        check(num_bytes)
        piece += data
        if len(piece) >= PIECE_BYTES:
            await staged.write(bytes(piece))
            piece.clear()
    await staged.write(bytes(piece))


async def _field(gw: Gateway, part: BodyPartReader) -> str:
    value = bytearray()
    while not part.at_eof():
        value += await _in_time(gw, part.read_chunk(MAX_FIELD_BYTES))
        if len(value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"'{part.name}' is longer than {MAX_FIELD_BYTES} bytes", param=part.name)
    return value.decode("utf-8", "replace")


async def _in_time(gw: Gateway, arriving: Coroutine[Any, Any, T]) -> T:
    """A client that sends nothing for as long as one may read nothing is not waited for."""
    try:
        async with asyncio.timeout(gw.settings.server.stall_s):
            return await arriving
    except TimeoutError:
        raise BodyTimeout() from None


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
