"""One rank's part of every step, the same on all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from policies import settings
from worker.budget import OutOfMemory
from worker.inputs import Span
from worker.models import Decoder, Layout
from worker.parallel.adapters import Shelf
from worker.parallel.control import Control, Step, Unable
from worker.parallel.link import LinkBroken, ProcessLink
from worker.parallel.plan import LEAST_PART_TOKENS, Companion, Copy, decoded, in_parts
from worker.runner import Runner

log = logging.getLogger("penstock.worker")


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
        num_windowed_blocks: int,
        link: ProcessLink,
        least_part_tokens: int = LEAST_PART_TOKENS,
    ) -> None:
        """Raises ModelError."""
        model.join(link)
        self.runner = Runner.of(model, engine, num_blocks, num_windowed_blocks)
        self.runner.have_pages_ready()
        self._link = link
        self._num_stages, self._least_part_tokens = model.shard.layout.pipeline, least_part_tokens

    def step(
        self,
        copies: Sequence[Copy],
        spans: Sequence[Span],
        companions: Sequence[Companion] = (),
        tell: Callable[[Unable], None] | None = None,
    ) -> Tensor | Unable:
        """The copies, then the pass: logits as ``Runner.forward`` gives them on rank 0, none elsewhere.
        ``companions``: of blocks that have got others, or lost them, since the step before.

        Where this rank cannot compute, it tells so and then does what the others wait for, so that all of them come to
        the step's end; whoever sees it there can know of every rank that could not. Raises LinkBroken where another
        rank is gone.
        """
        with torch.inference_mode():
            for pool, source, target in copies:
                self.runner.cache.caches[pool].copy_block(source, target)
        if self.runner.apart is not None:
            for block_id, companion in companions:
                self.runner.apart.companions[block_id] = companion
        parts = in_parts(spans, self._num_stages, self._least_part_tokens)
        logits: list[Tensor] = []
        unable: Unable | None = None
        for part in parts:
            before = self._link.num_calls
            if unable is None:
                try:
                    logits.append(self.runner.forward(part))
                    continue
                except (AssertionError, LinkBroken):
                    raise
                except Exception as error:
                    unable = _unable(error)
                if tell is not None:
                    tell(unable)
            self.runner.keep_up(part, self._link.num_calls - before)
        if not any(span.num_logits for span in parts[-1]):
            self._link.meet()  # else rank 0, for the logits, has waited for all
        self._link.settle()
        if unable is not None:
            return unable
        return logits[0] if len(logits) == 1 else torch.cat(logits)


def _unable(error: Exception) -> Unable:
    if not isinstance(error, OutOfMemory):
        log.error("a part of a step failed", exc_info=error)
        return Unable(f"{type(error).__name__}: {error}", False)
    return Unable(str(error), True)


def serve(control: Control, rank: Rank, shelf: Shelf) -> None:
    """A rank that is not 0: steps as they are told, until rank 0 is gone. Raises LinkBroken where another one is."""
    while (message := control.hear()) is not None:
        assert isinstance(message, Step), message
        shelf.drop(message.gone)
        rank.step(*decoded(message.numbers, shelf.adapters), tell=control.tell)
