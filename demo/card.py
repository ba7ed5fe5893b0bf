"""The README of the checkpoints, written with the numbers that were measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from demo.measure import Measured


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the script; a checkpoint may be the work of several, each going on from the one before."""

    date: str
    minutes: float
    num_threads: int
    seed: int
    learning_rate: float
    num_tokens: int
    """Read by the model."""
    num_draft_tokens: int


def results(measured: Measured) -> str:
    """The tables: what both do on held-out conversations."""
    model, draft = measured.model, measured.draft
    num_held_out = sum(total for _, total in model.exact.values())
    rows = "\n".join(
        f"| {category} | {total} | {right / total:.1%} | {draft.exact[category][0] / total:.1%} |"
        for category, (right, total) in model.exact.items()
    )
    return f"""\
| | model | draft |
|---|---|---|
| held-out loss | {model.loss:.4f} | {draft.loss:.4f} |
| held-out perplexity | {model.perplexity:.3f} | {draft.perplexity:.3f} |
| next token right | {model.token_accuracy:.1%} | {draft.token_accuracy:.1%} |
| answers right to the last token | {model.exact_share:.1%} | {draft.exact_share:.1%} |

On held-out prompts the draft agrees with {measured.agreement:.1%} of the tokens that the model writes greedily.

Answers right to the last token, by category ({num_held_out} conversations; stories and other open answers are left
out):

| category | asked | model | draft |
|---|---|---|---|
{rows}
"""


def write(measured: Measured, num_parameters: tuple[int, int], vocab_size: int, runs: Sequence[Run]) -> str:
    """num_parameters (model, draft)."""
    rows = "\n".join(
        f"| {run.date} | {run.minutes:.0f} | {run.num_threads} | {run.seed} | {run.learning_rate} "
        f"| {run.num_tokens / 1e6:.1f} M | {run.num_draft_tokens / 1e6:.1f} M |"
        for run in runs
    )
    return f"""\
# A model in the box

`model/` is a Llama-shaped chat model of {num_parameters[0] / 1e6:.2f} million parameters, `draft/` is its draft sibling
of {num_parameters[1] / 1e6:.2f} million. They share one tokenizer ({vocab_size} tokens, byte-level BPE, ChatML, Hermes
tool calls). Both are small enough to be committed, and answer at once on any machine. They speak simple English about a
small world: small talk, capitals, colours, sums, counting, short and long stories, a made-up valley, JSON objects and
tool calls. Asked for more, the model says that it does not know, or errs. They are there to try Penstock and to test
it.

## Measured

Loss is in nats over the assistant's tokens of held-out conversations, with the bf16 weights that are committed.
`python -m demo.train --measure` measures them again.

{results(measured)}
## What is held out

One in sixteen of: pairs of operands (with every wording, and in both orders where that does not matter), JSON objects,
tool arguments, lists to repeat, sort or reverse, the people and things of a reading, animal and thing of a story, and
what a user tells about himself. Of all else, such as capitals or the valley, one in sixteen wordings of a question: the
fact itself is learned from other wordings. Products are no real test, as times tables are trained on whole. Small talk
is only trained on, and is in no number above. No held-out turn occurs in the training text (`turns.py` decides, a test
looks).

## Train it yourself

```
pip install -e . && python -m demo.train
```

These weights come from the runs below, each going on (`--start`) from the one before. Minutes include measuring. The
earlier ones read earlier mixtures of the corpus, with less counting and copying; what is held out was the same.

| date | minutes | CPU cores | seed | learning rate | tokens read | by the draft |
|---|---|---|---|---|---|---|
{rows}

The script needs nothing but Penstock's own dependencies; a C++ compiler makes it about a third faster
(`--no-compile` does without). `--minutes` and `--draft-minutes` set how long; with `--steps` and `--draft-steps` the
number of steps does not depend on the machine.
"""
