"""Requests, answers, events and errors in Anthropic's shapes. A request becomes a chat request, whose journey it makes;
what comes of it is shaped here.

Where the shapes were read: anthropic-sdk-python's ``src/anthropic/types``.
"""

from gateway.anthropic.answers import MessageAnswer
from gateway.anthropic.failures import ErrorBody, event, shaped
from gateway.anthropic.models import ModelInfo, ModelPage, ModelQuery, page_of
from gateway.anthropic.requests import CountRequest, MessageRequest, parse_count, parse_message
from gateway.anthropic.responses import MessageBody, TokenCount

__all__ = [
    "CountRequest",
    "ErrorBody",
    "MessageAnswer",
    "MessageBody",
    "MessageRequest",
    "ModelInfo",
    "ModelPage",
    "ModelQuery",
    "TokenCount",
    "event",
    "page_of",
    "parse_count",
    "parse_message",
    "shaped",
]
