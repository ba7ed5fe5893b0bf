"""What a mask takes from llguidance, which holds answers here, and from xgrammar, which others use.

    pip install 'penstock[peers]'
    python -m benchmarks.grammar_peers --tokens 32000

No model and no engine: on one thread, for the grammars and the vocabulary of ``benchmarks.grammar``, both in turn: a
grammar compiled from nothing, then answers of tokens drawn evenly from those that the mask allows; of each step the
time of the mask, and of taking the token. Each walks its own way, since they do not allow quite the same.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from benchmarks.grammar import EOS, GRAMMARS, words_of
from policies import wire
from policies.grammar import spelled
from worker.grammar.vocabulary import made

Begun = tuple[Callable[[npt.NDArray[np.int32]], object], Callable[[int], bool]]
"""An answer: writes the mask of its next token; takes one."""
Compiled = Callable[[], Begun]
MAKERS = ("llguidance", "xgrammar")


def with_llguidance(tokens: LLTokenizer, grammar: wire.Grammar) -> Compiled:
    matcher = LLMatcher(tokens, spelled(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def begin() -> Begun:
        own = matcher.deep_copy()
        return (lambda mask: own.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)), own.consume_token

    return begin


def with_xgrammar(words: dict[int, bytes], num_tokens: int) -> Callable[[wire.Grammar], Compiled]:
    import torch
    import xgrammar

    known = [words.get(token_id, b"") for token_id in range(num_tokens)]
    info = xgrammar.TokenizerInfo(known, xgrammar.VocabType.RAW, vocab_size=num_tokens, stop_token_ids=[EOS])

    def compiled(grammar: wire.Grammar) -> Compiled:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        if grammar.kind == "regex":
            whole = compiler.compile_regex(grammar.source)
        else:
            whole = compiler.compile_json_schema(grammar.source, strict_mode=False)

        def begin() -> Begun:
            matcher = xgrammar.GrammarMatcher(whole)
            return (lambda mask: matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None])), matcher.accept_token

        return begin

    return compiled


def walk(begin: Compiled, num_tokens: int, num_output: int, seed: int) -> tuple[list[float], list[float]]:
    """Microseconds of each mask, and of each token taken."""
    chance = np.random.default_rng(seed)
    fill, take = begin()
    mask = np.empty(-(-num_tokens // 32), dtype=np.int32)
    masks, takes = [], []
    for _ in range(num_output):
        mask.fill(-1)
        began_at = perf_counter()
        fill(mask)
        masks.append(1e6 * (perf_counter() - began_at))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:num_tokens])
        allowed = allowed[allowed != EOS]
        if not len(allowed):
            break
        token_id = int(chance.choice(allowed))
        began_at = perf_counter()
        assert take(token_id)
        takes.append(1e6 * (perf_counter() - began_at))
    return masks, takes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--makers", nargs="+", choices=MAKERS, default=MAKERS)
    given = parser.parse_args(arguments)
    words = words_of(given.tokens)
    tokens = made(words, given.tokens, [EOS])
    makers: dict[str, Callable[[wire.Grammar], Compiled]] = {}
    if "llguidance" in given.makers:
        makers["llguidance"] = partial(with_llguidance, tokens)
    if "xgrammar" in given.makers:
        makers["xgrammar"] = with_xgrammar(words, given.tokens)
    for name, grammar in GRAMMARS.items():
        if grammar.is_strict:
            continue  # how answers end in time is no matter of masks
        for maker, compiled in makers.items():
            began_at = perf_counter()
            begin = compiled(grammar)
            begin()[0](np.empty(-(-given.tokens // 32), dtype=np.int32))
            compile_ms = 1e3 * (perf_counter() - began_at)
            walks = [walk(begin, given.tokens, given.output, seed) for seed in range(given.answers)]
            masks = sorted(took for some, _ in walks for took in some)
            takes = [took for _, some in walks for took in some]
            middle, most = statistics.median(masks), masks[len(masks) * 99 // 100]
            print(
                f"{name:7} {maker:10} first mask after {compile_ms:8.1f} ms"
                f"   masks: mean {statistics.mean(masks):6.1f} us, median {middle:6.1f}, p99 {most:7.1f}"
                f"   token taken in {statistics.mean(takes):4.1f} us"
            )


if __name__ == "__main__":
    main()
