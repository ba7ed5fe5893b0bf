"""What a request asks of the sampler."""

from __future__ import annotations

import random
import re

from gateway.openai.failures import Malformed
from gateway.openai.requests import ChatRequest, CompletionRequest
from policies.terms import Sampling


def sampling(
    call: ChatRequest | CompletionRequest,
    max_tokens: int,
    vocab_size: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """What the worker is told, with ``max_tokens`` already the smaller of what was asked and what fits, and the tokens
    of its ``bad_words``.

    Raises Malformed for token ids outside the vocabulary.
    """
    seed = random.getrandbits(64) if call.seed is None else call.seed % 2**64
    stop_token_ids, allowed_token_ids = tuple(call.stop_token_ids or ()), tuple(call.allowed_token_ids or ())
    for name, token_ids in (("stop_token_ids", stop_token_ids), ("allowed_token_ids", allowed_token_ids)):
        if token_ids and max(token_ids) >= vocab_size:
            raise Malformed(f"Invalid '{name}': the vocabulary has {vocab_size} tokens", name)
    return Sampling(
        max_tokens=max_tokens,
        seed=seed,
        temperature=1.0 if call.temperature is None else call.temperature,
        # 0 would leave no token at all; what is meant is the likeliest one alone.
        top_p=1.0 if call.top_p is None else max(call.top_p, 1e-6),
        top_k=max(call.top_k or 0, 0),
        min_p=call.min_p or 0.0,
        presence_penalty=call.presence_penalty or 0.0,
        frequency_penalty=call.frequency_penalty or 0.0,
        repetition_penalty=call.repetition_penalty or 1.0,
        logit_bias=_biases(call.logit_bias, vocab_size) if call.logit_bias else {},
        min_tokens=min(call.min_tokens or 0, max_tokens),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(call.ignore_eos),
        num_logprobs=call.num_logprobs,
        num_prompt_logprobs=call.num_prompt_logprobs,
        allowed_token_ids=allowed_token_ids,
        bad_words=bad_words,
    )


def _biases(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    by_token = {}
    for key, bias in biases.items():
        # int() would also take " 7", "1_0" and digits of other scripts.
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= vocab_size:
            shown = key[:20].encode("unicode_escape").decode()
            raise Malformed(
                f"Invalid key in 'logit_bias': '{shown}' is no token id (the vocabulary has {vocab_size} tokens)",
                "logit_bias",
            )
        by_token[int(key)] = bias
    return by_token
