"""What a step costs here, learned on a little work of our own before anything is served.

Prompts alone teach what tokens cost; a long one beside streams teaches what its chunks cost, so that the first that
comes does not make anybody wait longer than the later ones.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import msgspec

from policies import wire
from policies.costs import StepCosts
from policies.terms import Sampling
from worker.engine import Engine

SHORT = 16
"""Tokens of the first prompt, and of streams."""
LENGTHS = (SHORT, 64, 256, SHORT, 64, 512)
"""Prompts computed alone, as many of them as fit in ALONE_S, and as long as LONGEST_S has room for."""
NUM_TOKENS = 4
"""That the first of them is answered with, the others, whose answers teach little, with half of it; and the steps of
streams before a prompt comes."""
NUM_STREAMS = 8
NUM_PROMPT_TOKENS = 1536
"""Of the prompt that comes beside streams, at most."""
ALONE_S, LONGEST_S, IN_ALL_S = 0.5, 0.3, 1.0
GREEDY = Sampling(1, temperature=0.0, ignore_eos=True)
EVERYTHING = Sampling(
    1,
    temperature=1.0,
    top_p=0.9,
    top_k=20,
    min_p=0.01,
    presence_penalty=0.1,
    logit_bias={0: 0.1},
    min_tokens=NUM_TOKENS,
    ignore_eos=True,
    num_logprobs=1,
)

MakeEngine = Callable[[StepCosts], Engine]


class ProbeFailed(Exception):
    """The model cannot compute; the message says why."""


def probe(engine: MakeEngine, max_model_tokens: int, writes: bool = True) -> StepCosts:
    """What ``engine``, made anew for each piece of work, costs; ``writes`` as in Ready. Raises ProbeFailed."""
    costs = StepCosts()
    began_at = time.monotonic()
    # The first one also pays for what is made on first use, so what it costs says nothing. It asks for everything that
    # can be asked of a sample: on CUDA each kernel is loaded, and some are compiled, when it is first met.
    _alone(_plain(engine(StepCosts())), _submit("first", 0, SHORT, NUM_TOKENS, EVERYTHING), writes)
    token_s = 0.0
    for place, length in enumerate(LENGTHS):
        if length + NUM_TOKENS > max_model_tokens or (costs.known and time.monotonic() - began_at > ALONE_S):
            break
        if length * token_s > LONGEST_S:
            length = max(SHORT, int(LONGEST_S / token_s))
        asked_at = time.monotonic()
        _alone(_plain(engine(costs)), _submit(f"alone-{place}", 0, length, NUM_TOKENS // 2), writes)
        token_s = (time.monotonic() - asked_at) / length
    if writes:
        costs = _with_streams(engine, costs, max_model_tokens, began_at + IN_ALL_S)
    costs.settle()
    return costs


def _alone(prober: Engine, submit: wire.Submit, writes: bool) -> None:
    prober.add(submit if writes else msgspec.structs.replace(submit, pooling=wire.Pooling("mean")))
    while prober.has_work:
        _step(prober)


def _with_streams(engine: MakeEngine, costs: StepCosts, max_model_tokens: int, until: float) -> StepCosts:
    """These costs, and what is learned beside streams. Where each new size is compiled for when it is met, first chunks
    say nothing either: they count where there is no time for others.
    """
    began_at = time.monotonic()
    if began_at > until:
        return costs
    _beside_streams(_plain(engine(first := copy.deepcopy(costs))), first, max_model_tokens, until)
    now = time.monotonic()
    if now + (now - began_at) > until:
        return first
    _beside_streams(_plain(engine(costs)), costs, max_model_tokens, until)
    return costs


def _plain(prober: Engine) -> Engine:
    """These prompts are easily guessed."""
    prober.speculates = False
    return prober


def _beside_streams(prober: Engine, costs: StepCosts, max_model_tokens: int, until: float) -> None:
    for index in range(NUM_STREAMS):
        prober.add(_submit(f"stream-{index}", index, SHORT, max_model_tokens - SHORT))
    for _ in range(NUM_TOKENS):
        _step(prober)
    num_fitting = costs.chunk_price.tokens_within(until - time.monotonic(), 0)
    num_tokens = min(max(num_fitting, SHORT), NUM_PROMPT_TOKENS, max_model_tokens - 1)
    prober.add(_submit("prompt", NUM_STREAMS, num_tokens, 1))
    while prober.holds("prompt") and time.monotonic() < until:
        _step(prober)


def _submit(
    request_id: str, token_id: int, num_prompt_tokens: int, num_tokens: int, asked: Sampling = GREEDY
) -> wire.Submit:
    sampling = msgspec.structs.replace(asked, max_tokens=num_tokens)
    # Salted by its name, so that none finds what another has computed.
    return wire.Submit(request_id, [token_id] * num_prompt_tokens, sampling, cache_salt=request_id.encode())


def _step(prober: Engine) -> None:
    _, failed = prober.step()
    if failed:
        raise ProbeFailed(failed[0].reason)
