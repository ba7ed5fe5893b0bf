"""What ended, counted from the ledger's rows for as long as this process lives.

Histograms with different buckets are read from one count whose bounds are all of theirs, so a row pays for each of its
quantities once. Whoever is named in a label is one of at most so many; who comes later is "other".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul, sub

import msgspec

from gateway.ledger.tally import Alike, Columns, Kind
from gateway.metrics import names
from gateway.tracing.names import OPERATIONS, PROVIDER
from policies.settings import SlaClass

OTHER = "other"
MAX_FORMER_CLASSES = 16
"""That only policies of former settings name."""
TICK_S = 10.0
"""Windows move by so much."""
WINDOWS = {"5m": 30, "1h": 360}
"""In ticks."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One time series at one instant."""

    name: str
    labels: tuple[str, ...]
    value: float
    """Of a histogram the sum of what was observed."""
    counts: tuple[int, ...] = ()
    """Of a histogram: by bucket, not added up; one more than there are bounds. Of a mean: of how many it is one."""
    bounds: tuple[float, ...] = ()


class Names:
    """Values of a label, at most so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        """Those that are told apart."""
        return iter(self._known)

    def known(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) < self._most:
            self._known.add(name)
            return name
        return OTHER


class Spread:
    """How often a quantity was what, fine enough for each of several histograms."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, values: Sequence[float]) -> None:
        """Bucket by bucket, those that fall into the same one together: mostly many do."""
        counts, bounds, ordered = self.counts, self.bounds, sorted(values)
        at, num = 0, len(ordered)
        while at < num:
            place = bisect_left(bounds, ordered[at])
            until = num if place == len(bounds) else bisect_right(ordered, bounds[place], at)
            counts[place] += until - at
            at = until
        self.sum += sum(values)

    def add_each(self, values: Sequence[float], nums: Sequence[int]) -> None:
        """So often each."""
        counts, bounds = self.counts, self.bounds
        for value, num in zip(values, nums, strict=True):
            counts[bisect_left(bounds, value)] += num
        self.sum += sum(map(mul, values, nums))

    def within(self, bounds: tuple[float, ...]) -> tuple[int, ...]:
        """The counts for these bounds, each of which is one of its own."""
        upto = list(accumulate(self.counts))
        ends = [upto[place] for place in _places(self.bounds, bounds)]
        return (*map(sub, ends, [0, *ends]), upto[-1] - (ends[-1] if ends else 0))


@lru_cache(64)
def _places(fine: tuple[float, ...], bounds: tuple[float, ...]) -> list[int]:
    """Where each of ``bounds`` stands in ``fine``."""
    return [bisect_left(fine, bound) for bound in bounds]


def _union(*bounds: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted({bound for each in bounds for bound in each}))


_DURATION = _union(names.DURATIONS_S, names.VLLM_LATENCY_S)
_TTFT, _TPOT = names.VLLM_TTFT_S, names.VLLM_TPOT_S
_TOKENS = _union(names.TOKENS, names.VLLM_TOKENS)


class Series:
    """Requests that are alike in all that labels say of them."""

    def __init__(self) -> None:
        self.num = self.num_prompt = self.num_cached = self.num_completion = self.num_reasoning = 0
        self.cost_micros = self.engine_us = self.kv_block_ms = 0
        self.duration, self.queue = Spread(_DURATION), Spread(_DURATION)
        self.ttft, self.tpot, self.gaps = Spread(_TTFT), Spread(_TPOT), Spread(_TPOT)
        self.prompt, self.completion = Spread(_TOKENS), Spread(_TOKENS)

    def add(self, alike: Alike) -> None:
        """These are some of them."""
        self.num += alike.num
        self.num_prompt += sum(alike.num_prompt_tokens)
        self.num_cached += sum(alike.num_cached_tokens)
        self.num_completion += sum(alike.num_completion_tokens)
        self.num_reasoning += sum(alike.num_reasoning_tokens)
        self.cost_micros += sum(alike.cost_micros)
        self.engine_us += sum(alike.engine_us)
        self.kv_block_ms += sum(alike.kv_block_ms)
        self.duration.add_all([1e-3 * ms for ms in alike.duration_ms])
        self.queue.add_all([1e-3 * ms for ms in alike.queue_ms])
        self.prompt.add_all(alike.num_prompt_tokens)
        self.completion.add_all(alike.num_completion_tokens)
        self.ttft.add_all([1e-3 * ms for ms in alike.ttft_ms])
        tpots = [1e-3 * ms for ms in alike.tpot_ms]
        self.tpot.add_all(tpots)
        self.gaps.add_each(tpots, alike.num_gaps)


class Counts:
    """All rows since start."""

    def __init__(self, classes: Mapping[str, SlaClass], max_models: int, max_tenants: int) -> None:
        self._classes = classes
        self._models, self._classes_seen = Names(max_models), Names(len(classes) + MAX_FORMER_CLASSES)
        self.tenants = Names(max_tenants)
        self._series: dict[Kind, Series] = {}
        self._by_tenant: dict[str, list[int]] = {}
        """Requests, prompt and completion tokens, and what they cost."""
        self._outcomes: dict[str, int] = {}
        self._promises: dict[str, list[int]] = {}
        """By class: requests that count for it, and those for which it was kept."""
        self._ticks: deque[dict[str, tuple[int, int]]] = deque(maxlen=max(WINDOWS.values()) + 1)

    def take(self, ended: Columns) -> None:
        """These have ended."""
        for alike in ended.alike:
            model, endpoint, sla_class, status, finish_reason = alike.kind
            model, sla_class = self._models.known(model), self._classes_seen.known(sla_class)
            kind = (model, endpoint, sla_class, status, finish_reason)
            series = self._series.get(kind)
            if series is None:
                series = self._series[kind] = Series()
            series.add(alike)
            if alike.count_for_promise:
                promises = self._promises.setdefault(sla_class, [0, 0])
                promises[0] += alike.num
                promises[1] += alike.num_kept
        for tenant_id, owed in ended.tenants.items():
            sums = self._by_tenant.setdefault(self.tenants.known(tenant_id), [0, 0, 0, 0])
            for place, num in enumerate(owed):
                sums[place] += num
        for outcome, num in ended.outcomes.items():
            self._outcomes[outcome] = self._outcomes.get(outcome, 0) + num

    def tick(self) -> None:
        """Another ``TICK_S`` is over."""
        self._ticks.append({name: (num, num_kept) for name, (num, num_kept) in self._promises.items()})

    def samples(self, currency: str, objective: float) -> Iterator[Sample]:
        """``objective``: of 1, how many promises are to be kept."""
        for (model, endpoint, sla_class, status, _), series in self._series.items():
            yield Sample("penstock_requests_total", (model, sla_class, endpoint, str(status)), series.num)
            for kind, num in (
                ("prompt", series.num_prompt),
                ("cached", series.num_cached),
                ("completion", series.num_completion),
                ("reasoning", series.num_reasoning),
            ):
                yield Sample("penstock_tokens_total", (model, kind), num)
            yield Sample("penstock_cost_total", (model, currency), 1e-6 * series.cost_micros)
            yield Sample("penstock_engine_seconds_total", (model,), 1e-6 * series.engine_us)
            yield Sample("penstock_kv_block_seconds_total", (model,), 1e-3 * series.kv_block_ms)
            yield _spread("penstock_queue_seconds", (model, sla_class), series.queue)
        yield from self._of_gen_ai()
        yield from self._of_vllm()
        for tenant, (num, num_prompt, num_completion, cost_micros) in self._by_tenant.items():
            yield Sample("penstock_tenant_requests_total", (tenant,), num)
            yield Sample("penstock_tenant_tokens_total", (tenant, "prompt"), num_prompt)
            yield Sample("penstock_tenant_tokens_total", (tenant, "completion"), num_completion)
            yield Sample("penstock_tenant_cost_total", (tenant,), 1e-6 * cost_micros)
        for outcome, num in self._outcomes.items():
            yield Sample("penstock_answer_cache_requests_total", (outcome,), num)
        yield from self._of_promises(objective)

    def _of_gen_ai(self) -> Iterator[Sample]:
        for (model, endpoint, _, status, _), series in self._series.items():
            who = (OPERATIONS.get(endpoint, endpoint), PROVIDER, model)
            error = "" if status == 200 else str(status)
            for name in ("gen_ai_server_request_duration_seconds", "gen_ai_client_operation_duration_seconds"):
                yield _spread(name, (*who, error), series.duration)
            if status == 200:
                yield _spread("gen_ai_server_time_to_first_token_seconds", who, series.ttft)
                yield _spread("gen_ai_server_time_per_output_token_seconds", who, series.tpot)
            yield _spread("gen_ai_client_token_usage", (*who, "input"), series.prompt)
            yield _spread("gen_ai_client_token_usage", (*who, "output"), series.completion)

    def _of_vllm(self) -> Iterator[Sample]:
        for (model, _, _, status, finish_reason), series in self._series.items():
            if status == 200:
                yield Sample("vllm:request_success_total", (model, _ended_as(finish_reason)), series.num)
            for name, spread in (
                ("vllm:time_to_first_token_seconds", series.ttft),
                ("vllm:time_per_output_token_seconds", series.tpot),
                ("vllm:request_time_per_output_token_seconds", series.tpot),
                ("vllm:inter_token_latency_seconds", series.gaps),
                ("vllm:e2e_request_latency_seconds", series.duration),
                ("vllm:request_queue_time_seconds", series.queue),
                ("vllm:request_prompt_tokens", series.prompt),
                ("vllm:request_generation_tokens", series.completion),
            ):
                yield _spread(name, (model,), spread)

    def _of_promises(self, objective: float) -> Iterator[Sample]:
        yield Sample("penstock_sla_objective_ratio", (), objective)
        for name in self._classes:
            num, num_kept = self._promises.get(name, (0, 0))
            yield Sample("penstock_sla_requests_total", (name,), num)
            yield Sample("penstock_sla_kept_total", (name,), num_kept)
            for window, num_ticks in WINDOWS.items():
                before = self._ticks[-num_ticks] if len(self._ticks) >= num_ticks else {}
                num_before, num_kept_before = before.get(name, (0, 0))
                if (num_here := num - num_before) > 0:
                    attained, of = (num_kept - num_kept_before) / num_here, (num_here,)
                    yield Sample("penstock_sla_attainment_ratio", (name, window), attained, of)
                    yield Sample("penstock_sla_burn_rate", (name, window), (1.0 - attained) / (1.0 - objective), of)


def _spread(name: str, labels: tuple[str, ...], spread: Spread) -> Sample:
    bounds = names.METRICS[name].buckets
    return Sample(name, labels, spread.sum, spread.within(bounds), bounds)


def _ended_as(finish_reason: str | None) -> str:
    """Of several answers to one request the first."""
    return (finish_reason or "stop").partition(",")[0]
