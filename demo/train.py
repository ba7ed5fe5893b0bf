"""Trains the demo model and its draft from nothing: `python -m demo.train`.

Generates the corpus, trains the tokenizer, the model and then the draft, which learns from the model's own predictions,
prints what they do on held-out conversations and writes both checkpoints and a README with the numbers.
Needs torch, tokenizers, safetensors and jinja2, which Penstock itself depends on; a C++ compiler makes it faster.
Corpus, tokenizer and first weights follow from the seed. By default the length is given in minutes, so the number of
steps depends on the machine; with --steps and --draft-steps it does not.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from demo import card, checkpoint
from demo import tokenizer as chat
from demo.corpus import samples
from demo.measure import HeldOut, held_out, measure, measure_both
from demo.network import Decoder, Shape
from demo.packing import IGNORED, batches, pieces, renderer

BATCH_TOKENS = 4096
LEARNED_SHARE = 0.62
"""Of a batch's tokens at most this share has a loss: a fixed number compiles once."""
RUNS = "runs.json"
"""The history of the checkpoints, kept beside them."""
LONG_FROM = 0.88
"""From this part of the training on, rows are long."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train, and on what."""

    minutes: float
    steps: int | None
    seed: int
    learning_rate: float
    length: int = 512
    long_length: int = 2048
    batch_tokens: int = BATCH_TOKENS
    compiled: bool = True


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def model_shape(vocab_size: int) -> Shape:
    return Shape(256, 5, 4, 2, 64, 704, vocab_size)


def draft_shape(vocab_size: int) -> Shape:
    return Shape(128, 2, 2, 1, 64, 384, vocab_size)


def learning_rate_at(progress: float, step: int) -> float:
    """A factor: warm-up, a plateau, and a straight way down over the last 60 %."""
    return min(1.0, (step + 1) / 60, max(0.01, (1 - progress) / 0.6))


def hidden_of(decoder: Decoder, token_ids: Tensor, positions: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden: Tensor = decoder(token_ids).flatten(0, 1)[positions]
    return hidden


def plain_loss(decoder: Decoder) -> Loss:
    """Cross entropy of the text itself."""

    def loss(token_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        hidden = hidden_of(decoder, token_ids, positions)
        with torch.autocast("cpu", torch.bfloat16):
            logits = decoder.logits(hidden)
        return F.cross_entropy(logits.float(), wanted, ignore_index=IGNORED)

    return loss


def taught_loss(draft: Decoder, teacher: Decoder) -> Loss:
    """How far the draft's predictions are from the teacher's (Hinton et al. 2015, at temperature 1)."""

    def loss(token_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = teacher.logits(teacher(token_ids).flatten(0, 1)[positions]).float().softmax(-1)
            logits = draft.logits(draft(token_ids).flatten(0, 1)[positions]).float()
        losses = -(target * logits.log_softmax(-1)).sum(-1)
        kept = (wanted != IGNORED).float()
        return (losses * kept).sum() / kept.sum()

    return loss


def learned_positions(labels: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """labels [rows, length] -> exactly `number` positions in the flattened batch and what is wanted there."""
    flat = labels.flatten()
    learned = (flat != IGNORED).nonzero().flatten()
    chosen = learned[torch.randperm(len(learned))[:number]]
    positions = F.pad(chosen, (0, number - len(chosen)))
    wanted = F.pad(flat[chosen], (0, number - len(chosen)), value=IGNORED)
    return positions, wanted


def fit(decoder: Decoder, loss_of: Loss, tokenizer: Tokenizer, plan: Plan, report: Callable[[str], None]) -> int:
    """Trains in place and returns the number of tokens read.

    `report` is given a line about once a minute.
    """
    matrices = [p for name, p in decoder.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in decoder.named_parameters() if p.dim() != 2 or "embed" in name]
    # Orthogonalised momentum for the matrices (Jordan et al. 2024), Adam for the rest.
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, plan.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    compute = torch.compile(loss_of, dynamic=False) if plan.compiled else loss_of
    started_at = reported_at = time.monotonic()
    progress, step, recent = 0.0, 0, 0.0

    def rows() -> tuple[int, int]:
        length = plan.long_length if progress >= LONG_FROM else plan.length
        return plan.batch_tokens // length, length

    for token_ids, labels in batches(tokenizer, samples(plan.seed), rows):
        minutes = (time.monotonic() - started_at) / 60
        progress = minutes / plan.minutes if plan.steps is None else step / plan.steps
        if progress >= 1:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * learning_rate_at(progress, step)
        loss = compute(token_ids, *learned_positions(labels, int(LEARNED_SHARE * plan.batch_tokens)))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        recent = loss.item() if step == 1 else 0.95 * recent + 0.05 * loss.item()
        now = time.monotonic()
        if now - reported_at > 60:
            reported_at = now
            rate = step * plan.batch_tokens / (now - started_at)
            report(f"  {progress:5.1%}  step {step}  loss {recent:.4f}  {rate:.0f} tokens/s")
    return step * plan.batch_tokens


def make_tokenizer(seed: int, number: int, vocab_size: int) -> Tokenizer:
    render = renderer()
    texts = ("".join(text for text, _ in pieces(render, sample)) for sample in islice(samples(seed), number))
    return chat.train(texts, vocab_size)


def train(
    out: Path,
    plan: Plan,
    draft_plan: Plan,
    shapes: tuple[Callable[[int], Shape], Callable[[int], Shape]] = (model_shape, draft_shape),
    num_tokenizer_samples: int = 30_000,
    num_held_out: int = 2000,
    start: Path | None = None,
) -> None:
    """Both checkpoints and the README, into `out`; `start` holds earlier ones to go on from."""
    torch.manual_seed(plan.seed)
    started_at = time.monotonic()
    if start:
        (model, tokenizer), (draft, _) = (checkpoint.load(start / name) for name in ("model", "draft"))
    else:
        tokenizer = make_tokenizer(plan.seed, num_tokenizer_samples, chat.VOCAB_SIZE)
        vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
        model, draft = (Decoder(shape(vocab_size)) for shape in shapes)
    counts = [sum(p.numel() for p in decoder.parameters()) for decoder in (model, draft)]
    print(
        f"vocabulary {tokenizer.get_vocab_size()}, model {counts[0]:,} and draft {counts[1]:,} parameters", flush=True
    )
    conversations: list[HeldOut] = held_out(tokenizer, num_held_out)
    few = conversations[: max(1, num_held_out // 8)]

    def report_on(decoder: Decoder, name: str) -> Callable[[str], None]:
        def report(line: str) -> None:
            result = measure(decoder, few)
            print(f"{line}  held-out {result.loss:.4f}  exact {result.exact_share:.1%}", flush=True)
            checkpoint.save(decoder, tokenizer, out / name)

        return report

    num_read = fit(model, plain_loss(model), tokenizer, plan, report_on(model, "model"))
    checkpoint.save(model, tokenizer, out / "model")
    num_draft_read = fit(draft, taught_loss(draft, model), tokenizer, draft_plan, report_on(draft, "draft"))
    checkpoint.save(draft, tokenizer, out / "draft")

    # What is measured is what is committed: the weights rounded to bf16.
    for decoder in (model, draft):
        decoder.to(torch.bfloat16).float()
    measured = measure_both(model, draft, conversations, chat.token_id(tokenizer, chat.END))
    minutes = round((time.monotonic() - started_at) / 60, 1)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    run = card.Run(date, minutes, torch.get_num_threads(), plan.seed, plan.learning_rate, num_read, num_draft_read)
    runs = [*(card.Run(**earlier) for earlier in json.loads((start / RUNS).read_text())), run] if start else [run]
    (out / RUNS).write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
    text = card.write(measured, (counts[0], counts[1]), tokenizer.get_vocab_size(), runs)
    (out / "README.md").write_text(text)
    print(text)


def measure_again(out: Path, num_held_out: int = 2000) -> None:
    """Prints what the checkpoints in `out` do on held-out conversations."""
    (model, tokenizer), (draft, _) = (checkpoint.load(out / name) for name in ("model", "draft"))
    conversations = held_out(tokenizer, num_held_out)
    print(card.results(measure_both(model, draft, conversations, chat.token_id(tokenizer, chat.END))))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where model/ and draft/ are written")
    parser.add_argument("--start", type=Path, help="go on from the model/ and draft/ in this directory")
    parser.add_argument("--minutes", type=float, default=50, help="for the model (default: %(default)s)")
    parser.add_argument("--draft-minutes", type=float, default=12, help="for the draft (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="for the model, instead of --minutes")
    parser.add_argument("--draft-steps", type=int, help="for the draft, instead of --draft-minutes")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="do without a C++ compiler")
    parser.add_argument("--measure", action="store_true", help="measure what --out holds and train nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        return measure_again(options.out)
    shared = {"seed": options.seed, "learning_rate": options.learning_rate, "compiled": not options.no_compile}
    train(
        options.out,
        Plan(options.minutes, options.steps, **shared),
        Plan(options.draft_minutes, options.draft_steps, **shared),
        start=options.start,
    )


if __name__ == "__main__":
    main()
