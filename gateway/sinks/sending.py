"""Events on their way to one receiver: what it took, what it refuses for good, and what has to be tried again.

A refusal is about the event (400, 413, 422): of several posted together the one that it is about is found by posting
fewer. Everything else that is no success is about the receiver, or about how it is spoken to (a wrong key or address
too), and no event's fault.
"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp
import yarl

from gateway.sinks.events import Event, Kind

REFUSALS = (400, 413, 422)
MAX_POSTS = 8
"""At once."""
MAX_BODY_BYTES = 64 << 10
"""Of an answer; the rest is not read."""
MAX_WORDS = 300
"""Of what a receiver says, in characters."""
MAX_RETRY_AFTER_S = 3600.0
MIN_SECRET_CHARS = 4

Done = dict[str, str | None]
"""By the id of an event: None when the receiver has it, otherwise why it never will."""


class Trouble(Exception):
    """The receiver takes nothing at the moment; the message says why."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s
        """What the receiver asked for."""


class Answer(NamedTuple):
    status: int
    body: bytes
    retry_after_s: float


class Sender:
    """One receiver."""

    def __init__(
        self,
        kind: Kind,
        url: yarl.URL,
        session: aiohttp.ClientSession,
        secrets: Sequence[str],
        timeout_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``secrets``: what no message may repeat. ``wall``: Unix seconds."""
        self._kind = kind
        self._url = url
        self._session = session
        self._secrets = [secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS]
        self._timeout_s = timeout_s
        self._wall = wall

    async def send(self, events: Sequence[Event], done: Done) -> None:
        """Writes into ``done`` what became of each. Raises Trouble when some are left."""
        lanes: dict[str, list[Event]] = {}
        for event in events:
            if (why := self._kind.unfit(event, self._wall())) is not None:
                done[event.id] = why
            else:
                lanes.setdefault(self._kind.lane(event), []).append(event)
        troubles: list[Trouble] = []
        places = asyncio.Semaphore(MAX_POSTS)

        async def drive(lane: list[Event]) -> None:
            for start in range(0, len(lane), self._kind.max_events):
                async with places:
                    if troubles:
                        return
                    try:
                        await self._settle(lane[start : start + self._kind.max_events], done)
                    except Trouble as trouble:
                        troubles.append(trouble)

        async with asyncio.TaskGroup() as group:
            for lane in lanes.values():
                group.create_task(drive(lane))
        if troubles:
            raise max(troubles, key=lambda trouble: trouble.retry_after_s)

    async def _settle(self, events: Sequence[Event], done: Done) -> None:
        answer = await self._post(events)
        if 200 <= answer.status < 300:
            done.update((event.id, None) for event in events)
            return
        words = self._words(answer.body.decode(errors="replace"))
        why = f"status {answer.status}: {words}" if words else f"status {answer.status}"
        judged = self._kind.judged(answer.status, answer.body, events)
        if not judged and answer.status in REFUSALS and len(events) == 1:
            judged = {events[0].id: why}
        done.update((event_id, None if wrong is None else self._words(wrong)) for event_id, wrong in judged.items())
        if judged:
            if left := [event for event in events if event.id not in judged]:
                await self._settle(left, done)
        elif answer.status in REFUSALS:
            half = len(events) // 2
            await self._settle(events[:half], done)
            await self._settle(events[half:], done)
        else:
            raise Trouble(why, answer.retry_after_s)

    async def _post(self, events: Sequence[Event]) -> Answer:
        payload, headers = self._kind.written(events, int(self._wall()))
        try:
            async with self._session.post(
                self._url,
                data=payload,
                headers={"user-agent": "penstock", **headers},
                allow_redirects=False,  # the key and the signature are for this receiver
                timeout=aiohttp.ClientTimeout(self._timeout_s),
            ) as answer:
                body = b""
                try:
                    async for chunk in answer.content.iter_chunked(MAX_BODY_BYTES):
                        body += chunk
                        if len(body) >= MAX_BODY_BYTES:
                            break
                except (aiohttp.ClientError, OSError):
                    pass  # the status has said it all
                after_s = retry_after_s(answer.headers.get("retry-after", ""), self._wall())
                return Answer(answer.status, body, after_s)
        except TimeoutError:
            raise Trouble(f"no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Trouble(self._words(str(error)) or type(error).__name__) from None

    def _words(self, text: str) -> str:
        """In one line, without what must not be told or kept."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        return line if len(line) <= MAX_WORDS else f"{line[:MAX_WORDS]}…"


def retry_after_s(header: str, now: float) -> float:
    """What Retry-After asks for, in seconds or by a date; 0 when it asks for nothing that can be read."""
    try:
        wanted = float(int(header))
    except (ValueError, OverflowError):
        try:
            wanted = email.utils.parsedate_to_datetime(header).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(wanted, 0.0), MAX_RETRY_AFTER_S)
