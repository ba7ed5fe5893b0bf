"""Rows that are durable, on their way to whoever counts them: the live view, and what /metrics tells.

They are gathered for a while and then sorted once for everybody: rows that are alike in all that is told apart have
their figures added up together, column by column, which takes less than half of what each row by itself would. Whoever
reads counts has what is still gathered counted first (``Tally.flush``).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from gateway.ledger.entry import Entry
from policies.settings import SlaClass

AT_ONCE = 128
"""Rows that are counted together; it takes the loop some three tenths of a millisecond."""
CLIENTS_FAULT = range(400, 500)

log = logging.getLogger(__name__)

Kind = tuple[str, str, str, int, str | None]
"""What rows that are alike have in common: model, endpoint, class, status, and how the answer ended."""

_kind = attrgetter("model", "endpoint", "sla_class", "status", "finish_reason")
_tokens = attrgetter("num_prompt_tokens", "num_cached_tokens", "num_completion_tokens", "num_reasoning_tokens")
_spent = attrgetter("num_sequences", "cost_micros", "engine_us", "kv_block_ms")
_times = attrgetter("queue_ms", "duration_ms", "ttft_ms")
_owed = attrgetter("tenant_id", "num_prompt_tokens", "num_completion_tokens", "cost_micros")
_cache = attrgetter("cache")


class Alike:
    """Rows of one kind, their figures as columns."""

    __slots__ = (
        *("cost_micros", "duration_ms", "engine_us", "kind", "kv_block_ms", "num", "num_cached_tokens"),
        *("num_completion_tokens", "num_gaps", "num_kept", "num_prompt_tokens", "num_reasoning_tokens"),
        *("queue_ms", "tpot_ms", "ttft_ms"),
    )

    def __init__(self, kind: Kind, rows: Sequence[Entry], promised: SlaClass | None) -> None:
        """``promised`` by their class; None: nobody knows any more."""
        self.kind = kind
        self.num = len(rows)
        tokens = zip(*map(_tokens, rows), strict=True)
        self.num_prompt_tokens, self.num_cached_tokens, self.num_completion_tokens, self.num_reasoning_tokens = tokens
        spent = zip(*map(_spent, rows), strict=True)
        nums_sequences, self.cost_micros, self.engine_us, self.kv_block_ms = spent
        self.queue_ms, self.duration_ms, ttfts_ms = zip(*map(_times, rows), strict=True)
        self.ttft_ms: list[float] = []
        """Of those that had a first token."""
        self.tpot_ms: list[float] = []
        """Of those that had more of them."""
        self.num_gaps: list[int] = []
        """Between the tokens of each of those."""
        num_broken, most_ttft_ms, most_tpot_ms = 0, math.inf, math.inf
        if promised is not None:
            most_ttft_ms, most_tpot_ms = promised.ttft_ms, promised.tpot_ms
        for ttft_ms, duration_ms, num_tokens, num in zip(
            ttfts_ms, self.duration_ms, self.num_completion_tokens, nums_sequences, strict=True
        ):
            if ttft_ms is None:
                continue
            self.ttft_ms.append(ttft_ms)
            is_broken = ttft_ms > most_ttft_ms
            if num_tokens > num:
                tpot_ms = (duration_ms - ttft_ms) * num / (num_tokens - num)
                self.tpot_ms.append(tpot_ms)
                self.num_gaps.append(num_tokens - num)
                is_broken = is_broken or tpot_ms > most_tpot_ms
            num_broken += is_broken
        self.num_kept = self.num - num_broken if kind[3] == 200 else 0
        """Those for which their class's promise was kept."""

    @property
    def count_for_promise(self) -> bool:
        """Those that a client broke off or was refused do not."""
        return self.kind[3] not in CLIENTS_FAULT


class Columns:
    """Some rows, sorted."""

    def __init__(self, rows: Sequence[Entry], classes: Mapping[str, SlaClass]) -> None:
        kinds: dict[Kind, list[Entry]] = {}
        for kind, row in zip(map(_kind, rows), rows, strict=True):
            alike = kinds.get(kind)
            if alike is None:
                kinds[kind] = [row]
            else:
                alike.append(row)
        self.alike = [Alike(kind, alike, classes.get(kind[2])) for kind, alike in kinds.items()]
        self.tenants: dict[str, list[int]] = {}
        """Requests, prompt and completion tokens, and what they cost, by the tenant's id."""
        for tenant_id, num_prompt, num_completion, cost_micros in map(_owed, rows):
            sums = self.tenants.get(tenant_id)
            if sums is None:
                self.tenants[tenant_id] = [1, num_prompt, num_completion, cost_micros]
            else:
                sums[0] += 1
                sums[1] += num_prompt
                sums[2] += num_completion
                sums[3] += cost_micros
        self.outcomes = Counter(map(_cache, rows))
        """Of the cache of answers."""


class Tally:
    """Has rows counted."""

    def __init__(self, classes: Mapping[str, SlaClass]) -> None:
        self.watchers: list[Callable[[Columns], None]] = []
        self._classes = classes
        self._gathered: list[Entry] = []

    def add(self, rows: Iterable[Entry]) -> None:
        """These are durable."""
        self._gathered += rows
        if len(self._gathered) >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Has all of them counted. Raises nothing: what is written is written."""
        gathered, self._gathered = self._gathered, []
        if not gathered or not self.watchers:
            return
        try:
            ended = Columns(gathered, self._classes)
            for watcher in self.watchers:
                watcher(ended)
        except Exception:
            log.exception("ledger: %d rows were not counted", len(gathered))
