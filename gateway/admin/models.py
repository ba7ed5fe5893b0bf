"""The models that are served: the settings say which; which of them are in memory, and stay there, can be changed while
it runs. That is for all gateway processes of this machine's port, and until they start anew."""

from __future__ import annotations

import msgspec

from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing
from gateway.admin.pages import Page
from gateway.admin.problems import Conflict, NotThere
from gateway.leases import Verb
from gateway.resident import InUse, NotOurs, State

PATH = "/admin/v1/models"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model; ``created_at`` in Unix seconds: when this gateway began to serve it."""

    name: str
    source: str
    ready: bool
    """One of its workers can answer."""
    state: State
    created_at: int
    replicas: int
    """Workers that are started for it here."""
    addresses: tuple[str, ...]
    """Workers of it that run elsewhere."""
    pinned: bool
    """It is not unloaded, neither for others nor because nobody uses it."""
    planned_bytes: int
    """Of memory, weights and KV, while it is loaded here; 0: nothing is planned."""
    budget_bytes: int | None
    """Of memory for all models that are loaded here; null: nothing is planned."""


async def every(ask: Ask[Nothing, Nothing]) -> Page[Model]:
    """List the models that are served, all on one page."""
    return Page([_shaped(ask, served.name) for served in ask.gw.dispatch.models()], False, None)


async def one(ask: Ask[Nothing, Nothing]) -> Model:
    """Read one model."""
    return _shaped(ask, ask.named("name"))


async def load(ask: Ask[Nothing, Nothing], change: Change) -> Model:
    """Have a model loaded as soon as there is room for it; idle ones leave for it."""
    return await _changed(ask, change, "model.loaded", "load")


async def unload(ask: Ask[Nothing, Nothing], change: Change) -> Model:
    """Have a model that answers nobody unloaded until somebody asks for it."""
    return await _changed(ask, change, "model.unloaded", "unload")


async def pin(ask: Ask[Nothing, Nothing], change: Change) -> Model:
    """Have a model stay loaded, whatever the others need."""
    return await _changed(ask, change, "model.pinned", "pin")


async def unpin(ask: Ask[Nothing, Nothing], change: Change) -> Model:
    """Have a model leave when others need its room, or nobody uses it."""
    return await _changed(ask, change, "model.unpinned", "unpin")


async def _changed(ask: Ask[Nothing, Nothing], change: Change, action: str, verb: Verb) -> Model:
    name = ask.named("name")
    before = _shaped(ask, name)
    try:
        await ask.gw.dispatch.residence.change(name, verb)
    except NotOurs:
        raise Conflict(f"The workers of the model {name} are not all started here, so they stay as they are.") from None
    except InUse:
        raise Conflict(f"The model {name} answers requests at the moment. Please try again when it is idle.") from None
    after = _shaped(ask, name)
    await change.record(action, "model", name, before, after)
    return after


def _shaped(ask: Ask[Nothing, Nothing], name: str) -> Model:
    """Raises NotThere."""
    dispatch = ask.gw.dispatch
    served = next((served for served in dispatch.models() if served.name == name), None)
    if served is None:
        raise NotThere(f"There is no model {name}.")
    configured = ask.gw.settings.models[name]
    return Model(
        name=name,
        source=configured.source,
        ready=served.ready,
        state=served.state,
        created_at=served.created,
        replicas=configured.replicas,
        addresses=configured.addresses,
        pinned=dispatch.residence.is_pinned(name),
        planned_bytes=dispatch.residence.num_bytes(name),
        budget_bytes=dispatch.residence.budget_bytes,
    )


_ONE = PATH + "/{name}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[Model], READERS),
    Endpoint("GET", _ONE, one, Model, READERS),
    Endpoint("POST", _ONE + "/load", load, Model, OPERATORS, changes=True),
    Endpoint("POST", _ONE + "/unload", unload, Model, OPERATORS, changes=True),
    Endpoint("POST", _ONE + "/pin", pin, Model, OPERATORS, changes=True),
    Endpoint("POST", _ONE + "/unpin", unpin, Model, OPERATORS, changes=True),
]
