"""The addresses of inference, as /openapi.json describes them."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway import anthropic, ollama, openai
from gateway.api import chats, conversations, stored, uploads
from gateway.chats.shapes import (
    ChatChange,
    ChatMessageQuery,
    ChatQuery,
    DeletedChat,
    KeptCompletion,
    KeptList,
    KeptMessages,
)
from gateway.conversations.shapes import (
    Addition,
    Change,
    Conversation,
    Creation,
    DeletedConversation,
    Including,
)
from gateway.responses import compaction, requests, shapes
from gateway.responses.items import AnyItem

JSON = "application/json"


class Inference(msgspec.Struct, frozen=True):
    """One address of /v1. An answer of ``bytes`` is what a file holds; None: there is none, as
    it is a socket, or is always refused."""

    method: str
    path: str
    name: str
    summary: str
    answer: Any
    body: Any = None
    streams: bool = False
    """With ``stream`` the answer is a stream of events."""
    query: Any = None
    content_type: str = JSON
    """Of the body."""
    refusal: Any = openai.ErrorBody
    stream_type: str = "text/event-stream"
    is_socket: bool = False
    """A WebSocket is opened there."""


INFERENCE = (
    Inference(
        "POST",
        "/v1/chat/completions",
        "chat_completions",
        "Answer a conversation",
        openai.ChatCompletion,
        openai.ChatRequest,
        True,
    ),
    Inference("GET", chats.ROOT, "kept_chats", "List the chat completions that were kept", KeptList, query=ChatQuery),
    Inference("GET", chats.PATH, "kept_chat", "Read a chat completion that was kept", KeptCompletion),
    Inference("POST", chats.PATH, "kept_chat_change", "Change the metadata of a kept one", KeptCompletion, ChatChange),
    Inference("DELETE", chats.PATH, "kept_chat_deletion", "Delete a chat completion that was kept", DeletedChat),
    Inference(
        "GET",
        f"{chats.PATH}/messages",
        "kept_chat_messages",
        "List the messages that a kept chat was asked with",
        KeptMessages,
        query=ChatMessageQuery,
    ),
    Inference(
        "POST",
        "/v1/completions",
        "completions",
        "Go on with a text",
        openai.Completion,
        openai.CompletionRequest,
        True,
    ),
    Inference(
        "POST",
        "/v1/messages",
        "messages",
        "Answer a conversation, in Anthropic's shapes",
        anthropic.MessageBody,
        anthropic.MessageRequest,
        True,
        refusal=anthropic.ErrorBody,
    ),
    Inference(
        "POST",
        "/v1/messages/count_tokens",
        "messages_count_tokens",
        "Count the tokens of a conversation, in Anthropic's shapes",
        anthropic.TokenCount,
        anthropic.CountRequest,
        refusal=anthropic.ErrorBody,
    ),
    Inference(
        "POST",
        "/v1/responses",
        "response_creation",
        "Answer a conversation whose state may be kept here",
        shapes.ResponseBody,
        requests.ResponseRequest,
        True,
    ),
    Inference(
        "GET",
        "/v1/responses",
        "responses_socket",
        "Ask for responses over a WebSocket: `response.create` events in, the events of streams out, each a message",
        None,
        is_socket=True,
    ),
    Inference(
        "POST",
        "/v1/responses/input_tokens",
        "response_input_tokens",
        "Count the tokens of a prompt",
        shapes.InputTokens,
        requests.CountRequest,
    ),
    Inference(
        "POST",
        "/v1/responses/compact",
        "response_compaction",
        "Give a conversation as its user's messages and a summary",
        compaction.CompactedBody,
        compaction.CompactRequest,
    ),
    Inference(
        "GET",
        stored.PATH,
        "response",
        "Read a response, or its events from any of them on",
        shapes.ResponseBody,
        streams=True,
        query=stored.RetrieveQuery,
    ),
    Inference("DELETE", stored.PATH, "response_deletion", "Delete a response", shapes.DeletedResponse),
    Inference(
        "POST",
        f"{stored.PATH}/cancel",
        "response_cancellation",
        "Break off a response in the background",
        shapes.ResponseBody,
    ),
    Inference(
        "GET",
        f"{stored.PATH}/input_items",
        "response_input_items",
        "List what a response was given",
        shapes.ItemList,
        query=shapes.ItemsQuery,
    ),
    Inference("POST", conversations.ROOT, "conversation_creation", "Begin a conversation", Conversation, Creation),
    Inference("GET", conversations.PATH, "conversation", "Read a conversation, apart from its items", Conversation),
    Inference(
        "POST", conversations.PATH, "conversation_change", "Change a conversation's metadata", Conversation, Change
    ),
    Inference("DELETE", conversations.PATH, "conversation_deletion", "Delete a conversation", DeletedConversation),
    Inference(
        "POST",
        conversations.ITEMS,
        "conversation_addition",
        "Add items to a conversation",
        shapes.ItemList,
        Addition,
        query=Including,
    ),
    Inference(
        "GET",
        conversations.ITEMS,
        "conversation_items",
        "List a conversation's items",
        shapes.ItemList,
        query=shapes.ItemsQuery,
    ),
    Inference("GET", conversations.ITEM, "conversation_item", "Read an item", AnyItem, query=Including),
    Inference("DELETE", conversations.ITEM, "conversation_item_deletion", "Delete an item", Conversation),
    Inference(
        "POST",
        "/v1/embeddings",
        "embeddings",
        "Give vectors of texts",
        openai.EmbeddingList,
        openai.EmbeddingRequest,
    ),
    *(
        Inference("POST", path, name, "Order documents by relevance", openai.Ranking, openai.RerankRequest)
        for path, name in (("/v1/rerank", "rerank"), ("/v2/rerank", "rerank_v2"), ("/rerank", "rerank_short"))
    ),
    *(
        Inference("POST", path, name, "Score pairs of texts", openai.ScoreList, openai.ScoreRequest)
        for path, name in (("/v1/score", "score"), ("/score", "score_short"))
    ),
    Inference(
        "POST",
        "/tokenize",
        "tokenize",
        "Give a text, or a conversation, as token ids",
        openai.TokenizeBody,
        openai.TokenizeRequest,
    ),
    Inference(
        "POST",
        "/detokenize",
        "detokenize",
        "Give token ids as a text",
        openai.DetokenizeBody,
        openai.DetokenizeRequest,
    ),
    Inference(
        "POST",
        "/api/chat",
        "ollama_chat",
        "Answer a conversation, in Ollama's shapes",
        ollama.ChatBody,
        ollama.ChatRequest,
        True,
        refusal=ollama.ErrorBody,
        stream_type="application/x-ndjson",
    ),
    Inference(
        "POST",
        "/api/generate",
        "ollama_generate",
        "Answer a prompt, or go on with it as it stands, in Ollama's shapes",
        ollama.GenerateBody,
        ollama.GenerateRequest,
        True,
        refusal=ollama.ErrorBody,
        stream_type="application/x-ndjson",
    ),
    Inference(
        "POST",
        "/api/embed",
        "ollama_embed",
        "Give vectors of texts, in Ollama's shapes",
        ollama.EmbedBody,
        ollama.EmbedRequest,
        refusal=ollama.ErrorBody,
    ),
    Inference(
        "POST",
        "/api/embeddings",
        "ollama_embeddings",
        "Give the vector of a text, in Ollama's shapes",
        ollama.EmbeddingsBody,
        ollama.EmbeddingsRequest,
        refusal=ollama.ErrorBody,
    ),
    Inference(
        "POST",
        "/api/show",
        "ollama_show",
        "Describe a model, in Ollama's shapes",
        ollama.ShowBody,
        ollama.ShowRequest,
        refusal=ollama.ErrorBody,
    ),
    Inference(
        "GET",
        "/api/tags",
        "ollama_tags",
        "List the models that the key may use, in Ollama's shapes",
        ollama.ModelList,
        refusal=ollama.ErrorBody,
    ),
    Inference(
        "GET",
        "/api/ps",
        "ollama_ps",
        "List those of them that are loaded, in Ollama's shapes",
        ollama.RunningList,
        refusal=ollama.ErrorBody,
    ),
    Inference(
        "GET",
        "/api/version",
        "ollama_version",
        "Which of Ollama's APIs is spoken",
        ollama.VersionBody,
        refusal=ollama.ErrorBody,
    ),
    Inference(
        "POST",
        "/v1/files",
        "file_upload",
        "Upload a file",
        openai.FileBody,
        openai.FileUpload,
        content_type="multipart/form-data",
    ),
    Inference("GET", "/v1/files", "files", "List files", openai.FileList, query=openai.FileQuery),
    Inference("GET", "/v1/files/{file}", "file", "Read what is known of a file", openai.FileBody),
    Inference("GET", "/v1/files/{file}/content", "file_content", "Read a file, or a range of it", bytes),
    Inference("DELETE", "/v1/files/{file}", "file_deletion", "Delete a file", openai.FileDeleted),
    Inference(
        "POST", uploads.ROOT, "upload_creation", "Begin a file in parts", openai.UploadBody, openai.UploadRequest
    ),
    Inference(
        "POST",
        f"{uploads.PATH}/parts",
        "upload_part",
        "Upload one part of a file",
        openai.UploadPartBody,
        openai.UploadPartForm,
        content_type="multipart/form-data",
    ),
    Inference(
        "POST",
        f"{uploads.PATH}/complete",
        "upload_completion",
        "Make a file of its parts",
        openai.UploadBody,
        openai.UploadCompletion,
    ),
    Inference("POST", f"{uploads.PATH}/cancel", "upload_cancellation", "Give up a file in parts", openai.UploadBody),
    Inference("POST", "/v1/batches", "batch_creation", "Begin a batch", openai.BatchBody, openai.BatchRequest),
    Inference("GET", "/v1/batches", "batches", "List batches", openai.BatchList, query=openai.BatchQuery),
    Inference("GET", "/v1/batches/{batch}", "batch", "Read how far a batch has come", openai.BatchBody),
    Inference("POST", "/v1/batches/{batch}/cancel", "batch_cancellation", "Cancel a batch", openai.BatchBody),
    Inference("GET", "/v1/models", "models", "List the models that the key may use", openai.ModelList),
    Inference("GET", "/v1/models/{model}", "model", "Read one model", openai.ModelBody),
    Inference("DELETE", "/v1/models/{model}", "model_deletion", "Refused: models are the operator's", None),
)
