"""The tokens of a step: whose rows of the logits are sampled together, and who is to blame where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from worker.device import is_out_of_memory
from worker.flight import Draw
from worker.grammar.errors import GuideLost
from worker.sequence import Sequence
from worker.transfer import rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from worker.grammar.masks import MaskMaker
    from worker.sampler import Sampler
    from worker.sampling.masks import Masks

Faults = dict[str, Exception]
"""Requests that cannot go on, and why."""

log = logging.getLogger("penstock.worker")


def told(error: Exception) -> tuple[str, str]:
    """The code and the reason of a request's failure. A grammar that turns out to be too much on the way is its own
    fault, as one that cannot be compiled is."""
    if isinstance(error, GuideLost):
        return "invalid_request", str(error)
    return "internal", f"{type(error).__name__}: {error}"


def unusable(sequence: Sequence, drafted: list[int]) -> Exception:
    """Why nothing could be drawn from its logits, behind so much of its draft."""
    guide, sampling = sequence.guide, sequence.sampling
    num_output = sequence.num_known - sequence.num_prompt_tokens + len(drafted)
    if (
        guide is not None
        and sampling.stop_token_ids
        and num_output < sampling.min_tokens
        and not guide.allows_others(sequence.stop_token_ids, drafted)
    ):
        return GuideLost("the grammar leaves nothing but stop tokens before min_tokens are reached")
    return ArithmeticError("the model gave no usable logits")


class Drawing:
    """One sampler, and the requests that it may have stumbled over."""

    def __init__(
        self,
        sampler: Sampler,
        maxima_of: Callable[[Tensor], Tensor | None],
        put_back: Callable[[Sequence], None],
        ran_out: Callable[[list[int], Exception], object],
    ) -> None:
        """``maxima_of``: as Runner.maxima_of; ``put_back``: has a sequence compute its logits anew; ``ran_out``: learns
        of a step of so many tokens of each sequence for which there was no memory."""
        self._sampler = sampler
        self._maxima_of = maxima_of
        self._put_back, self._ran_out = put_back, ran_out
        self._mask_maker: MaskMaker | None = None
        """As soon as a sequence has a guide."""
        self._suspects: set[str] = set()
        """Requests that were in a batch whose sampling failed; they are sampled one by one until they pass."""

    def foresee(self, batch: Iterable[Sequence]) -> None:
        """These will be drawn next, all of whose tokens are known: what it takes can begin beside the forward pass."""
        if self._mask_maker is not None:
            self._mask_maker.foresee(batch)

    def settle(self) -> None:
        """Nothing will be drawn of what was foreseen, whatever became of it."""
        if self._mask_maker is not None:
            try:
                self._mask_maker.settle()
            except AssertionError:
                raise
            except Exception as error:
                log.warning("masks that nothing is drawn by were not made: %s", error)

    def draw(self, logits: Tensor, indices: list[int], sequences: list[Sequence]) -> tuple[list[Draw], Faults]:
        """indices: of the rows of the logits; of each sequence one, and one for each token of its draft. One batched
        sample, and one each for those whose last batch failed."""
        draws: list[Draw] = []
        faults: Faults = {}
        suspects = self._suspects
        try:
            logits = rows_of(logits, indices)
        except RuntimeError as error:
            self.settle()
            self._stumble(error, sequences, faults)
            return draws, faults
        if not suspects:
            self._draw_together(logits, sequences, draws, faults)
            return draws, faults
        together: list[Sequence] = []
        rows_together: list[int] = []
        alone: list[tuple[list[Sequence], list[int]]] = []
        end = 0
        for sequence in sequences:
            begin, end = end, end + 1 + len(sequence.draft_token_ids)
            if sequence.request.request_id in suspects:
                alone.append(([sequence], list(range(begin, end))))
            else:
                together.append(sequence)
                rows_together += range(begin, end)
        for batch, rows in [(together, rows_together), *alone]:
            if batch and batch[0].request.request_id not in faults:  # else a sibling has failed a moment ago
                try:
                    own = rows_of(logits, rows)
                except RuntimeError as error:
                    self._stumble(error, batch, faults)
                else:
                    self._draw_together(own, batch, draws, faults)
        for draw in draws:
            suspects.difference_update(sequence.request.request_id for sequence in draw.sequences)
        return draws, faults

    def counts(self) -> dict[str, float]:
        """What a worker's ``Stats`` say of masks, by field."""
        maker = self._mask_maker
        return {} if maker is None else {"num_masks": maker.num_masks, "mask_s": maker.waited_s}

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self._suspects.discard(request_id)

    def _draw_together(self, logits: Tensor, sequences: list[Sequence], draws: list[Draw], faults: Faults) -> None:
        """Adds to ``draws`` and ``faults``."""
        rows = [row for sequence in sequences for row in sequence.rows()]
        masks = None
        try:
            if any(sequence.guide is not None for sequence in sequences):
                masks = self._masks(sequences, logits.is_cuda)
            if masks is None:
                pending = self._sampler.start(logits, rows, self._maxima_of(logits))
            else:
                pending = self._sampler.start(logits, rows, self._maxima_of(logits), masks)
                assert self._mask_maker is not None
                for sequence, lost in self._mask_maker.faults.items():
                    faults[sequence.request.request_id] = lost
        except AssertionError:
            raise
        except Exception as error:
            self._stumble(error, sequences, faults)
            return
        late = self._mask_maker.take_late(sequences) if self._mask_maker is not None else ()
        drafts = [sequence.draft_token_ids for sequence in sequences]
        positions = [-1 if sequence in late else sequence.expect() for sequence in sequences]
        draws.append(Draw(sequences, positions, drafts, pending))
        for sequence in late:
            self._put_back(sequence)

    def _stumble(self, error: Exception, sequences: list[Sequence], faults: Faults) -> None:
        """Sampling failed for these. One alone is to blame, unless memory was short and is not for the first time; of
        several the logits may be half overwritten. Computed anew and sampled one by one, only the faulty request
        fails."""
        log.error("sampling for %d sequences failed", len(sequences), exc_info=error)
        is_short = is_out_of_memory(error)
        if len(sequences) == 1:
            request_id = sequences[0].request.request_id
            if not is_short or request_id in self._suspects:
                faults[request_id] = error
                return
        if is_short:
            self._ran_out([1 + len(sequence.draft_token_ids) for sequence in sequences], error)
        for sequence in sequences:
            self._suspects.add(sequence.request.request_id)
            if not sequence.has_ended:
                self._put_back(sequence)

    def _masks(self, sequences: list[Sequence], is_for_device: bool) -> Masks | None:
        if self._mask_maker is None:
            from worker.grammar.masks import MaskMaker

            self._mask_maker = MaskMaker(is_for_device)
        return self._mask_maker.make(sequences)
