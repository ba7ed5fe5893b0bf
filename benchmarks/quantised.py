"""What the forms that matrices and KV are stored in cost in accuracy: divergence from bfloat16, token by token.

The bundled model reads held-out conversations of its corpus, and a shape with random weights reads random tokens; each
form gives a distribution after each token, and the Kullback-Leibler divergence from bfloat16's to it is what it loses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer

from demo import MODEL_DIR
from demo.measure import held_out
from policies import settings
from worker.bench import checkpoint
from worker.inputs import Span
from worker.kv_cache import KVCache
from worker.models import SHAPES
from worker.native import library
from worker.process import prepare
from worker.runner import Runner

NUM_TOKENS_AT_ONCE = 256
"""A row of logits of a large vocabulary is more than half a megabyte."""

WEIGHTS_ALONE = {"quantize_activations": False}
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantize": "int8"},
    "int8, weights alone": {"quantize": "int8", **WEIGHTS_ALONE},
    "int4": {"quantize": "int4"},
    "int4, weights alone": {"quantize": "int4", **WEIGHTS_ALONE},
    "fp8, weights alone": {"quantize": "fp8", **WEIGHTS_ALONE},
    "bfloat16, KV in int8": {"kv_dtype": "int8"},
    "int8, KV in int8": {"quantize": "int8", "kv_dtype": "int8"},
}
"""As engine settings."""
ON_CUDA: dict[str, dict[str, Any]] = {
    "fp8": {"quantize": "fp8"},
    "bfloat16, KV in fp8": {"kv_dtype": "fp8"},
    "fp8, KV in fp8": {"quantize": "fp8", "kv_dtype": "fp8"},
}
"""Besides, on such a device alone."""
SLOW = ("fp8, weights alone",)
"""On a CPU, so there for the bundled model only."""


@dataclass(frozen=True, slots=True)
class Text:
    """token_ids, and which of them is to be foretold by those before it, for the loss; all count for the divergence."""

    token_ids: list[int]
    learned: list[bool]


@dataclass(slots=True)
class Divergence:
    """Of one form."""

    nats: torch.Tensor
    """[num_tokens]"""
    share_same_top: float
    loss: float
    """Mean over the learned tokens, in nats."""
    kv_bytes: float
    """Of KV, a token."""


def conversations(number: int) -> list[Text]:
    tokenizer = Tokenizer.from_file(str(Path(MODEL_DIR) / "tokenizer.json"))
    return [Text(each.token_ids, each.learned) for each in held_out(tokenizer, number)]


def noise(vocab_size: int, number: int, num_tokens: int, seed: int = 0) -> list[Text]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab_size, (number, num_tokens), generator=generator).tolist()
    return [Text(row, [True] * num_tokens) for row in rows]


def runner_of(source: str, texts: list[Text], form: dict[str, Any], device: str) -> Runner:
    longest = max(len(text.token_ids) for text in texts)
    told = {"device": device, "dtype": "bfloat16", "max_model_tokens": longest, "max_sequences": 1}
    return Runner.load(source, settings.Engine(**{**told, **form}))


def kv_bytes_of(cache: KVCache) -> float:
    """A token's."""
    scales = [scale for scale in (*cache.key_scales, *cache.value_scales) if scale is not None]
    return sum(tensor.nbytes for tensor in (*cache.keys, *cache.values, *scales)) / cache.keys[0].shape[1]


def distributions(runner: Runner, texts: list[Text]) -> Iterator[torch.Tensor]:
    """[num_tokens of the text, vocab_size] log probabilities, text by text."""
    longest = max(len(text.token_ids) for text in texts)
    table = list(range(-(-longest // runner.block_size)))
    for text in texts:
        parts = []
        for start in range(0, len(text.token_ids), NUM_TOKENS_AT_ONCE):
            ids = text.token_ids[start : start + NUM_TOKENS_AT_ONCE]
            parts.append(runner.forward([Span(ids, start, table, len(ids))]).log_softmax(-1).cpu())
        yield torch.cat(parts)


def divergence(source: str, texts: list[Text], form: dict[str, Any], device: str) -> Divergence:
    """From bfloat16, both computed text by text so that neither is held as a whole."""
    nats, same, losses = [], [], []
    base, runner = (runner_of(source, texts, each, device) for each in (FORMS["bfloat16"], form))
    for text, plain, other in zip(texts, distributions(base, texts), distributions(runner, texts), strict=True):
        nats.append((plain.exp() * (plain - other)).sum(-1))
        same.append(plain.argmax(-1) == other.argmax(-1))
        following, learned = torch.tensor(text.token_ids[1:]), torch.tensor(text.learned[1:])
        losses.append(-other[:-1].gather(1, following[:, None])[:, 0][learned])
    share_same_top, loss = float(torch.cat(same).float().mean()), float(torch.cat(losses).mean())
    assert isinstance(runner.cache, KVCache)
    return Divergence(torch.cat(nats), share_same_top, loss, kv_bytes_of(runner.cache))


def forms_on(device: str, model: str) -> dict[str, dict[str, Any]]:
    if device == "cuda":
        return {**FORMS, **ON_CUDA}
    return {name: form for name, form in FORMS.items() if model == "demo" or name not in SLOW}


def computed_by(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    kernels = library()
    return f"compiled kernels for few bits: {'yes' if kernels is not None and kernels.has_int8 else 'no'}"


@contextmanager
def directory_of(model: str) -> Iterator[str]:
    if model == "demo":
        yield str(MODEL_DIR)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as path:
        checkpoint.write(model, Path(path))
        yield path


@click.command()
@click.option("--model", type=click.Choice(["demo", *sorted(SHAPES)]), default="demo", show_default=True)
@click.option("--number", type=click.IntRange(0), default=0, help="Of texts; 0: 200 conversations, or 4 of 256 tokens.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def main(model: str, number: int, device: str) -> None:
    """Print the table of one model."""
    torch.set_grad_enabled(False)
    texts = conversations(number or 200) if model == "demo" else noise(SHAPES[model].vocab_size, number or 4, 256)
    click.echo(
        f"{model}: {len(texts)} texts, {sum(len(text.token_ids) for text in texts)} tokens, torch {torch.__version__},"
        f" {computed_by(device)}\n"
    )
    click.echo(
        "| form | divergence, nats a token: mean | 99th of 100 | same likeliest token | loss | KV, bytes a token |"
    )
    click.echo("|---|---|---|---|---|---|")
    with directory_of(model) as source:
        for name, form in forms_on(device, model).items():
            found = divergence(source, texts, form, device)
            click.echo(
                f"| {name} | {float(found.nats.mean()):.6f} | {float(found.nats.quantile(0.99)):.5f}"
                f" | {found.share_same_top:.2%} | {found.loss:.4f} | {found.kv_bytes:.0f} |"
            )


if __name__ == "__main__":
    prepare()
    main()
