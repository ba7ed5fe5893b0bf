"""Requests, responses, chunks and errors in OpenAI's shapes: what they say on the wire, not what is done about them.

Where the shapes were read: openai-python's ``src/openai/types``, and vLLM's documentation for the sampling extras.
"""

from gateway.openai.chunks import DONE, KEEP_ALIVE, ChatChunks, Chunks, CompletionChunks
from gateway.openai.decoding import converted, decoded
from gateway.openai.failures import ErrorBody, ErrorDetail, Malformed
from gateway.openai.files import (
    ExpiresAfter,
    FileBody,
    FileDeleted,
    FileExtras,
    FileList,
    FileQuery,
    FileTerms,
    FileUpload,
)
from gateway.openai.receipts import PenstockExtras, Receipt, ReceiptAmount
from gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    check_chat,
    parse_chat,
    parse_completion,
    sampling,
)
from gateway.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Logprobs,
    ModelBody,
    ModelExtras,
    ModelList,
    TopLogprob,
    UsageBody,
)

__all__ = [
    "DONE",
    "KEEP_ALIVE",
    "AnswerMessage",
    "ChatChoice",
    "ChatChunks",
    "ChatCompletion",
    "ChatLogprob",
    "ChatLogprobs",
    "ChatRequest",
    "Chunks",
    "Completion",
    "CompletionChoice",
    "CompletionChunks",
    "CompletionLogprobs",
    "CompletionRequest",
    "ErrorBody",
    "ErrorDetail",
    "ExpiresAfter",
    "FileBody",
    "FileDeleted",
    "FileExtras",
    "FileList",
    "FileQuery",
    "FileTerms",
    "FileUpload",
    "Logprobs",
    "Malformed",
    "Message",
    "ModelBody",
    "ModelExtras",
    "ModelList",
    "PenstockExtras",
    "Receipt",
    "ReceiptAmount",
    "TopLogprob",
    "UsageBody",
    "check_chat",
    "converted",
    "decoded",
    "parse_chat",
    "parse_completion",
    "sampling",
]
