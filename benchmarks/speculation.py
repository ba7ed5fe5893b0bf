"""Decoding with guesses against decoding without, in turn, on the demo model: what is gained, and what is never lost.

Run ``python -m benchmarks.speculation``. Notes and figures are in benchmarks/speculation.md.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.speculation_picture import draw
from demo import DRAFT_DIR
from demo.facts import CITIES, FOODS, NAMES
from demo.stories import tell
from policies import settings, wire
from policies.terms import Sampling
from worker.engine import Engine
from worker.grammar.store import Grammars
from worker.grammar.vocabulary import read_vocabulary, spelt
from worker.probe import probe
from worker.process import prepare
from worker.runner import Runner
from worker.sampler import Pending, Row, Sampled, Sampler
from worker.sampling.masks import Masks
from worker.speculation import Drafter, Speculation, StoreDrafter, SuffixDrafter
from worker.speculation.forced import ForcedDrafter
from worker.speculation.load import draft_model
from worker.speculation.twins import Twins

Prompts = list[list[int]]

STORIES = [
    "Write a very long story about an owl.",
    "Tell me a story about a fox.",
    "Tell me a long story about a bear.",
    "Tell me a short story about a cat and a kite.",
    "Tell me a story about a dog.",
    "Write a long story about a mouse and a lantern.",
    "Tell me a long story about a rabbit.",
    "Can you tell me a story about a horse?",
]
LUCK = 8
"""Times as many tokens as all have on average, that none of several answers reaches."""
NUM_RECORDS = 10
"""People in a text that JSON is made of."""
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
        "favourite_animal": {"enum": ["a small fox", "an old owl", "a brown bear"]},
        "is_a_friend": {"type": "boolean"},
    },
    "required": ["first_name", "year_of_birth", "favourite_animal", "is_a_friend"],
    "additionalProperties": False,
}
PEOPLE = wire.Grammar("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 100}))
"""No answer that is measured reaches its end."""


KINDS = ("copies", "stories", "forced", "random")


class Case(NamedTuple):
    """What is decoded in one measurement."""

    prompts: Prompts
    num_tokens: int
    temperature: float = 0.0
    dictated: Prompts = []  # noqa: RUF012  (never changed)
    """Of each prompt the answer, whatever the model says."""
    grammar: wire.Grammar | None = None


class Dictation(Sampler):
    """A sampler that samples as ever and then takes the words from a text, for the requests that have one."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        super().__init__(vocab_size, eos_token_ids)
        self.texts: Mapping[int, list[int]] = {}
        """By seed."""

    @torch.inference_mode()
    def start(
        self, logits: Tensor, rows: Sequence[Row], maxima: Tensor | None = None, masks: Masks | None = None
    ) -> Pending | Sampled:
        pending = super().start(logits, rows, maxima, masks)
        for number, row in enumerate(rows) if self.texts else ():
            text, place = self.texts[row.seed], len(row.output_token_ids) + len(row.draft_token_ids)
            if place < len(text):
                pending.token_ids[number] = text[place]
        return pending


class Bench:
    """Engines with different drafters on one model."""

    def __init__(self, speculation: settings.Speculation) -> None:
        # The engines write to the same blocks.
        engine = settings.Engine(prefix_cache=False, speculation=speculation)
        self._runner = Runner.load("demo", engine)
        self._sampler = Dictation(self._runner.vocab_size, self._runner.eos_token_ids)
        make = partial(Engine, self._runner, self._sampler, engine, perf_counter)
        costs = probe(make, self._runner.max_model_tokens)
        model = draft_model("demo", engine, self._runner, perf_counter)
        assert model is not None
        num = engine.speculation.max_draft_tokens
        twins = Twins(spelt(DRAFT_DIR))
        drafters: dict[str, list[Drafter]] = {
            "suffix": [SuffixDrafter(twins)],
            "store": [StoreDrafter()],
            "model": [model],
            "all": [SuffixDrafter(twins), StoreDrafter(), model],
            "grammar": [ForcedDrafter()],
            "suffix and grammar": [SuffixDrafter(twins), ForcedDrafter()],
        }
        self._engine = {name: make(costs, Speculation(own, num)) for name, own in drafters.items()}
        ends = frozenset(self._runner.eos_token_ids)
        vocabulary = read_vocabulary(DRAFT_DIR, self._runner.vocab_size, ends)
        self._grammars = Grammars(
            lambda: vocabulary, self._runner.vocab_size, ends, ThreadPoolExecutor(1), lambda: None
        )
        self._grammars.begin(wire.Submit("", [1], Sampling(1), grammar=PEOPLE))
        while not self._grammars.turn():
            pass
        self._tokenizer = Tokenizer.from_file(str(DRAFT_DIR / "tokenizer.json"))

    def tokens(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def chat(self, *turns: str) -> list[int]:
        """Questions and answers in turn, the last one a question."""
        text = ""
        for place, turn in enumerate(turns):
            text += f"<|im_start|>{'assistant' if place % 2 else 'user'}\n{turn}<|im_end|>\n"
        return self.tokens(text + "<|im_start|>assistant\n")

    def told_again(self, rng: random.Random) -> Case:
        """A conversation in which a story is asked for again. Left to itself the demo model tells another one, and how
        much of that stood there before is a matter of how a processor rounds, so it is dictated."""
        text = tell(rng, "fox", "basket", 3)
        answer = self.tokens(text)
        return Case([self.chat(STORIES[1], text, STORIES[1])], len(answer), 0.0, [answer])

    def asked_again(self, rng: random.Random) -> Case:
        """A question that was answered before, in another request."""
        answer = self.tokens(tell(rng, "fox", "basket", 3))
        case = Case([self.chat(STORIES[1])], len(answer), 0.0, [answer])
        self.write("store", True, case)
        return case

    def rewritten(self, rng: random.Random) -> Case:
        """A story that is to be told again of somebody else. The demo model cannot do that, so it is dictated."""
        text = tell(rng, "fox", "basket", 3)
        here, *names = [name for name in NAMES if name in text] + [name for name in NAMES if name not in text]
        other = names[-1]
        answer = self.tokens(text.replace(here, other))
        return Case(
            [self.chat(f"Rewrite this text, with {other} in place of {here}:\n\n{text}")], len(answer), 0.0, [answer]
        )

    def extracted(self, rng: random.Random) -> Case:
        """People that are told of, as JSON. Dictated, too: of so many the demo model loses count."""
        people = [
            {"name": name, "age": rng.randrange(20, 80), "city": rng.choice(CITIES), "likes": rng.choice(FOODS)}
            for name in rng.sample(NAMES, NUM_RECORDS)
        ]
        text = " ".join(
            [f"{who['name']} is {who['age']}, lives in {who['city']} and likes {who['likes']}." for who in people]
        )
        answer = self.tokens(json.dumps(people))
        return Case([self.chat(f"Extract JSON from this text:\n\n{text}")], len(answer), 0.0, [answer])

    def write(self, name: str, speculates: bool, case: Case) -> Written:
        """By one of the engines, all prompts at once, until there are so many tokens in all: nobody ends before, or a
        batch of which some are lucky would shrink, and the others hold up what was gained."""
        engine = self._engine[name]
        engine.speculates = speculates
        self._sampler.texts = dict(enumerate(case.dictated))
        answers: dict[str, list[int]] = {str(number): [] for number in range(len(case.prompts))}
        for number, prompt in enumerate(case.prompts):
            most = case.num_tokens * (LUCK if len(case.prompts) > 1 else 1)
            sampling = Sampling(most, temperature=case.temperature, seed=number, ignore_eos=True)
            submit = wire.Submit(str(number), prompt, sampling, grammar=case.grammar)
            refused = engine.add(submit, None, self._grammars.find(submit) if case.grammar else None)
            assert refused is None
        num_drafted = num_accepted = num_written = 0
        began_at = ended_at = 0.0
        while engine.has_work:
            if num_written >= len(case.prompts) * (case.num_tokens - 1) and not ended_at:
                ended_at = perf_counter()
                for delta in [delta for number in answers for delta in engine.cancel(number)]:
                    assert delta.finish is not None
                    num_drafted += delta.finish.num_drafted_tokens
                    num_accepted += delta.finish.num_accepted_tokens
                continue
            deltas, failed = engine.step()
            assert not failed, failed
            for delta in deltas:
                answers[delta.request_id] += delta.token_ids
                num_written += len(delta.token_ids) if began_at else 0
                if delta.finish is not None:
                    num_drafted += delta.finish.num_drafted_tokens
                    num_accepted += delta.finish.num_accepted_tokens
            if not began_at and all(answers.values()):
                began_at = perf_counter()
        rate = num_written / ((ended_at or perf_counter()) - began_at)
        return Written(rate, list(answers.values()), num_drafted, num_accepted)


class Written(NamedTuple):
    """What came of a case."""

    tokens_per_s: float
    """Once all have begun."""
    answers: Prompts
    num_drafted: int
    num_accepted: int


class Pairs:
    """One kind of prompts, without guesses and with, as often as there are rounds."""

    def __init__(self, title: str, name: str, cases: Iterable[Case]) -> None:
        """``name``: of the engine; ``cases``: one a round."""
        self.title, self._name, self._cases = title, name, iter(cases)
        self._ratios: list[float] = []
        self._rates: list[tuple[float, float]] = []
        self._num_drafted = self._num_accepted = 0

    def go(self, bench: Bench) -> None:
        """One round; who is first takes turns."""
        case = next(self._cases)
        order = (False, True) if len(self._ratios) % 2 else (True, False)
        written = {speculates: bench.write(self._name, speculates, case) for speculates in order}
        plain, guessed = written[False], written[True]
        self._ratios.append(guessed.tokens_per_s / plain.tokens_per_s)
        self._rates.append((plain.tokens_per_s, guessed.tokens_per_s))
        self._num_drafted += guessed.num_drafted
        self._num_accepted += guessed.num_accepted

    def figures(self) -> dict[str, float]:
        """The median of the ratios, between which two of them it lies in 19 of 20 such runs, and the quartiles."""
        ratios = sorted(self._ratios)
        low, high = median_bounds(len(ratios))
        return {
            "times": median(ratios),
            "at_least": ratios[low],
            "at_most": ratios[high],
            "first_quartile": ratios[len(ratios) // 4],
            "third_quartile": ratios[-1 - len(ratios) // 4],
            "num_rounds": len(ratios),
            "plain_tokens_per_s": median(plain for plain, _ in self._rates),
            "tokens_per_s": median(guessed for _, guessed in self._rates),
            "num_drafted": self._num_drafted,
            "num_accepted": self._num_accepted,
        }


def median_bounds(num: int) -> tuple[int, int]:
    """The places, among so many values in order, between which the median that they are drawn from lies with a chance
    of 0.95; the first and the last where they are too few for that."""
    chance, ways, low = 0.0, 1.0, 0
    for place in range(num // 2):
        chance += ways / 2.0**num
        if chance > 0.025:
            break
        low = place
        ways *= (num - place) / (place + 1)
    return low, num - 1 - low


def pairs_of(bench: Bench) -> dict[str, list[Pairs]]:
    """By kind."""
    rng = random.Random(3)

    def forever(case: Case) -> Iterable[Case]:
        while True:
            yield case

    def anew(case_of: Callable[[random.Random], Case]) -> Iterable[Case]:
        while True:
            yield case_of(rng)

    def random_prompts(num: int, temperature: float) -> Iterable[Case]:
        while True:  # new ones in each round, lest the answers be known
            prompts = [[rng.randrange(3, 4096) for _ in range(32)] for _ in range(num)]
            yield Case(prompts, 128, temperature)

    stories = [bench.chat(question) for question in STORIES]
    people = [bench.chat(f"Tell me of {name} and friends, as JSON.") for name in NAMES[:8]]
    return {
        "copies": [
            Pairs("an answer asked for again, by suffix", "suffix", anew(bench.told_again)),
            Pairs("the same in another request, by store", "store", anew(bench.asked_again)),
            Pairs("a text rewritten, by suffix", "suffix", anew(bench.rewritten)),
            Pairs("a text rewritten, by all", "all", anew(bench.rewritten)),
            Pairs("JSON extracted, by suffix", "suffix", anew(bench.extracted)),
            Pairs("JSON extracted, by all", "all", anew(bench.extracted)),
        ],
        "stories": [
            Pairs("a story, by the draft model", "model", forever(Case(stories[:1], 400))),
            Pairs("a story at temperature 0.8, by the draft model", "model", forever(Case(stories[:1], 400, 0.8))),
            Pairs("8 stories, by the draft model", "model", forever(Case(stories, 300))),
        ],
        "forced": [
            Pairs(f"{num} answers by a schema, {title}", name, forever(Case(people[:num], 200, 0.7, [], PEOPLE)))
            for num in (1, 8)
            for title, name in (("by grammar", "grammar"), ("by suffix and grammar", "suffix and grammar"))
        ],
        "random": [
            Pairs(
                f"{num} random prompts at temperature {temperature:g}, by all", "all", random_prompts(num, temperature)
            )
            for num in (1, 8, 32)
            for temperature in (0.0, 1.0)
        ],
    }


@click.command()
@click.option("--seconds", type=click.FloatRange(1), default=50.0, show_default=True, help="Rounds begin for so long.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only these.")
@click.option("--only", default="", help="Only those with this in their title.")
@click.option("--most", type=click.IntRange(1, 64), help="Tokens of a draft, if not what is set where nothing is said.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Add the figures to a JSON file.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw all that is in it as a PNG.")
def main(
    seconds: float,
    kinds: tuple[str, ...],
    only: str,
    most: int | None,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Prints the figures."""
    prepare()
    bench = Bench(settings.Speculation(max_draft_tokens=most) if most else settings.Speculation())
    every = pairs_of(bench)
    pairs = [each for kind in kinds or every for each in every[kind] if only in each.title]
    began_at = perf_counter()
    while perf_counter() - began_at < seconds:
        for each in pairs:
            each.go(bench)
    figures = {each.title: each.figures() for each in pairs}
    for title, told_of in figures.items():
        click.echo(
            f"{title:50} {told_of['times']:5.3f} times ({told_of['at_least']:.3f} to {told_of['at_most']:.3f}; quarters"
            f" {told_of['first_quartile']:.2f}, {told_of['third_quartile']:.2f}; {told_of['num_rounds']:.0f} rounds),"
            f" {told_of['plain_tokens_per_s']:.0f} -> {told_of['tokens_per_s']:.0f} tokens/s,"
            f" {told_of['num_accepted']:.0f} of {told_of['num_drafted']:.0f} right"
        )
    known = json.loads(out.read_text()) if out and out.exists() else {}
    known |= figures
    if out:
        out.write_text(json.dumps(known, indent=1))
    if plot:
        draw(
            {
                kind: {each.title: known[each.title] for each in own if each.title in known}
                for kind, own in every.items()
            },
            plot,
        )


if __name__ == "__main__":
    main()
