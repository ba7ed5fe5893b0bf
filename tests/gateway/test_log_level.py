"""The log's level while gateways run: asked for by the administration, and set back by itself."""

from __future__ import annotations

import logging
import time

import pytest

from gateway.log_level import Asked, AskedFor
from tests.gateway.desk import Desk

PATH = "logging"


def tells(level: int) -> bool:
    return logging.getLogger("gateway.anywhere").isEnabledFor(level)


async def test_it_is_asked_for_read_and_set_back_with_lines_in_the_audit_log(front, level_afterwards):
    desk = Desk(front)
    assert (await desk.got(PATH))["asked"] is None
    asked = await desk("PUT", PATH, {"level": "debug", "for_s": 60})
    assert (asked.status, asked.body["level"], asked.body["usual"]) == (200, "debug", "info")
    assert asked.body["until"] == pytest.approx(time.time() + 60, abs=30)
    assert await desk.got(PATH) == asked.body
    assert tells(logging.DEBUG)
    await desk("PUT", PATH, {"level": "error"})
    assert not tells(logging.WARNING)
    back = await desk("PUT", PATH, {"level": None})
    assert back.body == {"level": "info", "usual": "info", "asked": None, "until": None} == await desk.got(PATH)
    assert tells(logging.INFO)
    assert not tells(logging.DEBUG)
    lines = (await desk.got("audit_log?action=logging.changed"))["data"]
    assert [line["after"]["level"] for line in sorted(lines, key=lambda line: line["id"])] == ["debug", "error", "info"]


@pytest.mark.parametrize(
    ("body", "field"), [({"level": "loud"}, "level"), ({}, "level"), ({"level": "info", "for_s": 0}, "for_s")]
)
async def test_what_is_no_level_or_lasts_for_no_time_is_refused(front, body, field):
    refused = await Desk(front)("PUT", PATH, body)
    assert (refused.status, refused.fields()) == (400, [field])


def test_it_is_set_back_when_its_time_is_over_and_not_before(clock, level_afterwards):
    asked_for = AskedFor(clock)
    asked_for.take(Asked("debug", time.time() + 60))
    clock.advance(30)
    asked_for.take(later := Asked("error", time.time() + 600))
    clock.advance(60)
    assert asked_for.asked == later
    assert not tells(logging.WARNING)
    clock.advance(600)
    assert asked_for.asked is None
    assert tells(logging.INFO)
    asked_for.take(Asked("debug", time.time() - 1))  # as another gateway's clock may have it
    assert not tells(logging.DEBUG)
