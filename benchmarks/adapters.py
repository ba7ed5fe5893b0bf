"""What adapters cost: one batch in which everybody has an adapter of its own, against the same batch on the base.

    python -m benchmarks.adapters --shape S

No HTTP: distinct random prompts, submitted at once to one engine on the CPU, run to the end; base and adapters in turn,
in one process. Weights of base and adapters are random.
"""

from __future__ import annotations

import argparse
import random
from time import perf_counter

import torch

from policies import settings, wire
from policies.terms import Sampling
from worker.adapters import Adapter
from worker.adapters.adapter import Factor, Place
from worker.adapters.files import assembled
from worker.adapters.targets import targets_of
from worker.engine import Engine
from worker.models import Architecture, Means, random_decoder
from worker.native import library
from worker.process import prepare
from worker.runner import Runner
from worker.sampler import Sampler

CHOICES = {
    "all": None,
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "qv": ("self_attn.q_proj", "self_attn.v_proj"),
}
"""Which matrices the adapters change: all seven, or those named; "qv" is what PEFT changes where nothing is said."""


def random_adapter(
    name: str, architecture: Architecture, rank: int, modules: tuple[str, ...] | None, generator: torch.Generator
) -> Adapter:
    """Small enough to leave the logits usable."""
    factors: dict[tuple[int, Place], list[Factor]] = {}
    for layer in range(architecture.num_layers):
        for module, target in targets_of(architecture).items():
            if modules is None or module in modules:
                down = torch.randn((rank, target.num_in), generator=generator) * 0.02
                up = torch.randn((target.num_out, rank), generator=generator) * 0.02
                factors.setdefault((layer, target.product), []).append(Factor(down, up, target.left))
    return assembled(name, name, factors, architecture, torch.bfloat16, torch.device("cpu"), library())


class Round:
    """A batch from its submission to its end."""

    def __init__(
        self, engine: Engine, prompts: list[list[int]], adapters: list[Adapter | None], num_output_tokens: int
    ):
        began_at = perf_counter()
        sampling = Sampling(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            name = "" if adapter is None else adapter.adapter_id
            submit = wire.Submit(f"{began_at}-{number}", prompt, sampling, adapter=name)
            assert engine.add(submit, adapter) is None
        begun: set[str] = set()
        num_late_tokens, all_begun_at = 0, 0.0
        while engine.has_work:
            deltas, failed = engine.step()
            assert not failed, failed
            if all_begun_at:
                num_late_tokens += sum(len(delta.token_ids) for delta in deltas)
            begun.update(delta.request_id for delta in deltas)
            if not all_begun_at and len(begun) == len(prompts):
                all_begun_at = perf_counter()
        ended_at = perf_counter()
        self.seconds = ended_at - began_at
        self.tokens_per_s = len(prompts) * num_output_tokens / self.seconds
        self.prompt_s = all_begun_at - began_at
        """Until all have their first token."""
        self.decode_tokens_per_s = num_late_tokens / (ended_at - all_begun_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--adapters", type=int, default=64, help="adapters, and sequences in the batch")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--modules", choices=CHOICES, default="all")
    parser.add_argument("--input", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    prepare()
    asked = settings.Engine(
        device="cpu",
        dtype="bfloat16",
        num_threads=given.threads,
        prefix_cache=False,
        max_model_tokens=1024,
        # Random weights repeat themselves as no model does, the base and each adapter in another way.
        speculation=settings.Speculation(enabled=False),
    )
    torch.set_num_threads(given.threads)
    model = random_decoder(given.shape, torch.bfloat16, torch.device("cpu"), Means(library()))
    num_blocks = given.adapters * -(-(given.input + given.output) // asked.block_size) + 8
    runner = Runner.of(model, asked, num_blocks)
    engine = Engine(runner, Sampler(runner.vocab_size, ()), asked, perf_counter)
    generator, chance = torch.Generator().manual_seed(1), random.Random(1)
    modules = CHOICES[given.modules]
    adapters = [
        random_adapter(f"adapter-{number}", model.architecture, given.rank, modules, generator)
        for number in range(given.adapters)
    ]
    print(
        f"shape {given.shape}, {len(adapters)} adapters of rank {given.rank} on {given.modules}, "
        f"{adapters[0].num_bytes / 1e6:.2f} MB each; {given.input} tokens in, {given.output} out,"
        f" {given.threads} threads"
    )

    def one(of_each: list[Adapter | None]) -> Round:
        prompts = [[chance.randrange(runner.vocab_size) for _ in range(given.input)] for _ in of_each]
        return Round(engine, prompts, of_each, given.output)

    base: list[Adapter | None] = [None] * len(adapters)
    one(base)
    one(list(adapters))
    rounds = [(one(base), one(list(adapters))) for _ in range(given.rounds)]
    for alone, adapted in rounds:
        print(
            f"base {alone.tokens_per_s:7.0f} tok/s (prompts {alone.prompt_s:.2f} s, then"
            f" {alone.decode_tokens_per_s:.0f})"
            f"   adapters {adapted.tokens_per_s:7.0f} (prompts {adapted.prompt_s:.2f} s, then"
            f" {adapted.decode_tokens_per_s:.0f})   ratio {adapted.tokens_per_s / alone.tokens_per_s:.3f},"
            f" prompts {alone.prompt_s / adapted.prompt_s:.3f},"
            f" decode {adapted.decode_tokens_per_s / alone.decode_tokens_per_s:.3f}"
        )
    mean = [sum(each.tokens_per_s for each in side) for side in zip(*rounds, strict=True)]
    print(f"ratio of all rounds: {mean[1] / mean[0]:.3f}")


if __name__ == "__main__":
    main()
