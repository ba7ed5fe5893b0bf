"""Decoding with guesses against decoding without, in turn, on the demo model: what is gained, and what is never lost.

Run ``python -m benchmarks.speculation``. Notes and figures are in benchmarks/speculation.md.
"""

from __future__ import annotations

import json
import random
from functools import partial
from statistics import median
from time import perf_counter

import click
from tokenizers import Tokenizer

from demo import DRAFT_DIR
from policies import settings, wire
from policies.terms import Sampling
from worker.engine import Engine
from worker.probe import probe
from worker.process import prepare
from worker.runner import Runner
from worker.sampler import Sampler
from worker.speculation import Speculation, SuffixDrafter
from worker.speculation.load import draft_model

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
NUM_TOLD = 160
"""Tokens of an answer that is asked for again: what stands in the text already is copied."""


class Bench:
    """One engine, with and without."""

    def __init__(self) -> None:
        engine = settings.Engine()
        self._runner = Runner.load("demo", engine)
        sampler = Sampler(self._runner.vocab_size, self._runner.eos_token_ids)
        make = partial(Engine, self._runner, sampler, engine, perf_counter)
        costs = probe(make, self._runner.max_model_tokens)
        model = draft_model("demo", engine, self._runner, perf_counter)
        assert model is not None
        self._engine = {
            "copies": make(costs, Speculation([SuffixDrafter()], engine.speculation.max_draft_tokens)),
            "model": make(costs, Speculation([model], engine.speculation.max_draft_tokens)),
            "both": make(costs, Speculation([SuffixDrafter(), model], engine.speculation.max_draft_tokens)),
        }
        self._tokenizer = Tokenizer.from_file(str(DRAFT_DIR / "tokenizer.json"))

    def chat(self, *turns: str) -> list[int]:
        """Questions and answers in turn, the last one a question."""
        text = ""
        for place, turn in enumerate(turns):
            text += f"<|im_start|>{'assistant' if place % 2 else 'user'}\n{turn}<|im_end|>\n"
        token_ids: list[int] = self._tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids
        return token_ids

    def twice_told(self, question: str) -> list[int]:
        """A conversation in which an answer is asked for again, and the answer once more behind it, in part: the model
        goes on copying."""
        answer = self.write("copies", False, [self.chat(question)], NUM_TOLD, 0.0)[1][0]
        return [*self.chat(question), *answer, *self.chat(question), *answer[: NUM_TOLD // 8]]

    def write(
        self, name: str, speculates: bool, prompts: Prompts, num_tokens: int, temperature: float
    ) -> tuple[float, list[list[int]], int, int]:
        """Tokens a second once all have begun, the answers, and what was drafted and accepted."""
        engine = self._engine[name]
        engine.speculates = speculates
        answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            sampling = Sampling(num_tokens, temperature=temperature, seed=number, ignore_eos=True)
            refused = engine.add(wire.Submit(str(number), prompt, sampling))
            assert refused is None
        num_drafted = num_accepted = num_written = 0
        began_at = 0.0
        while engine.has_work:
            deltas, _ = engine.step()
            for delta in deltas:
                answers[delta.request_id] += delta.token_ids
                num_written += len(delta.token_ids) if began_at else 0
                if delta.finish is not None:
                    num_drafted += delta.finish.num_drafted_tokens
                    num_accepted += delta.finish.num_accepted_tokens
            if not began_at and all(answers.values()):
                began_at = perf_counter()
        return num_written / (perf_counter() - began_at), list(answers.values()), num_drafted, num_accepted

    def compare(
        self, name: str, prompts: Prompts, num_tokens: int, temperature: float, num_rounds: int
    ) -> dict[str, float]:
        """Without and with, in turn; the median of the ratios."""
        ratios, rates = [], []
        for _ in range(num_rounds):
            plain, *_ = self.write(name, False, prompts, num_tokens, temperature)
            guessed, _, num_drafted, num_accepted = self.write(name, True, prompts, num_tokens, temperature)
            ratios.append(guessed / plain)
            rates.append((plain, guessed))
        return {
            "times": median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "plain_tokens_per_s": median(plain for plain, _ in rates),
            "tokens_per_s": median(guessed for _, guessed in rates),
            "num_drafted": num_drafted,
            "num_accepted": num_accepted,
        }


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False), help="Write the figures there as JSON, too.")
def main(rounds: int, out: str | None) -> None:
    """Prints the figures."""
    prepare()
    bench = Bench()
    rng = random.Random(3)
    stories = [bench.chat(question) for question in STORIES]
    told = [bench.twice_told(question) for question in STORIES]
    cases: list[tuple[str, str, Prompts, int, float]] = [
        ("copies, by the suffix drafter", "copies", told[:1], NUM_TOLD * 3 // 4, 0.0),
        ("stories, by the draft model", "model", stories[:1], 400, 0.0),
        ("stories at temperature 0.8, by the draft model", "model", stories[:1], 400, 0.8),
        ("8 stories, by both", "both", stories, 300, 0.0),
    ]
    for num in (1, 8, 32):
        prompts = [[rng.randrange(3, 4096) for _ in range(32)] for _ in range(num)]
        cases += [(f"{num} random, by both", "both", prompts, 128, 0.0)]
        cases += [(f"{num} random at temperature 1, by both", "both", prompts, 128, 1.0)]
    figures = {}
    for title, name, prompts, num_tokens, temperature in cases:
        figures[title] = told_of = bench.compare(name, prompts, num_tokens, temperature, rounds)
        click.echo(
            f"{title:48} {told_of['times']:5.2f} times ({told_of['least']:.2f} to {told_of['most']:.2f}),"
            f" {told_of['plain_tokens_per_s']:.0f} -> {told_of['tokens_per_s']:.0f} tokens/s,"
            f" {told_of['num_accepted']} of {told_of['num_drafted']} right"
        )
    if out:
        with open(out, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
