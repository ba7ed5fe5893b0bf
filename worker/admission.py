"""What a worker refuses before it has spent anything on it."""

from __future__ import annotations

from collections.abc import Collection

from policies import wire


def refusal(submit: wire.Submit, vocab_size: int, max_tokens: int) -> wire.Failed | None:
    """Why this can never be answered by a model of this vocabulary, whose longest sequence, prompt and completion, has
    ``max_tokens``.
    """

    def failed(code: str, reason: str) -> wire.Failed:
        return wire.Failed(submit.request_id, code, reason)

    if submit.grammar is not None:
        return failed("invalid_request", "this worker does not hold answers to a grammar")
    prompt_token_ids, sampling = submit.prompt_token_ids, submit.sampling
    if not prompt_token_ids or sampling.max_tokens < 1 or submit.num_sequences < 1:
        return failed(
            "invalid_request", "a prompt token, a token to generate and a sequence are the least one can ask for"
        )
    emitted = submit.emitted_token_ids
    for index, before in emitted.items():
        if not 0 <= index < submit.num_sequences:
            return failed("invalid_request", f"sequence {index} cannot go on where there are {submit.num_sequences}")
        if len(before) >= sampling.max_tokens:
            return failed("invalid_request", f"sequence {index} has its {sampling.max_tokens} tokens already")
    named: list[Collection[int]] = [prompt_token_ids, *emitted.values(), sampling.stop_token_ids, sampling.logit_bias]
    for token_ids in named:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return failed("invalid_request", f"a token id is outside of the vocabulary of {vocab_size}")
    if len(prompt_token_ids) + sampling.max_tokens > max_tokens:
        return failed(
            "context_length_exceeded",
            f"{len(prompt_token_ids)} prompt tokens and {sampling.max_tokens} to generate exceed {max_tokens}",
        )
    return None
