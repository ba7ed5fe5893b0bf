"""What a worker refuses before it has spent anything on it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

from policies import wire
from policies.terms import Sampling


class Able(Protocol):
    """A runner, as far as it says what may be asked of its model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def writes(self) -> bool: ...
    @property
    def scores(self) -> bool: ...
    @property
    def scores_prompts(self) -> bool: ...
    @property
    def pooling(self) -> wire.Pooling | None: ...
    @property
    def num_dimensions(self) -> int: ...


def refusal(submit: wire.Submit, runner: Able) -> wire.Failed | None:
    """Why this can never be answered by this runner's model."""
    vocab_size = runner.vocab_size
    max_tokens = min(runner.max_model_tokens, runner.num_blocks * runner.block_size)

    def failed(code: str, reason: str) -> wire.Failed:
        return wire.Failed(submit.request_id, code, reason)

    unable = _inability(submit, runner)
    if unable is not None:
        return failed("invalid_request", unable)
    prompt_token_ids, sampling = submit.prompt_token_ids, submit.sampling
    if not prompt_token_ids or sampling.max_tokens < 1 or submit.num_sequences < 1:
        return failed(
            "invalid_request", "a prompt token, a token to generate and a sequence are the least one can ask for"
        )
    if min(sampling.num_logprobs or 0, sampling.num_prompt_logprobs or 0) < 0:
        return failed("invalid_request", "log-probabilities of fewer than no tokens were asked for")
    if not _can_be_drawn(sampling):
        return failed("invalid_request", "a temperature, a penalty, top_p or min_p is out of its range")
    if not (_are_finite(submit.ttft_s, submit.tpot_s, submit.weight) and submit.weight > 0):
        return failed("invalid_request", "a time that was promised or a weight is no number to order requests by")
    emitted = submit.emitted_token_ids
    for index, before in emitted.items():
        if not 0 <= index < submit.num_sequences:
            return failed("invalid_request", f"sequence {index} cannot go on where there are {submit.num_sequences}")
        if len(before) >= sampling.max_tokens:
            return failed("invalid_request", f"sequence {index} has its {sampling.max_tokens} tokens already")
    given: list[Collection[int]] = [prompt_token_ids, *emitted.values(), submit.predicted_token_ids]
    given += [sampling.stop_token_ids, sampling.logit_bias, sampling.allowed_token_ids, *sampling.bad_words]
    for token_ids in given:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return failed("invalid_request", f"a token id is outside of the vocabulary of {vocab_size}")
    if submit.num_positions > max_tokens:
        more = "" if submit.pooling is not None else f" and {sampling.max_tokens} to generate"
        return failed("context_length_exceeded", f"{len(prompt_token_ids)} prompt tokens{more} exceed {max_tokens}")
    return None


def crowded(submit: wire.Submit, num_waiting: int, max_waiting: int) -> wire.Failed | None:
    """Why there is no place for it where so many sequences wait, and may."""
    if len(submit.indices) + num_waiting <= max_waiting:
        return None
    return wire.Failed(submit.request_id, "overloaded", f"{num_waiting} sequences wait already")


def _are_finite(*numbers: float | None) -> bool:
    return all(number is None or math.isfinite(number) for number in numbers)


def _can_be_drawn(sampling: Sampling) -> bool:
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    return (
        _are_finite(sampling.temperature, *penalties)
        and sampling.temperature >= 0.0
        and sampling.repetition_penalty > 0.0
        and 0.0 <= sampling.top_p <= 1.0
        and 0.0 <= sampling.min_p <= 1.0
    )


def _inability(submit: wire.Submit, runner: Able) -> str | None:
    """Why the model does not do what is asked at all."""
    pooling = submit.pooling
    if pooling is None:
        if submit.sampling.num_prompt_logprobs is not None and not runner.scores_prompts:
            return "this model gives no log-probabilities of prompts"
        return None if runner.writes else "this model writes nothing: ask it for vectors"
    if submit.num_sequences != 1 or any(submit.emitted_token_ids.values()) or submit.grammar is not None:
        return "a vector is of one sequence that writes nothing"
    if pooling.kind == "score":
        return None if runner.scores else "this model has no head that scores"
    if runner.pooling is None:
        return "this model gives no vectors"
    if not 0 <= pooling.num_dimensions <= runner.num_dimensions:
        return f"its vectors have {runner.num_dimensions} dimensions, and {pooling.num_dimensions} were asked for"
    return None
