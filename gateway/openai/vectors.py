"""Vectors and scores of texts: /v1/embeddings as OpenAI has it; rerank and score as Jina, Cohere and vLLM have them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.openai.decoding import decoded
from gateway.openai.extras import ReadingExtras, check_extras
from gateway.openai.failures import Malformed
from gateway.openai.receipts import PenstockExtras
from gateway.openai.requests import CacheSalt, Metadata, Named, PenstockOptions, TokenId
from policies.terms import Usage

MAX_INPUTS = 2048
"""Texts of one request, as at OpenAI."""


class Reading(ReadingExtras, frozen=True, kw_only=True):
    """What all of these take: texts are read, and none is written."""

    model: str
    user: Named | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    penstock: PenstockOptions | None = None
    cache_salt: CacheSalt | None = None
    """As of what is answered in words."""

    @property
    def stream(self) -> bool:
        """Never."""
        return False

    @property
    def includes_usage(self) -> bool:
        """Of a stream, which it never is."""
        return False

    @property
    def obfuscates(self) -> bool:
        """As above."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def keeps_stop(self) -> bool:
        """There is none."""
        return False

    @property
    def seed(self) -> None:
        """None: there is no chance in it."""
        return None


Truncation = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""vLLM's ``truncate_prompt_tokens``: of a longer prompt only the beginning is read; -1: as much as the model takes."""


class EmbeddingRequest(Reading, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    truncate_prompt_tokens: Truncation | None = None

    @property
    def texts(self) -> list[str]:
        """The inputs, when they are text."""
        if isinstance(self.input, str):
            return [self.input]
        return cast(list[str], self.input) if isinstance(self.input[0], str) else []

    @property
    def token_ids(self) -> list[list[int]]:
        """The inputs, when they are token ids."""
        if self.texts or not self.input:
            return []
        inputs = [self.input] if isinstance(self.input[0], int) else self.input
        return cast(list[list[int]], inputs)


class Document(msgspec.Struct, frozen=True):
    """A document with its text in a field."""

    text: str


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class RerankRequest(Reading, frozen=True, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    return_documents: bool | None = None
    """They are in the answer unless this is false."""
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    """Of a longer document only its beginning is read."""
    truncate_prompt_tokens: Truncation | None = None
    """Of each text, or of a pair's prompt."""

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [item if isinstance(item, str) else item.text for item in self.documents]

    @property
    def texts_once(self) -> list[str]:
        """The query and the documents."""
        return [self.query, *self.texts]


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""vLLM's names of what is scored against what."""


class ScoreRequest(Reading, frozen=True, kw_only=True):
    """POST /v1/score: one text against each of many, or each against the one beside it. The two have names out of
    ``SIDES``."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    truncate_prompt_tokens: Truncation | None = None
    """As of a ranking."""

    @property
    def sides(self) -> tuple[str, str]:
        """The names of the two that were given, or those that the ones given go with."""
        return max(SIDES, key=lambda names: sum(getattr(self, name) is not None for name in names))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What is to be scored."""
        first, second = ([text] if isinstance(text, str) else text for text in self.texts)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    @property
    def texts(self) -> tuple[str | list[str], str | list[str]]:
        """The two."""
        first, second = self.sides
        return getattr(self, first), getattr(self, second)

    @property
    def texts_once(self) -> list[str]:
        """Those of both, as they were sent."""
        first, second = ([text] if isinstance(text, str) else text for text in self.texts)
        return [*first, *second]


R = TypeVar("R", EmbeddingRequest, RerankRequest, ScoreRequest)

_embedding = msgspec.json.Decoder(EmbeddingRequest)
_rerank = msgspec.json.Decoder(RerankRequest)
_score = msgspec.json.Decoder(ScoreRequest)


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """The request in ``body``. Raises Malformed."""
    call = decoded(_embedding, body)
    check_extras(call)
    if not isinstance(call.input, str):
        kinds = {type(item) for item in call.input}
        if len(kinds) > 1:
            raise Malformed("Invalid 'input': strings, token ids and lists of token ids cannot be mixed", "input")
        if kinds == {list} and not all(call.input):
            raise Malformed("Invalid 'input': a list of token ids is empty", "input", "empty_array")
    if len(call.texts) + len(call.token_ids) > MAX_INPUTS:
        raise Malformed(f"'input' may have {MAX_INPUTS} texts at most", "input", "array_above_max_length")
    if not all(call.texts):
        raise Malformed("Invalid 'input': a text is empty", "input", "empty_string")
    return _cut(call)


def parse_rerank(body: bytes) -> RerankRequest:
    """The request in ``body``. Raises Malformed."""
    return _cut(decoded(_rerank, body))


def parse_score(body: bytes) -> ScoreRequest:
    """The request in ``body``. Raises Malformed."""
    call = _cut(decoded(_score, body))
    sides = call.sides
    for name in sides:
        if getattr(call, name) is None:
            raise Malformed(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    for name in dict.fromkeys(name for names in SIDES for name in names if name not in sides):
        if getattr(call, name) is not None:
            raise Malformed(f"'{name}' cannot be asked for together with '{sides[0]}' and '{sides[1]}'", name)
    first, second = (1 if isinstance(text, str) else len(text) for text in call.texts)
    if first not in (1, second):
        what = f"'{sides[0]}' has {first} texts and '{sides[1]}' {second}: one, or as many as the other"
        raise Malformed(what, sides[0])
    return call


def _cut(call: R) -> R:
    check_extras(call)
    if call.truncate_prompt_tokens == 0:
        what = "Invalid 'truncate_prompt_tokens': nothing would be left of a text"
        raise Malformed(what, "truncate_prompt_tokens", "integer_below_min_value")
    return call


class ReadUsage(msgspec.Struct, frozen=True):
    """Tokens of all texts together."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ReadUsage:
        """In OpenAI's shape."""
        return cls(usage.num_prompt_tokens, usage.num_prompt_tokens)


class Embedding(msgspec.Struct, frozen=True):
    """One text's vector; as base64 it is f32, least byte first."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: ReadUsage
    penstock: PenstockExtras | UnsetType = UNSET


class Ranked(msgspec.Struct, frozen=True):
    """One document's place."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/rerank: the most relevant first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    usage: ReadUsage
    results: list[Ranked]
    penstock: PenstockExtras | UnsetType = UNSET


class Score(msgspec.Struct, frozen=True):
    """One pair's."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: ReadUsage
    penstock: PenstockExtras | UnsetType = UNSET
