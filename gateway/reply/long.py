"""Bodies that are long in the making: on a thread, one at a time, and in pieces, since whoever encodes JSON lets
nothing else run meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import msgspec

from gateway import openai

if TYPE_CHECKING:
    from gateway.reply.answers import Answer
    from gateway.reply.choices import Choice

encode = msgspec.json.encode

FEW = 256
"""Tokens whose log-probabilities are objects at the same time."""
HERE = b"\0"
"""A place in JSON, which has no such character."""
_beside = ThreadPoolExecutor(1, thread_name_prefix="answers")


async def body_of(answer: Answer, extras: openai.PenstockExtras | None = None) -> bytes:
    """As ``answer.body``, while streams go on."""
    return await asyncio.get_running_loop().run_in_executor(_beside, partial(answer.body, extras))


def joined(pieces: Iterable[bytes]) -> bytes:
    """All of them, which are there once and no second time."""
    whole = BytesIO()
    for piece in pieces:
        whole.write(piece)
    return whole.getvalue()


def framed(body: msgspec.Struct, field: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """``body`` as JSON, with these pieces as the value of a field."""
    before, _, behind = encode(msgspec.structs.replace(body, **{field: msgspec.Raw(HERE)})).partition(HERE)
    yield before
    yield from pieces
    yield behind


def listed(items: Iterable[object]) -> Iterator[bytes]:
    """A list, in as many pieces as it has items."""
    yield b"["
    for number, item in enumerate(items):
        if number:
            yield b","
        yield encode(item)
    yield b"]"


def logprobs(choice: Choice) -> openai.Logprobs | None:
    """What ``choice`` has to tell of its tokens, each as JSON already: as objects all take several times the memory."""
    told = choice.take_logprobs(FEW)
    if isinstance(told, openai.ChatLogprobs):
        entries = _raw(told.content)
        while isinstance(more := choice.take_logprobs(FEW), openai.ChatLogprobs):
            entries += _raw(more.content)
        return openai.ChatLogprobs(entries)
    if told is not None:
        tops = _raw(told.top_logprobs or ())
        told = msgspec.structs.replace(told, top_logprobs=tops)
        while isinstance(more := choice.take_logprobs(FEW), openai.CompletionLogprobs):
            told.tokens.extend(more.tokens)
            told.token_logprobs.extend(more.token_logprobs)
            told.text_offset.extend(more.text_offset)
            tops += _raw(more.top_logprobs or ())
    return told


def _raw(items: Iterable[object]) -> Any:
    return [msgspec.Raw(encode(item)) for item in items]
