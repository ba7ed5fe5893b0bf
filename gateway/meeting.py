"""What a gateway waits for before it lets anybody in: what takes a moment at each of its starts, and would be a refusal
to whoever came meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.dispatch import Dispatch
from gateway.errors import ModelUnavailable
from policies.settings import Settings

MEET_S = 5.0
"""So long workers that run elsewhere are waited for, and the files of models; then others are let in without them."""
LOOK_S = 0.01
"""Between two looks."""


async def met(dispatch: Dispatch, config: Settings) -> None:
    """Until the files of each model are read, and of each that has workers elsewhere one can answer; no longer than
    ``MEET_S``. Workers that are started here may take minutes, and nobody waits for those."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MEET_S):
            while not all(_is_met(dispatch, config, model.name) for model in dispatch.models()):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)


def _is_met(dispatch: Dispatch, config: Settings, name: str) -> bool:
    try:
        dispatch.text(name)
    except ModelUnavailable:
        return False
    return not config.models[name].addresses or dispatch.ready(name) is not None
