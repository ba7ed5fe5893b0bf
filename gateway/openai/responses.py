"""Answers that are one JSON body."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from gateway.openai.receipts import PenstockExtras
from gateway.parsers import Call, Said
from policies.terms import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    """What was predicted in vain is none of the completion here, and nobody pays for it."""
    drafted_tokens: int | UnsetType = UNSET
    """The engine's own guesses, where it made any: Penstock's, as is the next. No client asked for them, none pays."""
    accepted_tokens: int | UnsetType = UNSET


NO_DETAILS = CompletionTokensDetails()


class UsageBody(msgspec.Struct, frozen=True):
    """Tokens of the whole request; ``prompt_tokens`` includes the cached ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = NO_DETAILS

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        """``usage`` in OpenAI's shape."""
        details = NO_DETAILS
        if usage.num_reasoning_tokens or usage.num_predicted_tokens:
            details = CompletionTokensDetails(
                usage.num_reasoning_tokens, accepted_prediction_tokens=usage.num_predicted_tokens
            )
        if usage.num_drafted_tokens:
            details = msgspec.structs.replace(
                details,
                drafted_tokens=usage.num_drafted_tokens,
                accepted_tokens=usage.num_accepted_tokens,
            )
        return cls(
            prompt_tokens=usage.num_prompt_tokens,
            completion_tokens=usage.num_completion_tokens,
            total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(usage.num_cached_tokens),
            completion_tokens_details=details,
        )


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens; ``bytes`` are its UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """The chat form's entry for one token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The chat form: one entry a token of the content."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The older form: parallel lists, one item a token; ``text_offset`` in characters from the start of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt, which follows nothing."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


Logprobs = ChatLogprobs | CompletionLogprobs


class CalledFunction(msgspec.Struct, frozen=True):
    """``arguments`` is JSON text."""

    name: str
    arguments: str


class CalledCustom(msgspec.Struct, frozen=True):
    """``input`` is text."""

    name: str
    input: str


class AnswerCall(msgspec.Struct, frozen=True):
    """One call in an answer; it has the field that its type names."""

    id: str
    function: CalledFunction | UnsetType = UNSET
    type: str = "function"
    custom: CalledCustom | UnsetType = UNSET

    @classmethod
    def of(cls, call: Call) -> AnswerCall:
        """``call`` in OpenAI's shape."""
        if call.is_custom:
            return cls(call.id, type="custom", custom=CalledCustom(call.name, call.arguments))
        return cls(call.id, CalledFunction(call.name, call.arguments))


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's answer; without text of its own where it only calls."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    """What was thought before; DeepSeek's name."""
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    """What ``tool_calls`` was before."""

    @classmethod
    def of(cls, said: Said, is_legacy: bool = False, tells_reasoning: bool = True) -> AnswerMessage:
        """``said`` in OpenAI's shape, or in the older one with ``function_call``."""
        reasoning = said.reasoning or UNSET if tells_reasoning else UNSET
        if is_legacy and said.calls:
            function = CalledFunction(said.calls[0].name, said.calls[0].arguments)
            return cls(said.content, reasoning_content=reasoning, function_call=function)
        if not said.calls:
            content = said.content if said.refusal else said.content or ""
            return cls(content, refusal=said.refusal, reasoning_content=reasoning)
        calls = [AnswerCall.of(call) for call in said.calls]
        return cls(said.content, reasoning_content=reasoning, tool_calls=calls)


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    service_tier: str
    """The tier that served it."""
    system_fingerprint: str
    penstock: PenstockExtras | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a text completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    system_fingerprint: str
    penstock: PenstockExtras | UnsetType = UNSET


class ModelExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What OpenAI's models have not: an unloaded one is loaded when it is asked for."""

    state: str


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served here; ``created`` in Unix seconds."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    """The id again: where its files are is nobody's business. vLLM's benchmark takes it for the tokenizer's name."""
    max_model_len: int | UnsetType = UNSET
    """Of prompt and answer together, where it is known: not of one that is not loaded. vLLM's and SGLang's name."""
    penstock: ModelExtras


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models that are served here."""

    object: str = "list"
    data: list[ModelBody]
