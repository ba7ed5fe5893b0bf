"""Requests: bytes to typed Structs. What they ask of the sampler is in ``choosing``.

Unknown fields are tolerated, as newer clients send them; a known field of a wrong type or out of range is ``Malformed``
and named by its path. null means the default, as it does at OpenAI. What this server cannot do is refused by name.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta
from msgspec.structs import astuple

from gateway.openai.decoding import decoded
from gateway.openai.extras import Extras, Unserved, check_extras, refused
from gateway.openai.failures import Malformed
from gateway.openai.grammars import Choices, asked_grammar
from gateway.openai.messages import Message, TextPart, check_message, check_text
from gateway.openai.tools import Tooling, tooling

MAX_CHOICES = 1024
"""Choices of one request, ``n`` times its prompts."""
MAX_STOPS = 64
"""OpenAI takes four; an editor that completes code sends all that could begin something else."""
MAX_BIASES = 1024
"""vLLM's. Each is added at every step, and those of a whole vocabulary hold up everybody's."""

Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Named = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Named], Meta(max_length=16)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=512)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage``: one more chunk at the end, with the usage and no choices. ``include_obfuscation``: the lengths
    of pieces do not tell those of tokens to whoever sees the packets pass."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PenstockOptions(msgspec.Struct, frozen=True):
    """Ours. ``receipt``: the answer says what it cost and where its time went."""

    receipt: bool | None = None


class Generation(Extras, frozen=True, kw_only=True):
    """What both kinds of completion take. The second half is vLLM's, for its clients."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    """Which one it gets is its policy's word; the answer says it."""
    user: Named | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    metadata: Metadata | None = None
    """These three are of no consequence here; they are in the ledger's row."""

    penstock: PenstockOptions | None = None

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """SGLang's name of the same."""
    ignore_eos: bool | None = None
    cache_salt: CacheSalt | None = None
    """What is kept of prompts and answers is found again by requests that say the same, and by no others of the
    tenant."""
    add_special_tokens: bool | None = None
    """Those that the tokenizer puts around a text; for a completion they are there unless this is false."""
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    """These two are SGLang's."""
    response_format: dict[str, Any] | None = None
    """OpenAI's, of chats alone there."""
    include_reasoning: bool | None = None
    """Whether what a model thinks is told; it is counted all the same."""

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As in ``Sampling``."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def keeps_stop(self) -> bool:
        """The stop string that ends a text is told as well, and so is the token."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    @property
    def includes_usage(self) -> bool:
        """The stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def obfuscates(self) -> bool:
        """The pieces of the stream are padded."""
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)


class Prediction(msgspec.Struct, frozen=True):
    """What much of the answer is expected to be."""

    content: str | list[TextPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.said for part in self.content)


class ChatRequest(Generation, frozen=True, kw_only=True, dict=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    """These two are what tools were before."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """These two are told to the chat template."""
    prediction: Prediction | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Prefixes are kept for every tenant anyway, as long as there is room."""
    store: bool | None = None
    """The answer is kept, and can be asked for again; null is false."""
    web_search_options: Any = None
    moderation: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    """For the template's own switches (vLLM's and SGLang's name)."""
    chat_template: str | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    """Of vLLM's, these would make another prompt or answer of it."""
    enable_thinking: bool | None = None
    """Whether it reasons before it answers, however hard (DashScope's name)."""

    @property
    def asked_tokens(self) -> int | None:
        """Ceiling on the answer's tokens; None: as many as fit. The newer of the two names wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def tooling(self) -> Tooling | None:
        """Its tools; None where nothing may be called. Raises Malformed."""
        if not (self.tools or self.tool_choice or self.functions or self.function_call):
            return None
        return self._tooling

    @cached_property
    def _tooling(self) -> Tooling | None:
        # There may be thousands: they are looked through once, for a long body beside the event loop.
        return tooling(self.tools, self.tool_choice, self.parallel_tool_calls, self.functions, self.function_call)

    @property
    def template_switches(self) -> dict[str, Any]:
        """What its chat template is told beside the conversation. Each family has its own word for whether to think."""
        effort, thinks = self.reasoning_effort, self.enable_thinking
        if effort is None and thinks is None and self.verbosity is None:
            return self.chat_template_kwargs or {}
        switches: dict[str, Any] = {}
        if thinks is None and effort is not None:
            thinks = effort != "none"
        if thinks is not None:
            switches = {"enable_thinking": thinks, "thinking": thinks}
        if thinks and effort not in (None, "none"):
            switches["reasoning_effort"] = effort
        if self.verbosity is not None:
            switches["verbosity"] = self.verbosity
        return switches | (self.chat_template_kwargs or {})

    @property
    def num_logprobs(self) -> int | None:
        """As in ``Sampling``."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    """None: a text is written from its beginning."""
    max_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """0 with ``echo``: the prompt alone, for its log-probabilities."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """OpenAI stops at 5; 20 is what the chat form gives."""
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    """So many are computed, and those that are likeliest by the token are given."""
    suffix: str | None = None
    """What follows the hole that is to be filled in, for models that were trained to."""
    messages: Unserved = None
    """A chat's, which would be passed over, and a text of nothing be written instead."""

    @property
    def num_sequences(self) -> int:
        """Answers to each prompt that are computed."""
        return max(self.best_of or 1, self.num_choices)

    @property
    def num_logprobs(self) -> int | None:
        """As in ``Sampling``; the best are chosen by them."""
        return 0 if self.logprobs is None and self.chooses else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As in ``Sampling``."""
        return self.logprobs if self.echo else None

    @property
    def chooses(self) -> bool:
        """Not all of them are given."""
        return self.num_sequences > self.num_choices

    @property
    def texts(self) -> list[str]:
        """The prompts, when they are text."""
        if self.prompt is None:
            return []
        if isinstance(self.prompt, str):
            return [self.prompt]
        return cast(list[str], self.prompt) if isinstance(self.prompt[0], str) else []

    @property
    def token_ids(self) -> list[list[int]]:
        """The prompts, when they are token ids."""
        if self.prompt is None or self.texts:
            return []
        prompts = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        return cast(list[list[int]], prompts)


_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """The request in ``body``. Raises Malformed."""
    return check_chat(decoded(_chat, body, _least_strings))


def _least_strings(call: ChatRequest) -> int:
    """Of the bodies that ask for this: most have no more than a key for each field, the model's name, and four to each
    message."""
    num_fields = len(call.__struct_fields__) - astuple(call).count(None)
    num_texts = [type(message.content) for message in call.messages].count(str)
    return num_fields + 1 + (call.stream_options is not None) + 2 * len(call.messages) + 2 * num_texts


def check_chat(call: ChatRequest) -> ChatRequest:
    """The same, if it can be served; also of a chat that another dialect means. Raises Malformed."""
    _check(call)
    if call.top_logprobs and not call.logprobs:
        raise Malformed("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    if call.modalities is not None and call.modalities != ["text"]:
        raise refused("modalities", "only ['text'] is")
    if call.audio is not None:
        raise refused("audio")
    if call.web_search_options is not None:
        raise refused("web_search_options")
    if call.moderation is not None:
        raise refused("moderation")
    if call.chat_template:
        raise refused("chat_template", "the model's own is used")
    if call.continue_final_message:
        raise refused("continue_final_message", "an answer is a turn of its own")
    if call.echo:
        raise refused("echo", "an answer is a turn of its own")
    if call.add_special_tokens:
        raise refused("add_special_tokens", "the template writes those that the model wants")
    call.tooling()
    for i, message in enumerate(call.messages):
        if not message.is_plain:
            check_message(message, f"messages[{i}]")
        elif "\0" in message.text:
            check_text(message.text, f"messages[{i}].content")
    return call


def parse_completion(body: bytes) -> CompletionRequest:
    """The request in ``body``. Raises Malformed."""
    call = decoded(_completion, body)
    _check(call)
    if call.messages is not None:
        raise refused("messages", "of a completion it is 'prompt'; /v1/chat/completions takes messages")
    if isinstance(call.prompt, list):
        kinds = {type(item) for item in call.prompt}
        if len(kinds) > 1:
            raise Malformed("Invalid 'prompt': strings, token ids and lists of token ids cannot be mixed", "prompt")
        if kinds == {list} and not all(call.prompt):
            raise Malformed("Invalid 'prompt': a list of token ids is empty", "prompt", "empty_array")
    for text in call.texts:
        check_text(text, "prompt")
    if call.suffix and not call.texts:
        raise Malformed("'suffix' needs a 'prompt' of text", "suffix")
    if call.suffix and call.echo:
        raise refused("echo", "not together with 'suffix'")
    if call.best_of is not None and call.best_of < call.num_choices:
        raise Malformed("'best_of' must be at least 'n'", "best_of")
    if call.chooses and call.stream:
        raise Malformed("'best_of' cannot be streamed, as the best one is known at the end", "best_of")
    if call.max_tokens == 0 and not call.echo:
        raise Malformed("'max_tokens' may be 0 only with 'echo'", "max_tokens", "integer_below_min_value")
    if (len(call.texts) or len(call.token_ids) or 1) * call.num_sequences > MAX_CHOICES:
        raise Malformed(f"'n' times the number of prompts may be {MAX_CHOICES} at most", "n")
    return call


def _check(call: ChatRequest | CompletionRequest) -> None:
    check_extras(call)
    if call.stream_options is not None and not call.stream:
        raise Malformed("'stream_options' is allowed only when 'stream' is true", "stream_options")
    max_tokens = call.asked_tokens if isinstance(call, ChatRequest) else call.max_tokens
    asked_grammar(call)
    if max_tokens is not None and (call.min_tokens or 0) > max_tokens:
        raise Malformed("'min_tokens' is larger than the number of tokens asked for", "min_tokens")
