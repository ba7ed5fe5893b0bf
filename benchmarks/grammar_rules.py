"""Does a stream stand still beside an answer whose rules nobody can follow, or whose schema takes long?

    python -m benchmarks.grammar_rules --rules 80 150 200 --lists 20 30 44

One engine on the CPU with a small random model and the vocabulary of ``benchmarks.grammar``: a stream of so many tokens
alone, then beside a request that brings a grammar in Lark. Its rules are ambiguous behind two letters, so that nothing
of it shows in the first mask: ``s: a0 s | s a0 | a1 s | ...``, each of the others a letter or nothing. Or it brings a
schema whose definitions are each a list of any of them, or a text with a pattern that has many states. Of each stream
its largest gap between two tokens, and what became of the other answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch

from benchmarks.grammar import EOS, words_of
from policies import settings, wire
from policies.terms import Sampling
from worker.boarding import Boarding
from worker.engine import Engine
from worker.grammar.store import Grammars
from worker.grammar.vocabulary import made
from worker.models import Means, random_decoder
from worker.native import library
from worker.process import prepare
from worker.runner import Runner
from worker.sampler import Sampler

PROMPT = [*range(5, 17)]
PATTERNS = ["^.*a.{15}$", "^(\\w+\\s?){1,50}$"]
MAX_S = 300.0
"""For one answer; then it is cancelled."""


def ambiguous(num_rules: int) -> str:
    names = range(num_rules)
    ways = " | ".join(f"a{name} s | s a{name}" for name in names)
    return f'start: "qz" s\ns: {ways} | "a"\n' + "".join(f'a{name}: /[a-z ]/ | ""\n' for name in names)


def lists(num_lists: int) -> str:
    names = [f"d{number}" for number in range(num_lists)]
    items = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    defs = {name: {"type": "array", "items": items, "minItems": 2} for name in names}
    return json.dumps({"$defs": defs, "$ref": "#/$defs/d0"})


class Bench:
    def __init__(self, shape: str, num_threads: int, executor: ThreadPoolExecutor) -> None:
        asked = settings.Engine(device="cpu", dtype="bfloat16", num_threads=num_threads, prefix_cache=False)
        torch.set_num_threads(num_threads)
        model = random_decoder(shape, torch.bfloat16, torch.device("cpu"), Means(library()))
        runner = Runner.of(model, asked, 1024)
        tokens = made(words_of(runner.vocab_size), runner.vocab_size, [EOS])
        grammars = Grammars(lambda: tokens, runner.vocab_size, frozenset({EOS}), executor, lambda: None)
        self._engine = Engine(runner, Sampler(runner.vocab_size, (EOS,)), asked, perf_counter)
        self._boarding = Boarding(self._engine, None, perf_counter, grammars)

    def gap_s(self, num_tokens: int, rules: wire.Grammar | None = None) -> tuple[float, str]:
        """The largest of a stream, and how the answer that is held to this ended."""
        self._add(wire.Submit("plain", PROMPT, Sampling(num_tokens, ignore_eos=True)))
        if rules is not None:
            self._add(wire.Submit("held", PROMPT, Sampling(50, top_k=1000), grammar=rules))
        began_at = last_at = perf_counter()
        largest, ended = 0.0, "" if rules is not None else "-"
        is_written = False
        while not (is_written and ended):
            _, failed = self._boarding.turn()
            deltas, faults = self._engine.step() if self._engine.has_work else ([], [])
            now = perf_counter()
            for failure in (*failed, *faults):
                ended = f"{failure.reason[:90]} (after {now - began_at:.1f} s)"
            for delta in deltas:
                if delta.request_id == "plain" and delta.token_ids:
                    largest, last_at = max(largest, now - last_at), now
                is_written = is_written or (delta.request_id == "plain" and delta.finish is not None)
                if delta.request_id == "held" and delta.finish is not None:
                    ended = f"{delta.finish.reason} (after {now - began_at:.1f} s)"
            if now - began_at > MAX_S and not ended:
                self._boarding.cancel("held")
                ended = f"cancelled after {MAX_S:g} s"
        return largest, ended

    def _add(self, submit: wire.Submit) -> None:
        refused = self._boarding.add(submit)
        assert refused is None, refused


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", type=int, nargs="*", default=[80, 150, 200], help="how many others s has")
    parser.add_argument("--lists", type=int, nargs="*", default=[20, 30, 44], help="how many definitions a schema has")
    parser.add_argument("--patterns", nargs="*", default=PATTERNS, help="of a text")
    parser.add_argument("--tokens", type=int, default=4000, help="of the stream")
    parser.add_argument("--shape", default="S")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    prepare()
    with ThreadPoolExecutor(2) as executor:
        bench = Bench(given.shape, given.threads, executor)
        bench.gap_s(50)
        print(f"alone: {1e3 * bench.gap_s(given.tokens)[0]:.0f} ms")
        held = {f"{num} rules": wire.Grammar("lark", ambiguous(num)) for num in given.rules}
        held |= {f"{num} lists": wire.Grammar("json_schema", lists(num)) for num in given.lists}
        for pattern in given.patterns:
            held[pattern] = wire.Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern}))
        for name, grammar in held.items():
            gap_s, ended = bench.gap_s(given.tokens, grammar)
            print(f"{name}: {1e3 * gap_s:.0f} ms; {ended}", flush=True)


if __name__ == "__main__":
    main()
