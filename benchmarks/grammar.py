"""What holding answers to a grammar costs: a batch whose answers keep to one, against the same batch without.

    python -m benchmarks.grammar --shape S
    python -m benchmarks.grammar --shape demo --warm 10

No HTTP: distinct prompts, submitted at once to one engine on the CPU, until each answer has so many tokens; plain and
held in turn, in one process. Weights are random, and so are prompts and what is said, as far as the grammar leaves a
choice: no other text goes through so many of its states, or is refused so often. The vocabulary is the demo model's
tokens, and pairs and triples of them. The demo model is a trained one, but too small to list people that it is told of:
it is helped to, by logits that speak for such a list, as those of a larger one would; plain and held alike.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import msgspec
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer
from torch import Tensor

from demo import MODEL_DIR
from demo.facts import CITIES, FOODS, NAMES
from policies import settings, wire
from policies.grammar import spelled
from policies.terms import Sampling
from worker.engine import Engine
from worker.grammar.store import Grammars
from worker.grammar.vocabulary import made, read_vocabulary, tokens_of
from worker.models import Means, random_decoder
from worker.native import library
from worker.process import prepare
from worker.runner import Runner
from worker.sampler import Pending, Row, Sampled, Sampler
from worker.sampling.masks import Masks

EOS = 2
NUM_PEOPLE = 12
HELP = 64.0
"""Added to a logit: none other has a chance, and a grammar may still say no."""
ROOM = 4096
"""Tokens that each answer might have; far more than it gets."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z]{1,10}[.](com|org)$"},
        "kind": {"enum": ["customer", "supplier", "employee"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
        "place": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"street": {"type": "string", "maxLength": 40}, "zip": {"type": "integer"}},
                    "required": ["street", "zip"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "required": ["name", "age", "mail", "kind", "tags", "place"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON}
KNOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 40},
        "likes": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city", "likes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": wire.Grammar("json_schema", json.dumps(PEOPLE | {"minItems": 100_000})),
    "strict": wire.Grammar("json_schema", json.dumps(PEOPLE | {"minItems": 20}), True),
    "json": wire.Grammar("json_schema", '{"type": "array", "minItems": 100000, "items": {"type": "object"}}'),
    "regex": wire.Grammar("regex", "([a-z]{1,9}(, |[.] |[0-9]{2}-))+x{1000}"),
}
"""None of them lets an answer end before it is measured."""
TAUGHT = {
    "schema": wire.Grammar("json_schema", json.dumps({"type": "array", "items": KNOWN, "minItems": 100_000})),
    "strict": wire.Grammar("json_schema", json.dumps({"type": "array", "items": KNOWN, "minItems": NUM_PEOPLE}), True),
    "json": GRAMMARS["json"],
}
"""Of what the demo model has learned to write."""


def words_of(num_tokens: int) -> dict[int, bytes]:
    """Tokens by id, each at most once."""
    chance = random.Random(1)
    tokens = tokens_of(json.loads((Path(MODEL_DIR) / "tokenizer.json").read_text()))
    words = [token for token in tokens.values() if token and token[0] != 255]
    known = set(words)
    while len(tokens) < num_tokens:
        word = b"".join(chance.choices(words, k=chance.choice((2, 2, 3))))
        if word not in known:
            known.add(word)
            tokens[len(tokens)] = word
    return tokens


def told(chance: random.Random) -> tuple[str, str]:
    """A question, and how its answer begins."""
    people = [
        {
            "name": name,
            "age": chance.randrange(20, 80),
            "city": chance.choice(CITIES),
            "likes": chance.choice(FOODS),
        }
        for name in chance.sample(NAMES, NUM_PEOPLE)
    ]
    text = " ".join(
        [f"{who['name']} is {who['age']}, lives in {who['city']} and likes {who['likes']}." for who in people]
    )
    question = f"<|im_start|>user\nExtract JSON from this text:\n\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return question, json.dumps(people).removesuffix("]")  # there are more


class Helped(Sampler):
    """Of a model that knows what to say, by seed."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, ())
        self.answers: dict[int, list[int]] = {}

    @torch.inference_mode()
    def start(
        self, logits: Tensor, rows: Sequence[Row], maxima: Tensor | None = None, masks: Masks | None = None
    ) -> Pending | Sampled:
        for place, row in enumerate(rows) if self.answers else ():
            answer, length = self.answers[row.seed], len(row.output_token_ids) + len(row.draft_token_ids)
            if length < len(answer):
                logits[place, answer[length]] += HELP
        return super().start(logits, rows, None if self.answers else maxima, masks)


class Bench:
    """One engine, and the grammars of its model."""

    def __init__(self, shape: str, num_streams: int, num_threads: int, executor: ThreadPoolExecutor) -> None:
        asked = settings.Engine(
            device="cpu",
            dtype="bfloat16",
            num_threads=num_threads,
            prefix_cache=False,
            max_model_tokens=2 * ROOM,
            speculation=settings.Speculation(drafters=("grammar",)),
        )
        torch.set_num_threads(num_threads)
        if shape == "demo":
            self.runner = Runner.load("demo", asked)
            tokens = read_vocabulary(Path(MODEL_DIR), self.runner.vocab_size, [EOS])
        else:
            model = random_decoder(shape, torch.bfloat16, torch.device("cpu"), Means(library()))
            self.runner = Runner.of(model, asked, max(num_streams * 32, 2 * ROOM // asked.block_size))
            tokens = made(words_of(self.runner.vocab_size), self.runner.vocab_size, [EOS])
        self._sampler = Helped(self.runner.vocab_size)
        self.engine = Engine(self.runner, self._sampler, asked, perf_counter)
        self.engine.speculates = False
        self._tokens = tokens
        self._tokenizer = Tokenizer.from_file(str(Path(MODEL_DIR) / "tokenizer.json")) if shape == "demo" else None
        self._grammars = Grammars(lambda: tokens, self.runner.vocab_size, frozenset({EOS}), executor, lambda: None)
        self._chance = random.Random(1)
        self._num_streams = num_streams

    @property
    def num_masks(self) -> int:
        """Made so far."""
        return self.engine.stats().num_masks

    def _prompt(self, number: int, num_tokens: int) -> list[int]:
        """Of so many tokens, if they are random."""
        if self._tokenizer is None:
            return [self._chance.randrange(self.runner.vocab_size) for _ in range(num_tokens)]
        question, answer = told(self._chance)
        self._sampler.answers[number] = self._said(answer)
        return self._encoded(question)

    def _encoded(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def _said(self, text: str) -> list[int]:
        """In tokens that a grammar has nothing against: it cuts for itself what must come in any case."""
        matcher = LLMatcher(self._tokens, spelled(TAUGHT["schema"]), log_level=0)
        token_ids: list[int] = []
        rest = text.encode()
        while rest:
            token_id = (matcher.compute_ff_tokens() or self._encoded(rest.decode()))[0]
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
            rest = rest[len(self._tokens.decode_bytes([token_id])) :]
        return token_ids

    def compile_ms(self, grammar: wire.Grammar) -> float:
        """How long it takes from nothing to the first request that has it."""
        began_at = perf_counter()
        self._grammars.begin(wire.Submit("compile", [1], Sampling(ROOM), grammar=grammar))
        while not (done := self._grammars.turn()):
            pass
        assert isinstance(done[0][1], dict), done[0][1]
        return 1e3 * (perf_counter() - began_at)

    def round(self, num_prompt: int, num_output: int, grammar: wire.Grammar | None, sampling: Sampling) -> float:
        """Tokens a second, from when all have their first one until all have ``num_output``."""
        lengths: dict[str, int] = {}
        for number in range(self._num_streams):
            own = msgspec.structs.replace(sampling, seed=number)
            submit = wire.Submit(str(number), self._prompt(number, num_prompt), own, grammar=grammar)
            guides = None if grammar is None else self._grammars.find(submit)
            assert (guides is None) == (grammar is None), "compiled before"
            refused = self.engine.add(submit, None, guides)
            assert refused is None, refused
            lengths[submit.request_id] = 0
        began_at, num_early = 0.0, 0
        while min(lengths.values()) < num_output:
            deltas, failed = self.engine.step()
            assert not failed, failed
            for delta in deltas:
                assert delta.finish is None, "answers are longer than what is measured of them"
                lengths[delta.request_id] += len(delta.token_ids)
            if not began_at and min(lengths.values()):
                began_at, num_early = perf_counter(), sum(lengths.values())
        rate = (sum(lengths.values()) - num_early) / (perf_counter() - began_at)
        for request_id in lengths:
            self.engine.cancel(request_id)
        return rate


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--grammars", nargs="+", choices=GRAMMARS)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--top-p", type=float, default=1.0, help="below 1, no token is drawn before its mask is there")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--drafts", action="store_true", help="held with the grammar's drafts, against held without")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=1, help="rounds of each before, as a server has had by the hour")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    prepare()
    with ThreadPoolExecutor(1) as executor:
        bench = Bench(given.shape, given.streams, given.threads, executor)
        num_tokens = bench.runner.vocab_size
        print(f"shape {given.shape}, {num_tokens} tokens, {given.streams} streams, {given.threads} threads")
        sampling = Sampling(ROOM, temperature=given.temperature, top_p=given.top_p, ignore_eos=True)
        known = TAUGHT if given.shape == "demo" else GRAMMARS
        for name in given.grammars or known:
            grammar = known[name]
            compile_ms = bench.compile_ms(grammar)

            def rate(held: wire.Grammar | None, grammar: wire.Grammar = grammar) -> float:
                bench.engine.speculates = given.drafts and held is not None
                return bench.round(given.input, given.output, grammar if given.drafts else held, sampling)

            for _ in range(given.warm):
                rate(None), rate(grammar)
            num_masks = bench.num_masks
            pairs = []
            for nth in range(given.rounds):
                sides = (None, grammar) if nth % 2 == 0 else (grammar, None)
                first, second = (rate(side) for side in sides)
                pairs.append((first, second) if nth % 2 == 0 else (second, first))
            ratios = sorted(held / plain for plain, held in pairs)
            share = (bench.num_masks - num_masks) / (given.rounds * given.streams * given.output * (1 + given.drafts))
            plain, held = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(
                f"{name:8} compiled in {compile_ms:7.1f} ms   plain {plain:7.0f} tok/s   held {held:7.0f}"
                f"   ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
                f"   masks a token {share:.2f}"
            )


if __name__ == "__main__":
    main()
