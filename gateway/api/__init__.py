"""/v1 and the health of the house: a file for each endpoint. ``chat`` and ``answer`` are the whole journey, the others
its variations."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway import anthropic
from gateway import ollama as ollama_shapes
from gateway.api import (
    batches,
    chat,
    chats,
    compaction,
    completions,
    conversations,
    files,
    health,
    messages,
    models,
    ollama,
    responses,
    sockets,
    stored,
    tokens,
    uploads,
    vectors,
)
from gateway.entrance import Endpoint
from gateway.failures import Shape
from gateway.house import GATEWAY


def endpoints() -> dict[str, Endpoint]:
    """Those of inference, which get nearly all requests, by path; all are for POST."""
    return {
        "/v1/chat/completions": chat.complete,
        "/v1/completions": completions.complete,
        "/v1/messages": messages.create,
        "/v1/messages/count_tokens": messages.count,
        "/v1/responses": responses.create,
        "/v1/responses/input_tokens": responses.count,
        "/v1/responses/compact": compaction.compact,
        "/v1/embeddings": vectors.embed,
        # Jina's and Cohere's addresses, and those that vLLM has besides.
        **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), vectors.rerank),
        **dict.fromkeys(("/v1/score", "/score"), vectors.score),
        # vLLM's.
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
        "/api/chat": ollama.chat,
        "/api/generate": ollama.generate,
        "/api/embed": ollama.embed,
        "/api/embeddings": ollama.embeddings,
        "/api/show": ollama.show,
        **dict.fromkeys(ollama.ABSENT, ollama.absent),
    }


def shapes() -> dict[str, Shape]:
    """Of failures, where they are not OpenAI's, by how an address begins."""
    return {"/v1/messages": anthropic.shaped, "/api/": ollama_shapes.shaped}


def routes() -> list[web.RouteDef]:
    """Everything that is served here."""
    return [
        *(web.post(path, _routed(endpoint)) for path, endpoint in endpoints().items()),
        web.get("/v1/responses", sockets.connect),
        *stored.routes(),
        *chats.routes(),
        *conversations.routes(),
        web.get("/v1/models", models.every),
        # A hub id has a slash in it.
        web.get("/v1/models/{model:.+}", models.one),
        web.delete("/v1/models/{model:.+}", models.delete),
        web.post("/v1/files", files.upload),
        web.get("/v1/files", files.every),
        web.get("/v1/files/{file}", files.one),
        web.get("/v1/files/{file}/content", files.content),
        web.delete("/v1/files/{file}", files.delete),
        *uploads.routes(),
        web.get("/api/tags", ollama.tags),
        web.get("/api/ps", ollama.running),
        web.get("/api/version", ollama.version),
        web.delete(ollama.ABSENT_DELETE, _routed(ollama.absent)),
        web.get("/", ollama.alive),
        web.post("/v1/batches", batches.create),
        web.get("/v1/batches", batches.every),
        web.get("/v1/batches/{batch}", batches.one),
        web.post("/v1/batches/{batch}/cancel", batches.cancel),
        web.get("/healthz", health.alive),
        # The other is what vLLM, SGLang and llama.cpp call it.
        *(web.get(path, health.ready) for path in ("/readyz", "/health")),
    ]


def _routed(endpoint: Endpoint) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await endpoint(request.app[GATEWAY], request)

    return handler
