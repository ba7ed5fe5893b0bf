"""Answers that are vectors or scores, one for each of the request's texts or pairs of texts."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from operator import mul

import msgspec
from msgspec import UNSET

from gateway import openai
from gateway.errors import RequestFailed
from gateway.reply import long
from gateway.reply.answers import Answer, Part
from gateway.reply.choices import Choice, Logprobs
from gateway.text import Text
from policies import wire

encode = msgspec.json.encode

LONG_BYTES = 32 << 10
"""Of vectors that take a while to write as numbers."""


class VectorAnswer(Answer):
    """What the workers made of each text."""

    _chunks = openai.Chunks
    _logprobs = Logprobs
    _continues = False

    def __init__(
        self, call: openai.Reading, parts: Sequence[Part], text: Text, fingerprint: str, service_tier: str
    ) -> None:
        super().__init__(call, parts, text, fingerprint, service_tier)
        self._vectors: dict[int, bytes] = {}

    def take(self, delta: wire.Delta) -> Choice:
        choice = super().take(delta)
        if delta.vector:
            self._vectors[choice.index] = delta.vector
        return choice

    @property
    def is_long(self) -> bool:
        return sum(map(len, self._vectors.values())) > LONG_BYTES

    def vectors(self) -> list[bytes]:
        """Of each text, as ``Delta.vector``. Raises RequestFailed where a worker gave none."""
        if len(self._vectors) < len(self.choices):
            raise RequestFailed("The model failed while answering this request.")
        return [self._vectors[number] for number in range(len(self.choices))]

    def numbers(self) -> Iterator[list[float]]:
        """The same as numbers."""
        return (_floats(vector).tolist() for vector in self.vectors())


class EmbeddingAnswer(VectorAnswer):
    """To /v1/embeddings."""

    endpoint = "/v1/embeddings"
    _id_prefix = "embd-"

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        assert isinstance(self.call, openai.EmbeddingRequest)
        whole = openai.EmbeddingList(
            data=[],
            model=self.call.model,
            usage=openai.ReadUsage.of(self.usage()),
            penstock=extras or UNSET,
        )
        as_text = self.call.encoding_format == "base64"
        told: Iterator[list[float] | str] = self.numbers()
        if as_text:
            told = (b64encode(vector).decode() for vector in self.vectors())
        data = long.listed(openai.Embedding(index, vector) for index, vector in enumerate(told))
        return long.joined(long.framed(whole, "data", data))


class Scored(VectorAnswer):
    """A score for each pair: a number of the model's own, or the cosine between the vectors of both."""

    def __init__(
        self,
        call: openai.Reading,
        parts: Sequence[Part],
        text: Text,
        fingerprint: str,
        service_tier: str,
        pairs: Sequence[tuple[int, int]] | None,
    ) -> None:
        """``pairs``: the places of both texts among ``parts``; None: each part is a pair, scored by the model."""
        super().__init__(call, parts, text, fingerprint, service_tier)
        self._pairs = pairs

    def scores(self) -> list[float]:
        """Of each pair. Raises RequestFailed."""
        vectors = [_floats(vector) for vector in self.vectors()]
        if self._pairs is None:
            return [vector[0] for vector in vectors]
        return [sum(map(mul, vectors[first], vectors[second])) for first, second in self._pairs]


class ScoreAnswer(Scored):
    """To /v1/score."""

    endpoint = "/v1/score"
    _id_prefix = "score-"

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        return encode(
            openai.ScoreList(
                id=self.id,
                created=self.created,
                model=self.call.model,
                data=[openai.Score(index, score) for index, score in enumerate(self.scores())],
                usage=openai.ReadUsage.of(self.usage()),
                penstock=extras or UNSET,
            )
        )


class RerankAnswer(Scored):
    """To /v1/rerank."""

    endpoint = "/v1/rerank"
    _id_prefix = "rerank-"

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        call = self.call
        assert isinstance(call, openai.RerankRequest)
        scores, texts = self.scores(), call.texts
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]
        shown = call.return_documents is None or call.return_documents
        return encode(
            openai.Ranking(
                id=self.id,
                model=call.model,
                results=[
                    openai.Ranked(index, scores[index], openai.Document(texts[index]) if shown else UNSET)
                    for index in best
                ],
                usage=openai.ReadUsage.of(self.usage()),
                penstock=extras or UNSET,
            )
        )


def _floats(vector: bytes) -> array[float]:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values
