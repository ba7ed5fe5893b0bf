"""Prefix-aware routing on a recorded hour: 2 workers' cached share against one worker with their joint memory.

    python -m benchmarks.routing_simulated --trace mooncake_conversation.jsonl --plot benchmarks/routing_simulated.png

The decisions (policies/routing.py) and the block pools (worker/blocks.py) are the real ones. What a worker takes for
its tokens is a formula, and its news of its blocks reach the gateway late, as on the wire. Blocks are the trace's, of
512 tokens. No engine is started and nothing is drawn by chance: the same trace gives the same numbers.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from benchmarks.traces import MOONCAKE_BLOCK, Recorded, read
from policies.prefix import Link
from policies.routing import Candidate, PrefixIndex, choose
from worker.blocks import NO_PARENT, Pool

TOKENS_PER_S = 25_000
"""Prompt tokens that one worker computes; one with joint memory is as fast as both together."""
TPOT_S = 0.025
MAX_SEQUENCES = 128
NEWS_S = 0.1
"""Between two reports of a worker about its blocks."""
KEY = b"one tenant"
JOINT_BLOCKS = (4_000, 8_000, 16_000, 32_000, 64_000, 128_000)

Rule = Literal["prefix-aware", "least loaded", "in turn"]


class Outcome(msgspec.Struct):
    """One run over the trace."""

    cached_share: float
    """Of the prompt tokens."""
    imbalance: float
    """Prompt tokens computed by the busiest worker, to the mean of all."""
    ttft_p50_s: float
    ttft_p99_s: float
    sent: list[int]
    """Requests by worker."""


class Worker:
    """Its real pool, a queue of prompts computed one after the other, and streams that all go at one pace."""

    def __init__(self, num_blocks: int, tokens_per_s: float, max_sequences: int) -> None:
        self.pool = Pool(num_blocks)
        self.index = PrefixIndex(num_blocks)
        self.tokens_per_s = tokens_per_s
        self.max_sequences = max_sequences
        self.num_sequences = 0
        self.num_pending_tokens = 0
        self.num_computed_tokens = 0
        self.num_given_tokens = 0
        self.num_sent = 0
        self.free_at = 0.0

    def has_room(self, num_blocks: int) -> bool:
        return self.num_sequences < self.max_sequences and self.pool.num_available >= num_blocks

    def candidate(self, digests: list[bytes]) -> Candidate:
        num_blocks = self.index.match(digests)
        num_sharing = self.index.num_expecting(digests[num_blocks - 1]) if num_blocks else 0
        matched = num_blocks * MOONCAKE_BLOCK
        return Candidate(matched, self.num_pending_tokens, self.num_sequences, self.num_given_tokens, num_sharing)


class _Held(NamedTuple):
    worker: Worker
    request: Recorded
    digests: list[bytes]
    block_ids: list[int]
    num_hits: int
    num_missing_tokens: int


class Run:
    """The trace through ``workers`` under one rule."""

    def __init__(self, trace: list[Recorded], workers: list[Worker], rule: Rule) -> None:
        self._workers = workers
        self._rule = rule
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._waiting: deque[Recorded] = deque()
        self._ttfts: list[float] = []
        self._num_cached = self._num_prompt = 0
        self._turn = 0
        for request in trace:
            self._at(request.at_s, lambda request=request: self._arrive(request))  # type: ignore[misc]
        end = trace[-1].at_s
        moment = NEWS_S
        while moment < end:
            self._at(moment, self._news)
            moment += NEWS_S

    def outcome(self) -> Outcome:
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        ttfts = sorted(self._ttfts)
        computed = [worker.num_computed_tokens for worker in self._workers]
        return Outcome(
            cached_share=self._num_cached / self._num_prompt,
            imbalance=max(computed) * len(computed) / sum(computed),
            ttft_p50_s=ttfts[len(ttfts) // 2],
            ttft_p99_s=ttfts[len(ttfts) * 99 // 100],
            sent=[worker.num_sent for worker in self._workers],
        )

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (moment, self._num_events, happen))

    def _news(self) -> None:
        for worker in self._workers:
            assert worker.index.update(*worker.pool.take_moved())

    def _arrive(self, request: Recorded) -> None:
        self._waiting.append(request)
        self._advance()

    def _advance(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            num_blocks = -(-(request.num_prompt_tokens + request.num_completion_tokens) // MOONCAKE_BLOCK)
            able = [worker for worker in self._workers if worker.has_room(num_blocks)]
            if not able:
                return
            self._waiting.popleft()
            self._send(self._chosen(able, request), request, num_blocks)

    def _chosen(self, able: list[Worker], request: Recorded) -> Worker:
        if self._rule == "in turn":
            self._turn += 1
            return able[self._turn % len(able)]
        if self._rule == "least loaded":
            return min(able, key=lambda worker: (worker.num_pending_tokens, worker.num_sequences))
        digests = digests_of(request)
        return able[choose(request.num_prompt_tokens, [worker.candidate(digests) for worker in able])]

    def _send(self, worker: Worker, request: Recorded, num_blocks: int) -> None:
        digests = digests_of(request)
        links = [Link(digest, b"") for digest in digests]
        # The last prompt token is computed even when cached: its logits begin the answer.
        usable = (request.num_prompt_tokens - 1) // MOONCAKE_BLOCK
        expected = worker.index.match(digests[:usable]) * MOONCAKE_BLOCK
        worker.num_pending_tokens += request.num_prompt_tokens - expected
        worker.num_given_tokens += request.num_prompt_tokens - expected
        worker.index.expect(digests)
        worker.num_sequences += 1
        worker.num_sent += 1
        hits = worker.pool.match(links, KEY, usable)
        worker.pool.acquire(hits)
        block_ids = hits + worker.pool.allocate(num_blocks - len(hits), hits[-1] if hits else NO_PARENT)
        held = _Held(worker, request, digests, block_ids, len(hits), request.num_prompt_tokens - expected)
        start = max(self._now, worker.free_at)
        num_missing = request.num_prompt_tokens - len(hits) * MOONCAKE_BLOCK
        worker.free_at = start + num_missing / worker.tokens_per_s
        worker.num_computed_tokens += num_missing
        self._num_cached += len(hits) * MOONCAKE_BLOCK
        self._num_prompt += request.num_prompt_tokens
        self._ttfts.append(worker.free_at - request.at_s)
        self._at(worker.free_at, lambda: self._begin(held))

    def _begin(self, held: _Held) -> None:
        """Its prompt is computed: full blocks get their names, the stream begins."""
        held.worker.num_pending_tokens -= held.num_missing_tokens
        named = range(held.num_hits, len(held.digests))
        for position in named:
            parent = held.block_ids[position - 1] if position else NO_PARENT
            sealed = held.worker.pool.seal(held.block_ids[position], parent, Link(held.digests[position], b""), KEY)
            if sealed is None:
                break
            held.block_ids[position] = sealed
        self._at(self._now + held.request.num_completion_tokens * TPOT_S, lambda: self._end(held))

    def _end(self, held: _Held) -> None:
        held.worker.pool.release(held.block_ids)
        held.worker.index.forget(held.digests)
        held.worker.num_sequences -= 1
        self._advance()


def digests_of(request: Recorded) -> list[bytes]:
    """Equal ids are equal histories, so an id can stand for its chained digest."""
    return [block_id.to_bytes(16, "big") for block_id in request.block_ids]


def run(trace: list[Recorded], joint_blocks: int, rule: Rule, num_workers: int = 2) -> Outcome:
    """``num_workers`` with an equal part of the blocks, of the speed and of the batch."""
    workers = [
        Worker(joint_blocks // num_workers, 2 * TOKENS_PER_S / num_workers, 2 * MAX_SEQUENCES // num_workers)
        for _ in range(num_workers)
    ]
    outcome = Run(trace, workers, rule).outcome()
    for worker in workers:
        worker.pool.audit([])
    return outcome


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink, muted, grid = "#1c2b39", "#6b7a88", "#e3e8ec"
    colors = {"joint": ink, "prefix-aware": "#2a78b8", "least loaded": "#b9c4cd", "in turn": "#d8b46a"}
    figure = Figure(figsize=(12, 4.8), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Two workers or one with their joint memory: an hour of Mooncake's chat, simulated",
        x=0.01, ha="left", fontsize=14, fontweight="bold", color=ink,
    )  # fmt: skip
    shares, balance = figure.subplots(1, 2)
    for name, color in colors.items():
        mine = [row for row in rows if row["rule"] == name]
        tokens = [row["joint_blocks"] * MOONCAKE_BLOCK / 1e6 for row in mine]
        label = "one worker, joint memory" if name == "joint" else f"two, {name}"
        shares.plot(tokens, [100 * row["cached_share"] for row in mine], "o-", color=color, label=label, linewidth=2)
        if name != "joint":
            balance.plot(tokens, [row["imbalance"] for row in mine], "o-", color=color, label=label, linewidth=2)
    joint = [row for row in rows if row["rule"] == "joint"]
    shares.plot(
        [row["joint_blocks"] * MOONCAKE_BLOCK / 1e6 for row in joint],
        [90 * row["cached_share"] for row in joint],
        color="#c23b3b", linestyle=(0, (4, 2)), linewidth=1.2, label="wanted: 0.9 of the joint one",
    )  # fmt: skip
    for ax, title in ((shares, "Prompt tokens found in a cache, %"), (balance, "Busiest worker's work to the mean")):
        ax.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=ink)
        ax.set_xscale("log", base=2)
        ax.set_xticks([blocks * MOONCAKE_BLOCK / 1e6 for blocks in JOINT_BLOCKS])
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} M")
        ax.minorticks_off()
        ax.set_xlabel("KV tokens kept by all workers together", color=muted)
        ax.grid(True, color=grid, linewidth=0.8)
        ax.tick_params(colors=muted, labelsize=9.5)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    shares.set_ylim(bottom=0)
    balance.set_ylim(1.0, max(1.5, balance.get_ylim()[1]))
    shares.legend(frameon=False, fontsize=9.5)
    figure.savefig(path)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="mooncake_conversation.jsonl")
    parser.add_argument("--plot", type=Path, help="where to draw the result, as PNG")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    trace = read(options.trace)
    rows: list[dict[str, Any]] = []
    for joint_blocks in JOINT_BLOCKS:
        joint = run(trace, joint_blocks, "prefix-aware", num_workers=1)
        outcomes: dict[str, Outcome] = {"joint": joint}
        for rule in ("prefix-aware", "least loaded", "in turn"):
            outcomes[rule] = run(trace, joint_blocks, rule)
        for name, outcome in outcomes.items():
            row = {"joint_blocks": joint_blocks, "rule": name, **msgspec.structs.asdict(outcome)}
            row["of_joint"] = outcome.cached_share / joint.cached_share
            rows.append(row)
            if not options.json:
                print(
                    f"{joint_blocks:>8} blocks  {name:<13} cached {outcome.cached_share:.3f}"
                    f" ({row['of_joint']:.3f} of joint)  imbalance {outcome.imbalance:.3f}"
                    f"  TTFT p50 {outcome.ttft_p50_s:.2f} p99 {outcome.ttft_p99_s:.2f} s  sent {outcome.sent}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows))
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
