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

LENGTHS = (16, 16, 32, 64, 128, 256, 512)
"""Prompts computed alone, as many of them as fit in ALONE_S."""
NUM_TOKENS = 4
"""That each of them is answered with."""
NUM_STREAMS = 8
NUM_PROMPT_TOKENS = 1536
"""Of the prompt that comes beside streams."""
ALONE_S, IN_ALL_S = 0.5, 1.0
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
    for round_, length in enumerate(LENGTHS):
        if length + NUM_TOKENS > max_model_tokens or (costs.known and time.monotonic() - began_at > ALONE_S):
            break
        # The first one also pays for what is made on first use, so what it costs says nothing. It asks for everything
        # that can be asked of a sample: on CUDA each kernel is loaded, and some are compiled, when it is first met.
        prober = _plain(engine(costs if round_ else StepCosts()))
        submit = _submit("alone", 0, length, NUM_TOKENS, GREEDY if round_ else EVERYTHING)
        prober.add(submit if writes else msgspec.structs.replace(submit, pooling=wire.Pooling("mean")))
        while prober.has_work:
            _step(prober)
    if not writes:
        return costs
    # And so do the first chunks: each new size is compiled for when it is met.
    for learned in (copy.deepcopy(costs), costs):
        if time.monotonic() < began_at + IN_ALL_S:
            _beside_streams(_plain(engine(learned)), max_model_tokens, began_at + IN_ALL_S)
    return costs


def _plain(prober: Engine) -> Engine:
    """These prompts are easily guessed."""
    prober.speculates = False
    return prober


def _beside_streams(prober: Engine, max_model_tokens: int, until: float) -> None:
    num_own = LENGTHS[0]
    for index in range(NUM_STREAMS):
        prober.add(_submit(f"stream-{index}", index, num_own, max_model_tokens - num_own))
    for _ in range(NUM_TOKENS):
        _step(prober)
    prober.add(_submit("prompt", NUM_STREAMS, min(NUM_PROMPT_TOKENS, max_model_tokens - 1), 1))
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
