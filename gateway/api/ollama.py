"""/api: Ollama's own endpoints, on the way that chats and completions go.

Most of its clients have no key to send. Where the environment of the gateway has ``PENSTOCK_OLLAMA_KEY``, requests of
programs on the same machine that bring none are asked with that one; ``Auth.local_caller_of`` says which those are.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from gateway import head, ollama, openai
from gateway.api import chat as chats
from gateway.api import completions, vectors
from gateway.api.answer import give
from gateway.api.early import patient
from gateway.auth import Caller
from gateway.bodies import parsed, taken_body_of
from gateway.dispatch import ServedModel
from gateway.errors import ModelNotFound, NotServedHere
from gateway.head import HEAD
from gateway.house import GATEWAY, Gateway
from gateway.ollama.responses import ChatBody, GenerateBody, Message, instant
from gateway.reply.events import OUTLET, EventStream

LINES = "application/x-ndjson"
ABSENT = ("/api/pull", "/api/push", "/api/create", "/api/copy")
ABSENT_DELETE = "/api/delete"


async def chat(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.local_caller_of(request)
    call = await parsed(ollama.parse_chat, await taken_body_of(gw, request, of_any_type=True))
    if isinstance(call, ollama.Nothing):
        model, done_reason = await _loaded(gw, caller, call)
        message = Message(content="")
        return _whole(ChatBody(model=model, created_at=_now(), message=message, done=True, done_reason=done_reason))
    caller.check(call.model, "chat.completions")
    return await _patiently(gw, request, call, _chat(gw, request, caller, call, ollama.ChatAnswer), is_chat=True)


async def generate(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.local_caller_of(request)
    call = await parsed(ollama.parse_generate, await taken_body_of(gw, request, of_any_type=True))
    if isinstance(call, ollama.Nothing):
        model, done_reason = await _loaded(gw, caller, call)
        return _whole(GenerateBody(model=model, created_at=_now(), response="", done=True, done_reason=done_reason))
    if isinstance(call, openai.ChatRequest):
        caller.check(call.model, "chat.completions")
        return await _patiently(gw, request, call, _chat(gw, request, caller, call, ollama.GenerateAnswer))
    caller.check(call.model, "completions")
    return await _patiently(gw, request, call, _raw(gw, request, caller, call))


def _patiently(
    gw: Gateway,
    request: web.Request,
    call: openai.ChatRequest | openai.CompletionRequest,
    answer: Awaitable[web.StreamResponse],
    is_chat: bool = False,
) -> Awaitable[web.StreamResponse]:
    if call.stream:
        silence = ollama.silence(call, is_chat)
        request[OUTLET] = EventStream(request, gw.settings.server, gw.clock, LINES, silence)
    return patient(gw, request, call, answer, ollama.line)


async def _chat(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.ChatRequest,
    shaped: type[ollama.ChatAnswer | ollama.GenerateAnswer],
) -> web.StreamResponse:
    shape = partial(shaped, started_at=request[HEAD].started_at)
    answer, order = await chats.prepared(gw, request, caller, call, shape)
    return await give(gw, request, caller, answer, order)


async def _raw(gw: Gateway, request: web.Request, caller: Caller, call: openai.CompletionRequest) -> web.StreamResponse:
    shape = partial(ollama.RawAnswer, started_at=request[HEAD].started_at)
    answer, order = await completions.prepared(gw, request, caller, call, shape)
    return await give(gw, request, caller, answer, order)


async def embed(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.local_caller_of(request)
    call = await parsed(ollama.parse_embed, await taken_body_of(gw, request, of_any_type=True))
    caller.check(call.model, "embeddings")
    shape = partial(ollama.EmbedAnswer, started_at=request[HEAD].started_at)
    return await vectors.embedded(gw, request, caller, call, shape)


async def embeddings(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.local_caller_of(request)
    call = await parsed(ollama.parse_embeddings, await taken_body_of(gw, request, of_any_type=True))
    caller.check(call.model, "embeddings")
    return await vectors.embedded(gw, request, caller, call, ollama.EmbeddingsAnswer)


async def show(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.local_caller_of(request)
    asked = ollama.parse_show(await taken_body_of(gw, request, of_any_type=True))
    name = ollama.name_of(asked.model or asked.name or "")
    caller.check(name, "models")
    model = next((model for model in _served(gw, caller) if model.name == name), None)
    if model is None:
        raise ModelNotFound.named(name)
    is_elsewhere = gw.upstreams.of(name) is not None
    text = None if is_elsewhere else gw.dispatch.text(name)
    facts = None if is_elsewhere else gw.dispatch.ready(name)
    info: dict[str, Any] = {"general.architecture": "penstock"}
    if facts is not None:
        info |= {"penstock.context_length": facts.max_model_tokens, "penstock.vocab_size": facts.vocab_size}
    template = "" if text is None else text.template
    writes = facts is None or facts.writes
    capabilities = ["completion" if writes else "embedding", *(["tools"] if "tools" in template else [])]
    if "reasoning_content" in template or "enable_thinking" in template:
        capabilities.append("thinking")
    body = ollama.ShowBody(
        modified_at=instant(model.created),
        template=template,
        details=_details(gw, name),
        model_info=info,
        capabilities=capabilities,
    )
    return _whole(body)


async def absent(gw: Gateway, request: web.Request) -> web.StreamResponse:
    """What Ollama has and this server has not."""
    gw.auth.local_caller_of(request)
    raise NotServedHere(f"{request.path} is not served here: models are administered by `penstock pull` and /admin/v1")


async def tags(request: web.Request) -> web.StreamResponse:
    """The models that the key may use."""
    gw = request.app[GATEWAY]
    return head.Whole.of(ollama.ModelList([ollama.ModelTag(**_told(gw, model)) for model in _listed(gw, request)]))


async def running(request: web.Request) -> web.StreamResponse:
    """Those of them that are loaded."""
    gw = request.app[GATEWAY]
    listed = [
        ollama.RunningModel(**_told(gw, model), context_length=facts.max_model_tokens)
        for model in _listed(gw, request)
        if gw.upstreams.of(model.name) is None and (facts := gw.dispatch.ready(model.name)) is not None
    ]
    return head.Whole.of(ollama.RunningList(listed))


async def version(request: web.Request) -> web.StreamResponse:
    return head.Whole.of(ollama.VersionBody())


async def alive(request: web.Request) -> web.StreamResponse:
    """What its clients ask first."""
    return web.Response(text="Penstock is running")


async def _loaded(gw: Gateway, caller: Caller, asked: ollama.Nothing) -> ollama.Nothing:
    """It, when its model is there, if that is what it asks for. Whoever wants it to be gone is told so, and it stays:
    it is others' too, and the settings and the operator say when it goes."""
    caller.check(asked.model, "chat.completions")
    if gw.upstreams.of(asked.model) is None:
        gw.dispatch.text(asked.model)
        if asked.done_reason == "load" and gw.dispatch.ready(asked.model) is None:
            await gw.dispatch.loaded(asked.model, caller, None)
    return asked


def _whole(body: msgspec.Struct) -> web.StreamResponse:
    return head.Whole.of(body)


def _now() -> str:
    return instant(time.time())


def _served(gw: Gateway, caller: Caller) -> list[ServedModel]:
    served = gw.upstreams.models() + gw.dispatch.adapters()
    return [model for model in served if caller.policy.may_use(model.name)]


def _listed(gw: Gateway, request: web.Request) -> list[ServedModel]:
    caller = gw.auth.local_caller_of(request)
    caller.check_endpoint("models")
    return _served(gw, caller)


def _told(gw: Gateway, model: ServedModel) -> dict[str, Any]:
    """What both lists say of a model."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": instant(model.created),
        "digest": _digest(model.name),
        "details": _details(gw, model.name),
    }


def _details(gw: Gateway, name: str) -> ollama.Details:
    facts = None if gw.upstreams.of(name) is not None else gw.dispatch.ready(name)
    return ollama.Details(quantization_level="" if facts is None else facts.dtype)


def _digest(name: str) -> str:
    """Of the name alone: what files a model is made of is not told to those who use it."""
    return hashlib.sha256(name.encode()).hexdigest()
