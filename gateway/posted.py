"""Which events somebody has taken: what follows from the ledger is posted after a crash as well, and not at every
start."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from gateway import store
from gateway.store import Store

log = logging.getLogger(__name__)

KEEP_S = 62 * 86_400
"""Twice the longest period of a budget; events of one that is over are not asked for again."""
AT_ONCE = 500
"""Ids named in one query."""


class Posted:
    """The store's memory of them."""

    def __init__(self, rooms: Store) -> None:
        self._rooms = rooms

    async def add(self, event_id: str) -> None:
        """It needs no other posting. While the store is away this is not kept, and the event is posted again after a
        start; whoever takes it knows it by its id."""
        rows, now = store.posted_events, int(time.time())
        try:
            async with self._rooms.engine.begin() as connection:
                await connection.execute(sa.delete(rows).where(rows.c.posted_at < now - KEEP_S))
                await connection.execute(sa.insert(rows).values(id=event_id, posted_at=now))
        except IntegrityError:  # another gateway has posted it, too
            return
        except (SQLAlchemyError, OSError) as error:
            log.warning("it is not kept that event %s was posted: %s", event_id, store.cause_of(error))

    async def among(self, event_ids: Sequence[str]) -> set[str]:
        """Those that were posted. Raises what the database raises."""
        found: set[str] = set()
        ids = store.posted_events.c.id
        async with self._rooms.engine.connect() as connection:
            for start in range(0, len(event_ids), AT_ONCE):
                query = sa.select(ids).where(ids.in_(event_ids[start : start + AT_ONCE]))
                found.update((await connection.execute(query)).scalars())
        return found
