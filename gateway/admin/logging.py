"""From which level on all gateways tell their log, without a restart of any."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway import log_level
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing
from gateway.errors import ServiceUnavailable
from gateway.log_level import Asked, Level
from gateway.redis import RedisAway

PATH = "/admin/v1/logging"
DAY_S = 86_400


class Logging(msgspec.Struct, frozen=True, kw_only=True):
    """Of the gateway that answers; ``until`` in Unix seconds."""

    level: Level
    """The one that counts: after SIGUSR1 it is "debug", whatever was asked for here."""
    usual: Level
    """Of the settings."""
    asked: Level | None
    """For all gateways; null: none."""
    until: int | None
    """When it is set back."""


class NewLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    level: Level | None
    """Null: that of the settings, from now on."""
    for_s: Annotated[int, Meta(ge=1, le=DAY_S)] = 3600
    """So long; then it is that of the settings again."""


async def read(ask: Ask[Nothing, Nothing]) -> Logging:
    """Read from which level on the log is told."""
    return _shown(ask, ask.gw.gateways.log_level.asked, log_level.level())


async def put(ask: Ask[Nothing, NewLevel], change: Change) -> Logging:
    """Have all gateways tell their log from another level on, for a while."""
    gateways, body = ask.gw.gateways, ask.body
    asked = None if body.level is None else Asked(body.level, time.time() + body.for_s)
    before = _shown(ask, gateways.log_level.asked, log_level.level())
    after = _shown(ask, asked, "debug" if log_level.is_switched() else body.level or before.usual)
    await change.record("logging.changed", "logging", "level", before, after)
    try:
        await gateways.log_from(asked)
    except RedisAway:
        raise ServiceUnavailable(
            "Redis cannot be reached, so the other gateways would not hear of it. Please try again.", retry_after_s=1.0
        ) from None
    return after


def _shown(ask: Ask[Nothing, NewLevel] | Ask[Nothing, Nothing], asked: Asked | None, level: Level) -> Logging:
    usual = ask.gw.settings.log.level
    if asked is None:
        return Logging(level=level, usual=usual, asked=None, until=None)
    return Logging(level=level, usual=usual, asked=asked.level, until=round(asked.until))


ENDPOINTS = [
    Endpoint("GET", PATH, read, Logging, OPERATORS),
    Endpoint("PUT", PATH, put, Logging, OPERATORS, body=NewLevel, changes=True),
]
