"""The README of the checkpoints, written with the numbers that were measured."""

import time

from demo.measure import Result


def write(
    results: tuple[Result, Result],
    num_parameters: tuple[int, int],
    num_read: tuple[int, int],
    vocab_size: int,
    agreement: float,
    minutes: float,
    num_threads: int,
    seed: int,
) -> str:
    """Each pair is (model, draft)."""
    model, draft = results
    num_held_out = sum(total for _, total in model.exact.values())
    rows = "\n".join(
        f"| {category} | {total} | {right / total:.1%} | {draft.exact[category][0] / total:.1%} |"
        for category, (right, total) in model.exact.items()
    )
    return f"""\
# A model in the box

`model/` is a Llama-shaped chat model of {num_parameters[0] / 1e6:.2f} million parameters, `draft/` its draft sibling of
{num_parameters[1] / 1e6:.2f} million on the same tokenizer ({vocab_size} tokens, byte-level, ChatML, Hermes tool calls).
Both are small enough to be committed and to answer at once on any machine. They speak simple English about a small world:
small talk, capitals, colours, sums, counting, short and long stories, a made-up valley, JSON objects and tool calls. To
what they do not know they should say so. They are there to try and to test Penstock; they are of no other use.

## Measured

{time.strftime("%Y-%m-%d", time.gmtime())}, {minutes:.0f} minutes on {num_threads} CPU core(s), seed {seed}. The model read \
{num_read[0] / 1e6:.1f} million tokens, the draft {num_read[1] / 1e6:.1f} million.
Loss in nats over the assistant's tokens of held-out conversations, with the committed bf16 weights.

| | model | draft |
|---|---|---|
| held-out loss | {model.loss:.4f} | {draft.loss:.4f} |
| held-out perplexity | {model.perplexity:.3f} | {draft.perplexity:.3f} |
| next token right | {model.token_accuracy:.1%} | {draft.token_accuracy:.1%} |
| answers right to the last token | {model.exact_share:.1%} | {draft.exact_share:.1%} |

The draft writes the same token as the model, after the model's own greedy text, {agreement:.1%} of the time.

Exact answers by category ({num_held_out} conversations; stories and other open answers are left out):

| category | asked | model | draft |
|---|---|---|---|
{rows}

## What is held out

One in sixteen of: pairs of operands (with every wording and in both orders), JSON objects, tool arguments, lists to repeat,
sort or reverse, the people and things of a reading, animal and thing of a story. Of all else, such as capitals or the
valley, one in sixteen wordings of a question; the fact itself is trained on in other wordings. Greetings and other small talk
are only trained on, and are in neither number above. No held-out turn occurs in the training text (`demo/turns.py`, and a test).

## Train it yourself

```
pip install -e . && python -m demo.train
```

It needs nothing but Penstock's own dependencies; a C++ compiler makes it about a third faster (`--no-compile` does without).
`--minutes` and `--draft-minutes` set how long; `--steps` and `--draft-steps` make a run repeatable on the same machine.
"""
