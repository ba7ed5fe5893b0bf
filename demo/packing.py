"""From conversations to tensors: render with the chat template, encode, pack into rows.

The loss is taken on what the assistant says, its end mark included, and on plain pages; what a user, the system or a
tool says is only read.
"""

import json
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch import Tensor

from demo import tokenizer as chat
from demo.corpus import Sample

Piece = tuple[str, bool]
"""A text, and whether the loss is taken on it."""

IGNORED = -100


def renderer() -> Callable[..., str]:
    """The chat template as Hugging Face renders it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(chat.CHAT_TEMPLATE).render


def pieces(render: Callable[..., str], sample: Sample) -> list[Piece]:
    """The sample's text, cut where the assistant begins and ends."""
    if not sample.messages:
        return [(sample.page + chat.END_OF_TEXT, True)]
    text = render(messages=sample.messages, tools=sample.tools, add_generation_prompt=False)
    opening = chat.START + "assistant\n"
    before, *rest = text.split(opening)
    cut: list[Piece] = [(before + opening, False)]
    for number, part in enumerate(rest):
        said, _, after = part.partition(chat.END)
        cut.append((said + chat.END, True))
        cut.append((after + (opening if number < len(rest) - 1 else ""), False))
    return cut


def encode(tokenizer: Tokenizer, cut: list[Piece]) -> tuple[list[int], list[bool]]:
    """(token ids, whether each is learned)."""
    token_ids: list[int] = []
    learned: list[bool] = []
    for (_, learn), encoding in zip(cut, tokenizer.encode_batch_fast([text for text, _ in cut]), strict=True):
        token_ids += encoding.ids
        learned += [learn] * len(encoding.ids)
    return token_ids, learned


def batches(
    tokenizer: Tokenizer, stream: Iterator[Sample], num_rows: Callable[[], tuple[int, int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(token ids [rows, length] i64, labels [rows, length] i64: the next token or IGNORED), rows packed without gaps.

    `num_rows` gives (rows, length) of the next batch. A sample that a row cuts off goes on in the next.
    """
    render = renderer()
    ids: list[int] = []
    learned: list[bool] = []
    while True:
        rows, length = num_rows()
        needed = rows * length + 1
        while len(ids) < needed:
            for sample in islice(stream, 64):
                more, flags = encode(tokenizer, pieces(render, sample))
                ids += more
                learned += flags
        token_ids = torch.tensor(ids[:needed])
        labels = torch.where(torch.tensor(learned[1:needed]), token_ids[1:], IGNORED)
        yield token_ids[:-1].view(rows, length), labels.view(rows, length)
        ids, learned = ids[needed - 1 :], learned[needed - 1 :]
