"""The workers: what each is and does, and having one rest: it is given nothing new by any of the gateways, and what it
has goes on elsewhere where there is room, until it is told to work again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from gateway import workers
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing
from gateway.admin.pages import Page
from gateway.admin.problems import NotThere
from gateway.errors import ServiceUnavailable
from gateway.redis import RedisAway

PATH = "/admin/v1/workers"
MAX_SHARERS = 256


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker said of itself when it was ready; ``max_model_tokens`` are prompt and completion together."""

    device: str
    dtype: str
    pid: int
    max_model_tokens: int
    max_sequences: int
    block_size: int
    num_blocks: int
    deterministic: bool


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reported last; counts are since its start where they only grow."""

    num_waiting: int
    num_running: int
    num_paused: int
    """Of those running: had no part in the last step, though they could have."""
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    num_steps: int
    num_preemptions: int
    """Sequences that lost all their KV for others, as often as it happened."""
    num_tail_frees: int
    """Those that lost the end of it."""
    num_displacements: int
    """Requests for which others were put aside."""
    num_drafted_tokens: int
    """Guessed, and verified beside the tokens that were due."""
    num_accepted_tokens: int
    """Of those, the ones that were right."""
    num_drafter_faults: int
    """Requests for which a drafter was switched off."""
    num_grammars: int
    """Compiled, and kept for the next request."""
    num_grammars_compiled: int
    grammar_compile_s: float
    num_grammar_hits: int
    """Requests whose grammar was there."""
    num_grammars_refused: int
    """Requests whose grammar could not be made ready."""
    num_masks: int
    mask_s: float
    """That steps have waited for them."""
    step_ms: float
    busy_s: float
    """In steps."""
    num_gateways: int
    """Those that send it requests, each up to its part of the places and the memory."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One place for a worker, as this gateway sees it."""

    name: str
    model: str
    state: Literal["starting", "ready"]
    resting: bool
    """It is given nothing new."""
    num_lives: int
    """Processes or connections that have filled this place, the present one included."""
    facts: Facts | None
    """Null while it is not ready."""
    load: Load | None


class Sharer(msgspec.Struct, frozen=True, kw_only=True):
    """A request in a worker's batch."""

    request_id: str
    tenant_id: str
    sla_class: str
    state: Literal["prefill", "decode"]
    num_sequences: int
    """That have not finished."""
    num_prompt_tokens: int
    num_completion_tokens: int
    """So far."""
    num_blocks: int
    """That its tokens fill; of those that several have in common, each is counted."""
    age_s: float


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker computes for this gateway, and how its KV blocks are taken."""

    worker: str
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_requests: int
    requests: list[Sharer]
    """Those with most blocks, at most 256."""


async def every(ask: Ask[Nothing, Nothing]) -> Page[Worker]:
    """List the workers, all on one page."""
    resting = ask.gw.gateways.resting
    places = [shaped(model, worker, worker.name in resting) for model, worker in _places(ask)]
    return Page(places, False, None)


async def one(ask: Ask[Nothing, Nothing]) -> Worker:
    """Read one worker."""
    model, worker = _found(ask)
    return shaped(model, worker, worker.name in ask.gw.gateways.resting)


async def batch(ask: Ask[Nothing, Nothing]) -> Batch:
    """Show what a worker has in its batch, and in its KV blocks."""
    _, worker = _found(ask)
    facts, stats, now = worker.facts, worker.stats, ask.gw.clock.now()
    size = 1 if facts is None else facts.block_size
    taken = next((flights for _, other, flights in ask.gw.dispatch.seated() if other is worker), ())
    sharers = [
        Sharer(
            request_id=flight.request.request_id,
            tenant_id=flight.order.tenant_id,
            sla_class=flight.order.sla_class,
            state="prefill" if flight.is_pending else "decode",
            num_sequences=flight.num_open,
            num_prompt_tokens=flight.order.num_prompt_tokens,
            num_completion_tokens=flight.num_tokens,
            num_blocks=-(-(flight.order.num_prompt_tokens + flight.num_tokens) // size),
            age_s=round(now - flight.submitted_at, 3),
        )
        for flight in taken
    ]
    sharers.sort(key=lambda sharer: (-sharer.num_blocks, sharer.request_id))
    return Batch(
        worker=worker.name,
        block_size=size,
        num_blocks=0 if stats is None else stats.num_blocks,
        num_used_blocks=0 if stats is None else stats.num_used_blocks,
        num_cached_blocks=0 if stats is None else stats.num_cached_blocks,
        num_free_blocks=0 if stats is None else stats.num_free_blocks,
        num_requests=len(sharers),
        requests=sharers[:MAX_SHARERS],
    )


async def drain(ask: Ask[Nothing, Nothing], change: Change) -> Worker:
    """Have a worker be given nothing new. Its answers go on with other workers as there is room, or end where they
    are."""
    return await _rest(ask, change, True)


async def resume(ask: Ask[Nothing, Nothing], change: Change) -> Worker:
    """Have a worker that rests be given requests again."""
    return await _rest(ask, change, False)


def shaped(model: str, worker: workers.Worker, is_resting: bool) -> Worker:
    facts, stats = worker.facts, worker.stats
    return Worker(
        name=worker.name,
        model=model,
        state="starting" if facts is None else "ready",
        resting=is_resting,
        num_lives=worker.num_lives,
        facts=None if facts is None else Facts(**{name: getattr(facts, name) for name in Facts.__struct_fields__}),
        load=None if stats is None else Load(**{name: getattr(stats, name) for name in Load.__struct_fields__}),
    )


async def _rest(ask: Ask[Nothing, Nothing], change: Change, is_resting: bool) -> Worker:
    model, worker = _found(ask)
    before = shaped(model, worker, worker.name in ask.gw.gateways.resting)
    after = msgspec.structs.replace(before, resting=is_resting)
    await change.record("worker.drained" if is_resting else "worker.resumed", "worker", worker.name, before, after)
    try:
        await ask.gw.gateways.rest(worker.name, is_resting)
    except RedisAway:
        raise ServiceUnavailable(
            "Redis cannot be reached, so the other gateways would not hear of it. Please try again.", retry_after_s=1.0
        ) from None
    return after


def _places(ask: Ask[Nothing, Nothing]) -> Iterator[tuple[str, workers.Worker]]:
    """Each with its model."""
    dispatch = ask.gw.dispatch
    return ((model.name, worker) for model in dispatch.models() for worker in dispatch.workers_of(model.name))


def _found(ask: Ask[Nothing, Nothing]) -> tuple[str, workers.Worker]:
    """Raises NotThere."""
    name = ask.named("name")
    for model, worker in _places(ask):
        if worker.name == name:
            return model, worker
    raise NotThere(f"There is no worker {name}.")


_ONE = PATH + "/{name}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[Worker], OPERATORS),
    Endpoint("GET", _ONE, one, Worker, OPERATORS),
    Endpoint("GET", _ONE + "/batch", batch, Batch, OPERATORS),
    Endpoint("POST", _ONE + "/drain", drain, Worker, OPERATORS, changes=True),
    Endpoint("POST", _ONE + "/resume", resume, Worker, OPERATORS, changes=True),
]
