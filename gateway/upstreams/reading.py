"""What an upstream says, read as pieces: words of each sequence, how each ended, and what was used."""

from __future__ import annotations

import secrets
import sys
from array import array
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.reply.told import is_entry
from gateway.upstreams import failures
from gateway.upstreams.asking import Asked
from policies.answers import Word
from policies.terms import FinishReason
from policies.upstreams.counting import Counts, estimated

MAX_CALLS = 1024
"""Of tools, in one answer."""
LENGTHS = frozenset(("length", "max_tokens", "model_length"))
"""What the end at a limit is called."""
FILTERED = "content_filter"
"""By everybody."""


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Custom(msgspec.Struct, frozen=True):
    name: str | None = None
    input: str | None = None


class _Call(msgspec.Struct, frozen=True):
    function: _Function | None = None
    custom: _Custom | None = None
    index: int | None = None
    id: str | None = None


class _Part(msgspec.Struct, frozen=True):
    """Mistral's reasoning models say their content so: "text", and "thinking" that has parts of its own."""

    text: str | None = None
    thinking: list[_Part] | str | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    """Of both forms."""

    content: list[msgspec.Raw] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class ToldUsage(msgspec.Struct, frozen=True):
    """As the upstream says it; None: it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def counts(self) -> Counts | None:
        """None: one of both is not said."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return Counts(self.prompt_tokens, self.completion_tokens)

    @property
    def of_prompt(self) -> ToldUsage:
        """Where there is no completion, and none is told on: vLLM and others say nothing but the total then, of a
        ranking."""
        num_tokens = self.prompt_tokens or self.total_tokens
        return ToldUsage(num_tokens, 0, num_tokens, self.prompt_tokens_details)

    @property
    def num_cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return min(max(0, (details and details.cached_tokens) or 0), max(0, self.prompt_tokens or 0))

    @property
    def num_reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        return min(max(0, (details and details.reasoning_tokens) or 0), max(0, self.completion_tokens or 0))


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


class _Embedding(msgspec.Struct, frozen=True):
    embedding: msgspec.Raw
    """Numbers, or base64: read one by one, since others have no turn while JSON is."""
    index: int | None = None


class _Embeddings(msgspec.Struct, frozen=True):
    data: list[_Embedding]
    usage: Any = None


class _Score(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float | None = None
    score: float | None = None


class _Ranking(msgspec.Struct, frozen=True):
    results: list[_Score] | None = None
    data: list[_Score] | None = None
    usage: Any = None


_chunk, _embeddings, _ranking = (msgspec.json.Decoder(shape).decode for shape in (_Chunk, _Embeddings, _Ranking))
_vector = msgspec.json.Decoder(list[float] | str).decode


class Reader:
    """One answer. ``read`` gives what a JSON text adds, ``ends`` how its sequences ended."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.usage: ToldUsage | None = None
        self.said = [""] * asked.num_sequences
        """The whole text of each, arguments and reasoning included."""
        self.is_done = False
        """It has said that it is."""
        self._ends: dict[int, FinishReason] = {}
        self._calls: list[dict[int, str]] = [{} for _ in range(asked.num_sequences)]
        """Of each, the ids by their numbers."""
        self._latest: list[dict[int, int]] = [{} for _ in range(asked.num_sequences)]
        """Of each, the numbers of calls by those that the upstream gives to several."""

    @property
    def is_whole(self) -> bool:
        """Every sequence has ended."""
        return self.is_done or len(self._ends) == self._asked.num_sequences

    def end_of(self, index: int) -> FinishReason:
        return self._ends.get(index, "stop")

    def read(self, text: bytes) -> list[tuple[int, list[Word]]]:
        """The words of each sequence that has some. Raises Trouble."""
        if text == b"[DONE]":
            self.is_done = True
            return []
        chunk = _decoded(_chunk, text)
        if chunk.error is not None:
            raise failures.of_event(chunk.error)
        told = _told(chunk.usage)
        if told is not None and (told.counts is not None or self.usage is None):  # some say {} once more at the end
            self.usage = told
        found = []
        for choice in chunk.choices or ():
            if not 0 <= choice.index < self._asked.num_sequences:
                raise failures.garbage(f"a choice number {choice.index}, which was not asked for")
            words = self._words(choice)
            if words and choice.index not in self._ends:
                self.said[choice.index] += "".join([word.text for word in words])
                found.append((choice.index, words))
            if choice.finish_reason:  # some say "" until there is one
                self._ends[choice.index] = _end_of(choice.finish_reason)
        return found

    def _words(self, choice: _Choice) -> list[Word]:
        message = choice.delta or choice.message or _Message()
        entries = [] if choice.logprobs is None else _entries(choice.logprobs)
        words: list[Word] = []
        said = message.content
        told_thought, told = _of_parts(said) if isinstance(said, list) else ("", said)
        if thought := message.reasoning_content or message.reasoning or told_thought:
            words += _divided("reasoning", thought, [])
        if content := choice.text or told:
            words += _divided("content", content, entries)
        elif entries:  # tokens without a text, such as the last one
            words += _divided("content", "", entries)
        if message.refusal:
            words += _divided("refusal", message.refusal, [])
        calls = message.tool_calls or []
        if message.function_call is not None:
            calls = [_Call(message.function_call, index=0)]
        for place, call in enumerate(calls):
            words += self._called(choice.index, place, call)
        return words

    def _called(self, index: int, place: int, call: _Call) -> list[Word]:
        known, function, custom = self._calls[index], call.function or _Function(), call.custom
        theirs = place if call.index is None else call.index
        number = self._latest[index].get(theirs, theirs)
        if call.id and function.name and known.get(number, call.id) != call.id:  # some count all of them 0
            number = self._latest[index][theirs] = len(known)
        words = []
        if number not in known:
            if number != len(known) or len(known) >= MAX_CALLS:
                raise failures.garbage(f"a call number {number} after {len(known)} calls")
            known[number] = call.id or f"call_{secrets.token_hex(12)}"
            if custom is None:
                words.append(Word("call", function.name or "", number, known[number]))
            else:
                words.append(Word("custom", custom.name or "", number, known[number]))
        if custom is not None:
            return words + (_divided("input", custom.input, [], number) if custom.input else [])
        arguments = function.arguments
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        return words + (_divided("arguments", arguments, [], number) if arguments else [])


def _of_parts(parts: list[_Part]) -> tuple[str, str]:
    """What was thought, and what is said."""
    thoughts = [
        each.thinking if isinstance(each.thinking, str) else "".join(part.text or "" for part in each.thinking)
        for each in parts
        if each.thinking
    ]
    return "".join(thoughts), "".join(each.text or "" for each in parts)


def _end_of(finish_reason: str) -> FinishReason:
    if finish_reason == FILTERED:
        return "content_filter"
    return "length" if finish_reason in LENGTHS else "stop"


def vectors_of(asked: Asked, text: bytes) -> tuple[list[bytes], ToldUsage | None]:
    """One for each sequence: f32, least byte first; a score is a vector of one number. Of a long text this is run on a
    thread. Raises Trouble."""
    found: dict[int, bytes] = {}
    if asked.kind == "rerank":
        ranking = _decoded(_ranking, text)
        for each in ranking.results or ranking.data or ():
            score = each.score if each.relevance_score is None else each.relevance_score
            found[each.index] = _floats([score or 0.0])
        usage = _told(ranking.usage)
    else:
        embeddings = _decoded(_embeddings, text)
        for place, one in enumerate(embeddings.data):
            vector = _decoded(_vector, bytes(one.embedding))
            raw = _floats(vector) if isinstance(vector, list) else _from_text(vector)
            found[place if one.index is None else one.index] = raw
        usage = _told(embeddings.usage)
    if set(found) != set(range(asked.num_sequences)):
        raise failures.garbage(f"{len(found)} answers where {asked.num_sequences} were asked for")
    return [found[index] for index in range(asked.num_sequences)], usage and usage.of_prompt


def _told(usage: Any) -> ToldUsage | None:
    """None: there is none, or one that cannot be read, for which no answer is given up."""
    try:
        return None if usage is None else msgspec.convert(usage, ToldUsage)
    except msgspec.ValidationError:
        return None


def _decoded(decode: Any, text: bytes) -> Any:
    try:
        return decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise failures.garbage(f"what it says cannot be read: {str(error)[:200]}") from None


def _divided(kind: Any, text: str, entries: Sequence[bytes], number: int = 0) -> list[Word]:
    """A text as so many words as it has tokens: as there are log-probabilities, else as are estimated, and one at
    least."""
    num_words = len(entries) or max(1, estimated(len(text.encode("utf-8", "replace"))))
    step = -(-len(text) // num_words)
    return [
        Word(kind, text[place * step : (place + 1) * step], number, logprob=entries[place] if entries else b"")
        for place in range(num_words)
    ]


def _entries(told: _Logprobs) -> list[bytes]:
    """One for each token, in the chat form; those that cannot be told on are left out with all others."""
    if told.content is not None:
        entries = [bytes(entry) for entry in told.content]
    else:
        tops = told.top_logprobs or []
        entries = [
            msgspec.json.encode(
                {
                    "token": token,
                    "logprob": logprob or 0.0,
                    "top_logprobs": [
                        {"token": name, "logprob": value}
                        for name, value in ((tops[place] if place < len(tops) else None) or {}).items()
                    ],
                }
            )
            for place, (token, logprob) in enumerate(zip(told.tokens or (), told.token_logprobs or (), strict=False))
        ]
    return entries if all(map(is_entry, entries)) else []


def _floats(values: list[float]) -> bytes:
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _from_text(text: str) -> bytes:
    try:
        raw = b64decode(text, validate=True)
    except ValueError as error:
        raise failures.garbage(f"a vector that is none: {error}") from None
    if len(raw) % 4:
        raise failures.garbage("a vector that is none")
    return raw
