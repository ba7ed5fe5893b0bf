"""Some seconds of doubt, once a machine: the compiled kernels against torch, part by part and in whole steps.

Run as ``python -m worker.proof SHARED_OBJECT NUM_THREADS`` by ``worker.native.trusted``: an instruction that this
machine does not have ends this process, and no worker. Says on stdout what it is trying.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from policies.settings import Engine, Quantization
from worker.adapters import Adapter
from worker.adapters.adapter import Factor, Place
from worker.adapters.files import assembled
from worker.adapters.targets import targets_of
from worker.attention import TwoPools
from worker.inputs import Span
from worker.means import means_of, whole_of
from worker.models import Architecture, Shard
from worker.models.architecture import Rope
from worker.models.linear import Means
from worker.models.load import build_decoder
from worker.models.sources import PlainSource
from worker.native import Library
from worker.native.check import agrees_with_torch
from worker.native.trusted import DISPROVED
from worker.room import kv_of
from worker.runner import Runner
from worker.speculation.following import follow

CPU = torch.device("cpu")
MAX_TOKENS, NUM_BLOCKS, VOCAB_SIZE = 2048, 64, 300
PLAIN = Architecture(
    name="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_positions=MAX_TOKENS,
    norm_eps=1e-6,
    attention_scale=2.0,  # each token sees a few others rather than the mean of all
    ropes=(Rope(rotary_dim=32, max_positions=MAX_TOKENS),),
    layer_ropes=(0, 0),
    windows=(0, 0),
    qkv_bias=True,
    mlp_bias=True,
)
RICH = replace(
    PLAIN,
    windows=(40, 0),
    ropes=(*PLAIN.ropes, Rope(rotary_dim=32, max_positions=MAX_TOKENS, theta=500.0)),
    layer_ropes=(0, 1),
    attention_post_norm="post_attention_norm",
    mlp_post_norm="post_mlp_norm",
    embedding_scale=9.7,
    attention_softcap=20.0,
    logits_softcap=30.0,
    activation="gelu_tanh",
    qk_norm="head",
)
"""Gemma has most of these."""
UNUSUAL = replace(
    RICH,
    head_dim=64,
    intermediate_size=1056,
    ropes=tuple(replace(rope, rotary_dim=32) for rope in RICH.ropes),
    qk_norm="width",
    activation="gelu",
    logits_softcap=0.0,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is computed."""

    architecture: Architecture = PLAIN
    form: Quantization = "none"
    kv_dtype: Literal["auto", "int8"] = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    has_adapter: bool = False
    deterministic: bool = False
    codes: bool = True
    """See Means."""
    parts: bool = False
    """Layers with windows have a pool of their own."""
    is_watched: bool = False
    """What is between the layers, and what the head is given, is looked at, too."""


PARTS = "parts"
CASES = {
    "bfloat16": Case(has_adapter=True),
    "bfloat16, windows": Case(RICH, codes=False),
    "bfloat16, repeatable": Case(RICH, deterministic=True, has_adapter=True),
    "bfloat16, two pools": Case(UNUSUAL, parts=True, is_watched=True),
    "int8": Case(form="int8", has_adapter=True),
    "int8, windows, KV in int8": Case(RICH, form="int8", kv_dtype="int8"),
    "int4": Case(form="int4", has_adapter=True),
    "float32": Case(dtype="float32", has_adapter=True),
    "float32, windows, KV in int8": Case(RICH, dtype="float32", kv_dtype="int8"),
    "float32, two pools": Case(UNUSUAL, dtype="float32", parts=True, is_watched=True),
    "float32, int8": Case(form="int8", dtype="float32"),
    "float32, int4": Case(form="int4", dtype="float32"),
}
TOLERANCES = {"none": 0.03, "int8": 0.07, "int4": 0.07}
"""How far logits may be from float32's, as a part of their deviation: some three times as far as they are."""
NUM_FOLLOWING = 5


def failures(library: Library) -> Iterator[str]:
    """What of PARTS and CASES does not compute what torch does. Says what is tried before it is."""
    print(PARTS, flush=True)
    if not agrees_with_torch(library):
        yield PARTS
    for name, case in CASES.items():
        print(name, flush=True)
        with torch.inference_mode():
            is_fine = agrees(library, case)
        if not is_fine:
            yield name


def agrees(library: Library, case: Case) -> bool:
    """Whether steps of all kinds, and several in a row, lead to torch's logits in float32."""
    exactly = replace(case, dtype="float32", kv_dtype="auto", parts=False)
    own, exact, steps = _runner(case, library), _runner(exactly, None), _steps()
    pairs: list[tuple[Adapter | None, Adapter | None]] = [(None, None)]
    if case.has_adapter:
        pairs.append((_adapter(case, library), _adapter(exactly, None)))
    tolerance = TOLERANCES[case.form]
    for ours, theirs in pairs:
        for step in steps:
            got = own.forward([replace(span, adapter=ours) for span in step])
            expected = exact.forward([replace(span, adapter=theirs) for span in step])
            if not _is_near(got, expected, tolerance):
                return False
            if case.is_watched and not all(
                _is_near(seen.float(), wanted, tolerance) for seen, wanted in zip(_seen(own), _seen(exact), strict=True)
            ):
                return False
    # What drafts has one pool.
    return case.parts or _follows(own, exact, steps[-1], tolerance)


def _seen(runner: Runner) -> list[Tensor]:
    model = runner.keep_hidden()
    assert model.hidden is not None
    return [*model.tapped, model.hidden]


def _follows(own: Runner, exact: Runner, spans: Sequence[Span], tolerance: float) -> bool:
    """What is said at once to be likeliest, several tokens on, is nearly that for torch, too, and so is what comes
    after it, for which keys and values have to be where they belong."""
    for token_ids in follow(own, spans, NUM_FOLLOWING):
        logits = exact.forward(spans)
        taken = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        if not bool((logits.amax(1) - taken <= 4 * tolerance * logits.std(1)).all()):
            return False
        spans = [
            replace(span, token_ids=[token_id], start=span.start + len(span.token_ids))
            for span, token_id in zip(spans, token_ids, strict=True)
        ]
    return _is_near(own.forward(spans), exact.forward(spans), tolerance)


def _is_near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Of each row."""
    away = (got - expected).square().mean(1).sqrt()
    return bool((away <= tolerance * expected.std(1)).all())


def _steps() -> list[list[Span]]:
    """A prompt in two parts beside a short text; three that begin as it does; a draft that is verified; and five that
    decode, of which four have 288 tokens in common.
    """
    ids = torch.randint(VOCAB_SIZE, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    first, short = list(range(NUM_BLOCKS - 1, NUM_BLOCKS - 26, -1)), [0, 1]
    others = [[*first[:18], 2 + 3 * each, 4 + 3 * each, 3 + 3 * each] for each in range(3)]
    ends = [300, 289, 305, 321]

    def decodes(past: int) -> list[Span]:
        tables = (first, *others)
        return [Span([ids[end + past]], end + past, table, 1) for end, table in zip(ends, tables, strict=True)]

    return [
        [Span(ids[:200], 0, first, 0), Span(ids[:9], 0, short, 1)],
        [Span(ids[200:300], 200, first, 1), Span(ids[9:10], 9, short, 1)],
        [Span(ids[288:end], 288, table, 1) for end, table in zip(ends[1:], others, strict=True)],
        [*decodes(0), Span(ids[10:13], 10, short, 3)],
        [*decodes(1), Span(ids[13:14], 13, short, 1)],
    ]


def _runner(case: Case, library: Library | None) -> Runner:
    """Its numbers are the same in any type, and however they are computed."""
    generator = torch.Generator().manual_seed(3)
    dtype = getattr(torch, case.dtype)

    def take(name: str, size: tuple[int, ...]) -> Tensor:
        scale = 0.1 if len(size) > 1 else 0.5
        return (torch.randn(size, generator=generator) * scale).bfloat16().to(dtype)

    engine = Engine(device="cpu", dtype=case.dtype, kv_dtype=case.kv_dtype, deterministic=case.deterministic)
    means = Means(library, library is not None, case.deterministic, case.codes)
    model = build_decoder(Shard.of(case.architecture), PlainSource(take), dtype, CPU, MAX_TOKENS, means, case.form)
    cache = kv_of(model, engine, NUM_BLOCKS, NUM_BLOCKS if case.parts else 0)
    if isinstance(cache, TwoPools):
        cache.companions.copy_(torch.randperm(NUM_BLOCKS, generator=generator))
    attention, ops = means_of(engine, model, cache, library)
    whole = whole_of(model, cache, library)
    if case.is_watched:
        model.keeps_hidden, model.taps = True, tuple(range(case.architecture.num_layers))
    return Runner(model, cache, attention, ops, MAX_TOKENS, None, whole, library, case.deterministic)


def _adapter(case: Case, library: Library | None) -> Adapter:
    """Of every matrix of every layer."""
    generator = torch.Generator().manual_seed(5)
    factors: dict[tuple[int, Place], list[Factor]] = {}
    for layer in range(case.architecture.num_layers):
        for target in targets_of(case.architecture).values():
            down, up = (
                (torch.randn(size, generator=generator) * 0.1).bfloat16()
                for size in ((7, target.num_in), (target.num_out, 7))
            )
            factors.setdefault((layer, target.product), []).append(Factor(down, up, target.left))
    return assembled("any", "any", factors, case.architecture, getattr(torch, case.dtype), CPU, library)


def main(path: str, num_threads: int) -> int:
    torch.set_num_threads(num_threads)
    # The last line is what is wrong.
    return DISPROVED if next(failures(Library(path)), None) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
