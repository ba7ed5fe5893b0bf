"""The client's end of OpenAI's API, as far as our commands need it: where to call, with which key, reading a stream.

Nothing of the server imports this; ``penstock chat`` and ``penstock bench serve`` do, and work against any such server.
aiohttp takes as long to load as all else that a command needs, so whoever asks for help only does without it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

if TYPE_CHECKING:
    import aiohttp

DEFAULT_URL = "http://127.0.0.1:8080"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class CallFailed(Exception):
    """The server could not be reached, or refused, or broke off; the message is one sentence for whoever sits there."""


class Unreachable(CallFailed):
    """There is no server, or the connection to it was lost before an answer was whole."""


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    delta: Delta | None = None
    """Of a streamed chat completion."""
    message: Delta | None = None
    """Of a whole chat completion."""
    text: str | None = None
    """Of a completion."""
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Failure(msgspec.Struct):
    message: str | None = None
    code: str | int | None = None


class Answer(msgspec.Struct):
    """A whole answer, or one chunk of a streamed one: the fields that our commands read, whatever else there is."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Failure | str | None = None


class ModelEntry(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelEntry] = []


decode_answer = msgspec.json.Decoder(Answer).decode
_decode_models = msgspec.json.Decoder(ModelList).decode


class Events:
    """Server-sent events out of bytes that arrive in any pieces: the payload of each ``data:`` line.

    Comments, other fields and blank lines are passed over. No payload of this API is split over ``data:`` lines.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that ``data`` completes, in order."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def api_root(url: str) -> str:
    """The address up to and including ``/v1``, however much of it was typed; without a scheme http is meant."""
    root = (url if "://" in url else f"http://{url}").rstrip("/")
    return root if root.endswith("/v1") else f"{root}/v1"


def checked_url(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    """For an option that is an address as ``api_root`` takes it."""
    try:
        parts = urlsplit(api_root(url))
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise click.BadParameter(f"{url!r} is no address of a server, such as {DEFAULT_URL}.")
    return url


server_option = click.option(
    "--url",
    envvar="PENSTOCK_URL",
    default=DEFAULT_URL,
    show_default=True,
    callback=checked_url,
    help="Server, with or without /v1 [PENSTOCK_URL].",
)


class Finite(click.FloatRange):
    """As an option's type: a float of that range that is a number, and not without end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no number that there could be so many of.", param, ctx)
        return found


def find_key(given: str | None, url: str) -> str | None:
    """``given``, else PENSTOCK_API_KEY, else the key a server here left in its data directory, else OPENAI_API_KEY."""
    return _bare(given or _own_key("PENSTOCK_API_KEY", url) or os.environ.get("OPENAI_API_KEY"))


def find_admin_key(given: str | None, url: str) -> str | None:
    """``given``, else PENSTOCK_ADMIN_KEY, else the admin key a server here left in its data directory."""
    return _bare(given or _own_key("PENSTOCK_ADMIN_KEY", url))


def _bare(key: str | None) -> str | None:
    """Without the end of the line that it was read with, which no header may have."""
    return None if key is None else key.strip()


def _own_key(variable: str, url: str) -> str | None:
    """Of the environment, else of the data directory: that one is for this machine's server alone, and goes nowhere
    else."""
    if key := os.environ.get(variable):
        return key
    if urlsplit(api_root(url)).hostname not in LOOPBACK:
        return None
    bootstrap = Path(os.environ.get("PENSTOCK_STORE__DATA_DIR", "data")) / "bootstrap.env"
    try:
        lines = bootstrap.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{variable}="):
            return line.partition("=")[2].strip()
    return None


def open_session(url: str, key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """A session on the API at ``url``, any number of connections; ``timeout_s`` bounds each call to its last byte."""
    import aiohttp

    return aiohttp.ClientSession(
        base_url=f"{api_root(url)}/",
        headers={"Authorization": f"Bearer {key}"} if key else None,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0),
    )


async def list_models(session: aiohttp.ClientSession) -> list[str]:
    """The ids of the models served. Raises CallFailed."""
    import aiohttp

    try:
        async with session.get("models") as response:
            body = await response.read()
            if response.status != 200:
                hint = " Give a key with --key, or in PENSTOCK_API_KEY." if response.status == 401 else ""
                raise CallFailed(refusal(response.status, body) + hint)
            return [entry.id for entry in _decode_models(body).data]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise lost(error) from error
    except msgspec.DecodeError as error:
        raise CallFailed("the server does not speak OpenAI's API: its list of models cannot be read") from error


def refusal(status: int, body: bytes) -> str:
    """What a response that is not 200 says, in one line."""
    try:
        error = decode_answer(body).error
    except msgspec.DecodeError:
        error = None
    message = error.message if isinstance(error, Failure) else error
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"


def lost(error: BaseException) -> CallFailed:
    """Of a call that never got an answer: Unreachable, unless there is a server, though one that is not trusted."""
    import aiohttp

    said = unreachable(error)
    return CallFailed(said) if isinstance(error, aiohttp.ClientConnectorCertificateError) else Unreachable(said)


def unreachable(error: BaseException) -> str:
    """Why a call never got an answer, in one line."""
    import aiohttp

    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or "it cannot be verified"
        return (
            f"the certificate of {error.host}:{error.port} is not trusted ({why});"
            " SSL_CERT_FILE may name a PEM file of the authorities to trust"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}"
    if isinstance(error, aiohttp.InvalidURL):
        return "the URL is none of HTTP"
    return f"connection lost ({type(error).__name__})"
