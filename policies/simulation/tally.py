"""Counts what happens in a simulation: to all, to each class, to each tenant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from policies.settings import SlaClass
from policies.simulation.gaps import Gap
from policies.simulation.trial import ClassPart, Part, Reason, percentiles


class Tally:
    """One group of requests."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_cut = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
        self.num_served_tokens = 0
        self.engine_s = 0.0
        self.cost_micros = 0
        self.refused: dict[Reason, int] = {}
        self.ttfts_ms: list[float] = []
        self.tpots_ms: list[float] = []
        self.errors_ms: list[float] = []
        """Predicted less real time to the first token."""
        self.longest_wait_s = 0.0
        self.num_kept = 0
        """Requests whose first token and whose further ones came in time."""

    def refuse(self, reason: Reason) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def facts(self) -> dict[str, object]:
        """The fields of a ``Part``."""
        return {
            "num_requests": self.num_requests,
            "num_admitted": len(self.ttfts_ms),
            "refused": dict(sorted(self.refused.items())),
            "num_unfinished": self.num_requests - len(self.ttfts_ms) - sum(self.refused.values()),
            "num_cut": self.num_cut,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_completion_tokens": self.num_completion_tokens,
            "num_served_tokens": self.num_served_tokens,
            "engine_s": self.engine_s,
            "cost_micros": self.cost_micros,
            "ttft_ms": percentiles(self.ttfts_ms),
            "tpot_ms": percentiles(self.tpots_ms),
            "longest_wait_ms": round(1e3 * self.longest_wait_s, 3),
        }

    def part(self) -> Part:
        return Part(**self.facts())  # type: ignore[arg-type]


class Tallies:
    """All groups at once."""

    def __init__(self, classes: Mapping[str, SlaClass]) -> None:
        self._classes = classes
        self.total = Tally()
        self.of_class = {name: Tally() for name in classes}
        self.of_tenant: dict[str, Tally] = {}
        self._own = dict.fromkeys(classes, 0)
        self._all = dict.fromkeys(classes, 0)

    def of(self, tenant: str, sla_class: str) -> tuple[Tally, Tally, Tally]:
        """The three that a request belongs to."""
        return self.total, self.of_class[sla_class], self.of_tenant.setdefault(tenant, Tally())

    def serve(self, tenant: str, sla_class: str, num_tokens: int, waiting: Iterable[str]) -> None:
        """So many tokens were given while ``waiting`` classes had requests in line."""
        for tally in self.of(tenant, sla_class):
            tally.num_served_tokens += num_tokens
        for name in waiting:
            self._all[name] += num_tokens
            self._own[name] += num_tokens if name == sla_class else 0

    def classes(self, gaps: Iterable[Mapping[str, Gap]]) -> dict[str, ClassPart]:
        """``gaps`` of each model."""
        models = list(gaps)
        return {name: self._class_part(name, [model[name] for model in models]) for name in self._classes}

    def _class_part(self, name: str, gaps: list[Gap]) -> ClassPart:
        tally, terms = self.of_class[name], self._classes[name]
        worst = max(gaps, key=lambda gap: gap.longest / gap.bound, default=Gap())
        return ClassPart(
            **tally.facts(),  # type: ignore[arg-type]
            ttft_error_ms=percentiles([abs(error_ms) for error_ms in tally.errors_ms]),
            ttft_bias_ms=sum(tally.errors_ms) / len(tally.errors_ms) if tally.errors_ms else 0.0,
            ttft_attainment=attainment(tally.ttfts_ms, terms.ttft_ms),
            tpot_attainment=attainment(tally.tpots_ms, terms.tpot_ms),
            num_kept=tally.num_kept,
            num_tokens_while_waiting=self._own[name],
            share_while_waiting=self._own[name] / self._all[name] if self._all[name] else 1.0,
            longest_gap_tokens=round(worst.longest),
            gap_bound_tokens=round(worst.bound),
        )


def attainment(values: list[float], target: float) -> float:
    """Share of them that are at most the target; 1 when there are none."""
    return sum(value <= target for value in values) / len(values) if values else 1.0
