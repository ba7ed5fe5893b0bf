"""Requests, answers and errors in Ollama's own shapes, a thin translation: a request becomes a chat request or a
completion, whose journey it makes; what comes of it is shaped here.

Where the shapes were read: Ollama's ``docs/api.md`` and ollama-python's ``_types.py``.
"""

from gateway.ollama.answers import ChatAnswer, GenerateAnswer, RawAnswer
from gateway.ollama.failures import ErrorBody, line, shaped
from gateway.ollama.models import (
    Details,
    ModelList,
    ModelTag,
    RunningList,
    RunningModel,
    ShowBody,
    ShowRequest,
    VersionBody,
    parse_show,
)
from gateway.ollama.requests import ChatRequest, GenerateRequest, Nothing, name_of, parse_chat, parse_generate
from gateway.ollama.responses import ChatBody, GenerateBody, silence
from gateway.ollama.vectors import (
    EmbedAnswer,
    EmbedBody,
    EmbeddingsAnswer,
    EmbeddingsBody,
    EmbeddingsRequest,
    EmbedRequest,
    parse_embed,
    parse_embeddings,
)

__all__ = [
    "ChatAnswer",
    "ChatBody",
    "ChatRequest",
    "Details",
    "EmbedAnswer",
    "EmbedBody",
    "EmbedRequest",
    "EmbeddingsAnswer",
    "EmbeddingsBody",
    "EmbeddingsRequest",
    "ErrorBody",
    "GenerateAnswer",
    "GenerateBody",
    "GenerateRequest",
    "ModelList",
    "ModelTag",
    "Nothing",
    "RawAnswer",
    "RunningList",
    "RunningModel",
    "ShowBody",
    "ShowRequest",
    "VersionBody",
    "line",
    "name_of",
    "parse_chat",
    "parse_embed",
    "parse_embeddings",
    "parse_generate",
    "parse_show",
    "shaped",
    "silence",
]
