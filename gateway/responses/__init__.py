"""The Responses API: conversations whose state is kept here, and answers that are written in the background.

A response means a chat, and takes a chat's way (``gateway/api/chat.py``); what is its own are the items that it is made
of (``items``, ``conversation``), its events (``events``), and where it lies afterwards (``shelf``, ``running``). Where
the shapes were read: openai-python's ``src/openai/types/responses``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from gateway.clock import Clock
from gateway.responses.running import Background
from gateway.responses.shelf import Shelf
from gateway.store import Store
from policies import settings

__all__ = ["Background", "Responses", "Shelf", "opened"]


@dataclass(frozen=True, slots=True)
class Responses:
    """What outlives a request."""

    shelf: Shelf
    background: Background


@contextlib.asynccontextmanager
async def opened(
    rooms: Store,
    config: settings.Responses,
    clock: Clock,
    inside: Callable[[], AbstractContextManager[None]],
    wall: Callable[[], float],
) -> AsyncIterator[Responses]:
    """``inside`` as for ``Background``, whose responses are broken off on leaving, ``wall`` as for all that is kept."""
    shelf = Shelf(rooms, config, clock, wall)
    async with shelf.watched():
        background = Background(config, shelf, clock, inside)
        try:
            yield Responses(shelf, background)
        finally:
            await background.close()
