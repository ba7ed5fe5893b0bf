"""One rank's part of every step, the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies import settings
from worker.inputs import Span
from worker.models import Decoder, Layout
from worker.parallel.control import Control, Step
from worker.parallel.link import ProcessLink
from worker.parallel.plan import LEAST_PART_TOKENS, Copy, decoded, in_parts
from worker.runner import Runner


def layout_of(engine: settings.Engine) -> Layout:
    """As configured."""
    return Layout(engine.tensor_parallel, engine.pipeline_parallel)


class Rank:
    """A runner that computes its part together with the others'."""

    def __init__(
        self,
        model: Decoder,
        engine: settings.Engine,
        num_blocks: int,
        link: ProcessLink,
        least_part_tokens: int = LEAST_PART_TOKENS,
    ) -> None:
        """Raises ModelError."""
        model.join(link)
        self.runner = Runner.of(model, engine, num_blocks)
        self._link = link
        self._num_stages, self._least_part_tokens = model.shard.layout.pipeline, least_part_tokens

    def step(self, copies: Sequence[Copy], spans: Sequence[Span]) -> Tensor:
        """The copies, then the pass: logits as ``Runner.forward`` gives them on rank 0, none elsewhere."""
        for source, target in copies:
            self.runner.copy_block(source, target)
        parts = in_parts(spans, self._num_stages, self._least_part_tokens)
        logits = [self.runner.forward(part) for part in parts]
        self._link.settle()
        return logits[0] if len(logits) == 1 else torch.cat(logits)


def serve(control: Control, rank: Rank) -> None:
    """A rank that is not 0: steps as they are told, until rank 0 is gone."""
    while (message := control.hear()) is not None:
        assert isinstance(message, Step), message
        rank.step(*decoded(message.numbers))
