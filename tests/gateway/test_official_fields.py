"""Whatever the official client can ask is known here: done, or refused by name, and never passed over in silence."""

from __future__ import annotations

from typing import Any

import msgspec
import ollama._types as ollamas
import pytest
from anthropic.types import OutputConfigParam, ToolParam, message_count_tokens_params, message_create_params
from anthropic.types.beta import BetaOutputConfigParam, BetaSystemMessageParam, BetaToolParam
from anthropic.types.beta import message_create_params as beta_create_params
from openai import BadRequestError
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    file_create_params,
    file_list_params,
    upload_complete_params,
    upload_create_params,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat import completion_list_params as chat_list_params
from openai.types.chat import completion_update_params as chat_update_params
from openai.types.conversations import (
    conversation_create_params,
    conversation_update_params,
    item_create_params,
    item_list_params,
)
from openai.types.responses import (
    input_item_list_params,
    input_token_count_params,
    response_compact_params,
    response_create_params,
    response_retrieve_params,
    responses_client_event_param,
)

from gateway import openai
from gateway.anthropic.requests import CountRequest as AnthropicCount
from gateway.anthropic.requests import Message as AnthropicMessage
from gateway.anthropic.requests import MessageRequest, OutputConfig
from gateway.anthropic.requests import Tool as AnthropicTool
from gateway.api.stored import RetrieveQuery
from gateway.chats.shapes import ChatChange, ChatQuery
from gateway.conversations.shapes import Addition, Change, Creation, Including
from gateway.ollama.requests import ChatRequest as OllamaChat
from gateway.ollama.requests import GenerateRequest
from gateway.ollama.vectors import EmbeddingsRequest, EmbedRequest
from gateway.openai.batches import BatchRequest
from gateway.openai.files import FileQuery, FileUpload, UploadCompletion, UploadRequest
from gateway.openai.vectors import EmbeddingRequest
from gateway.responses.compaction import CompactRequest
from gateway.responses.requests import CountRequest, ResponseRequest
from gateway.responses.shapes import ItemsQuery
from gateway.sockets.events import ClientEvent
from tests.gateway.responding import answered

HEADERS = {"user_profile_id", "workspace_id"}
"""Of Anthropic's parameters, those that its client sends as headers."""
OF_NO_CONSEQUENCE = {"betas", "billing_policy", "eager_input_streaming", "fallback_credit_token", "fallbacks"}
"""Of Anthropic's: who pays for what is refused there, and by whom that is answered; when arguments are sent."""


def fields(*structs: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name.removesuffix("[]") for struct in structs for field in msgspec.structs.fields(struct)}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat_params.CompletionCreateParamsBase, fields(openai.ChatRequest)),
        (chat_params.CompletionCreateParamsStreaming, fields(openai.ChatRequest)),
        (chat_list_params.CompletionListParams, fields(ChatQuery)),
        (chat_update_params.CompletionUpdateParams, fields(ChatChange)),
        (completion_create_params.CompletionCreateParamsBase, fields(openai.CompletionRequest)),
        (completion_create_params.CompletionCreateParamsStreaming, fields(openai.CompletionRequest)),
        (embedding_create_params.EmbeddingCreateParams, fields(EmbeddingRequest)),
        (response_create_params.ResponseCreateParamsBase, fields(ResponseRequest)),
        (response_create_params.ResponseCreateParamsStreaming, fields(ResponseRequest)),
        (responses_client_event_param.ResponseCreate, fields(ResponseRequest, ClientEvent)),
        (response_compact_params.ResponseCompactParams, fields(CompactRequest)),
        (input_token_count_params.InputTokenCountParams, fields(CountRequest)),
        (response_retrieve_params.ResponseRetrieveParamsBase, fields(RetrieveQuery)),
        (input_item_list_params.InputItemListParams, fields(ItemsQuery)),
        (file_create_params.FileCreateParams, fields(FileUpload)),
        (file_list_params.FileListParams, fields(FileQuery)),
        (upload_create_params.UploadCreateParams, fields(UploadRequest)),
        (upload_complete_params.UploadCompleteParams, fields(UploadCompletion)),
        (batch_create_params.BatchCreateParams, fields(BatchRequest)),
        (conversation_create_params.ConversationCreateParams, fields(Creation)),
        (conversation_update_params.ConversationUpdateParams, fields(Change)),
        (item_create_params.ItemCreateParams, fields(Addition, Including)),
        (item_list_params.ItemListParams, fields(ItemsQuery)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_field_of_a_request_is_known(theirs: Any, ours: set[str]):
    asked = {name for each in theirs.__mro__ for name in getattr(each, "__annotations__", {})}
    assert asked
    assert asked - ours == set()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (message_create_params.MessageCreateParamsStreaming, fields(MessageRequest)),
        (beta_create_params.MessageCreateParamsStreaming, fields(MessageRequest)),
        (message_count_tokens_params.MessageCountTokensParams, fields(AnthropicCount)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_so_is_every_field_of_anthropics_client(theirs: Any, ours: set[str]):
    asked = {name for each in theirs.__mro__ for name in getattr(each, "__annotations__", {})}
    assert asked >= HEADERS
    assert asked - HEADERS - OF_NO_CONSEQUENCE - ours == set()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (ToolParam, fields(AnthropicTool)),
        (BetaToolParam, fields(AnthropicTool)),
        (OutputConfigParam, fields(OutputConfig)),
        (BetaOutputConfigParam, fields(OutputConfig)),
        (BetaSystemMessageParam, fields(AnthropicMessage)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_so_is_every_field_of_its_tools_and_of_what_is_said(theirs: Any, ours: set[str]):
    assert set(theirs.__annotations__) - OF_NO_CONSEQUENCE - ours == set()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (ollamas.ChatRequest, fields(OllamaChat)),
        (ollamas.GenerateRequest, fields(GenerateRequest)),
        (ollamas.EmbedRequest, fields(EmbedRequest)),
        (ollamas.EmbeddingsRequest, fields(EmbeddingsRequest)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_so_is_every_field_of_ollamas_client(theirs: Any, ours: set[str]):
    assert set(theirs.model_fields) - ours == set()


async def test_what_an_answer_is_asked_to_include_is_known_wherever_it_may_be_asked(front):
    response = await answered(front)
    responses = front.client.responses
    known = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    assert (await responses.retrieve(response.id, include=known)).id == response.id
    assert len((await responses.input_items.list(response.id, include=known)).data) == 1
    for asked in (responses.retrieve, responses.input_items.list):
        with pytest.raises(BadRequestError) as refused:
            await asked(response.id, include=["something"])
        assert refused.value.code == "invalid_value"
