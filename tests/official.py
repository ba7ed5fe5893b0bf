"""OpenAI's and Anthropic's own clients as tests use them: they believe no answer that is not what its types say.

By themselves they take whatever comes, so a field that is missing, or of another type, is found by whoever reads it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import anthropic
import openai
from pydantic import TypeAdapter, ValidationError

KNOWN = (
    ("Completion", r"choices\.\d+\.finish_reason", (None,)),  # of the pieces of a stream before the last one
    ("Completion", r"choices\.\d+\.logprobs\.(token|top)_logprobs\.0", (None,)),  # nothing comes before an echo
    ("ChatCompletionChunk", r"choices\.\d+\.delta\.tool_calls\.\d+\.type", ("custom",)),
    (r"FileObject|AsyncCursorPage\[FileObject\]", r"(data\.\d+\.)?purpose", ("evals",)),
    ("CreateEmbeddingResponse", r"data\.\d+\.embedding", str),  # in base64, for which the client asks by itself
    (r"AsyncCursorPage\[ChatCompletionStoreMessage\]", r"data\.\d+\.role", ("system", "developer", "user", "tool")),
)
"""What OpenAI's own answers have, or its documentation names, and its types do not: the type, where, and what is
there."""


class _Strict:
    """A client that raises ValidationError, of answers and of each event of a stream."""

    def _process_response_data(self, *, data: object, cast_to: Any, response: Any) -> Any:
        if data is not None and cast_to is not object:
            check(data, cast_to)
        return super()._process_response_data(data=data, cast_to=cast_to, response=response)  # type: ignore[misc]


class Client(_Strict, openai.AsyncOpenAI):
    """OpenAI's."""


class Anthropic(_Strict, anthropic.AsyncAnthropic):
    """Anthropic's."""


def check(data: Any, type_: Any) -> None:
    """Raises ValidationError where ``data`` is not of the type, strictly."""
    name = getattr(type_, "__name__", "")
    if name == "CompactedResponse":  # its user's messages, which are documented, are no type of output items
        data = {**data, "output": [item for item in data["output"] if item.get("role") in (None, "assistant")]}
    try:
        _adapter(type_).validate_python(data, strict=True)
    except ValidationError as error:
        if not all(_is_known(name, each) for each in error.errors()):
            raise


def _is_known(name: str, error: Any) -> bool:
    place = ".".join(map(str, error["loc"]))
    return any(
        re.fullmatch(of, name)
        and re.fullmatch(where, place)
        and (isinstance(error["input"], what) if isinstance(what, type) else error["input"] in what)
        for of, where, what in KNOWN
    )


@lru_cache
def _adapter(type_: Any) -> TypeAdapter[Any]:
    return TypeAdapter(type_)
