"""The spans of a request that is over: one for the whole, one for each part of its way, and below the worker's what it
told.

The parts lie end to end. The last one lasts until the answer's last byte, whatever it is, so a refusal is the end of
the part that refused. What a worker tells are durations by its own clock; they are laid out from the instants that the
gateway knows, and cut to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from gateway.stays import Stay
from gateway.tracing import names
from gateway.tracing.kept import Kept, Ride
from policies import wire

Value = Any
"""str, bool, int, float or a list of one of them."""


class Event(NamedTuple):
    """Something that happened at one instant."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value]


class Span(NamedTuple):
    """One, with Unix nanoseconds."""

    name: str
    span_id: int
    parent_id: int
    """0: none."""
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    events: tuple[Event, ...] = ()
    is_remote: bool = False
    """Its parent is somebody else's."""
    failed: bool = False
    link: str = ""
    """W3C trace context of a span of another request, on which this one leans; empty: of none."""


Part = tuple[float, str, Stay | None]
"""Of the way: its name, from when on, and with which worker, if it is about one."""


def spans_of(kept: Kept, gen_ai: Mapping[str, str]) -> list[Span]:
    """The request's own comes first. ``gen_ai``: names by our words (``names.gen_ai``)."""
    build = _Build(kept, gen_ai)
    build.run()
    return build.spans


def parts_of(kept: Kept) -> list[Part]:
    """In order, the first from the first byte on; none begins before the one before it, nor after the end."""
    parts: list[Part] = []
    limit = min(kept.ended_at, kept.settle_at or kept.ended_at)
    before = min(kept.received_at, limit)
    for at, name, stay in _noted(kept):
        before = limit if at > limit else at if at > before else before
        parts.append((before, name, stay))
    if kept.settle_at:
        parts.append((max(limit, before), names.SETTLE, None))
    return parts


def _noted(kept: Kept) -> list[Part]:
    """All but the last, as they were noted."""
    noted: list[Part] = []
    if kept.kind == "request":
        noted.append((kept.received_at, names.RECEIVE, None))
    if names.operation_of(kept.method, kept.route) is None:
        noted.append((kept.started_at, names.ANSWER, None))
        return noted
    noted.append((kept.started_at, names.RENDER if kept.kind == "background" else names.AUTH, None))
    for at, name in (
        (kept.parse_at, names.PARSE),
        (kept.load_at, names.LOAD),
        (kept.render_at, names.RENDER),
        (kept.cache_at, names.CACHE_LOOK),
        (kept.admit_at, names.ADMIT),
    ):
        if at:
            noted.append((at, name, None))
    if kept.replay_at:
        noted.append((kept.replay_at, names.REPLAY, None))
    elif kept.queue_at:
        noted += _flown(kept)
    return noted


def _flown(kept: Kept) -> Iterator[Part]:
    queue_at = kept.queue_at
    if not kept.rides:
        # Of one whose payer has left, the row says "miss", but it was another that began.
        is_shared = bool(kept.follows) or (kept.row is not None and kept.row.cache == "shared")
        yield queue_at, names.SHARED if is_shared else names.STREAM, None
        return
    yield queue_at, names.QUEUE, None
    if len(kept.rides) == 1:
        (ride,) = kept.rides
        for number, stay in enumerate(ride.stays):
            if not stay.span_id:
                yield stay.routed_at, names.ROUTING, stay
            yield stay.sent_at, _with(stay), stay
            if stay.left_at:
                is_last = number == len(ride.stays) - 1 and stay.left in ("", "failed")
                yield stay.left_at, names.STREAM if is_last else names.QUEUE, None
        return
    stays = [stay for ride in kept.rides for stay in ride.stays]
    if stays:
        yield min(stay.sent_at for stay in stays), _with(stays[0]), None
        if all(ride.stays and ride.stays[-1].left_at for ride in kept.rides):
            yield max(stay.left_at for stay in stays), names.STREAM, None


def _with(stay: Stay) -> str:
    """What the part is called that was spent there."""
    return names.UPSTREAM_SPAN if stay.span_id else names.WORKER_SPAN


class _Build:
    def __init__(self, kept: Kept, gen_ai: Mapping[str, str]) -> None:
        self._kept = kept
        self._gen_ai = gen_ai
        self._root = self._last_id = int(kept.span_id, 16)
        self._unix_ns = round(1e9 * kept.unix_s)
        self.spans: list[Span] = []

    def run(self) -> None:
        kept = self._kept
        parent_id = int(kept.parent_id, 16) if kept.parent_id else 0
        failed = kept.status >= 500 or (kept.row is not None and kept.row.status >= 500)
        self.spans.append(
            Span(
                self._name(),
                self._root,
                parent_id,
                self._ns(kept.received_at),
                self._ns(kept.ended_at),
                self._whole(),
                tuple(self._moments()),
                bool(parent_id) and kept.kind != "background",
                failed,
            )
        )
        end = (kept.ended_at, "", None)
        parts = [*parts_of(kept), end]
        bounds_ns = [self._ns(at) for at, _, _ in parts]
        for (part, start_ns), (after, end_ns) in pairwise(zip(parts, bounds_ns, strict=True)):
            self._part(part, after[0], start_ns, end_ns, failed and after is end)

    def _name(self) -> str:
        kept = self._kept
        operation = names.operation_of(kept.method, kept.route)
        if operation is None:
            return f"{kept.method} {kept.route}".rstrip()
        # A request for a model that nobody serves does not come so far, and its name is whatever a client made up.
        return operation if kept.asked is None else f"{operation} {kept.asked.model}"

    def _whole(self) -> dict[str, Value]:
        kept, row, asked, gen_ai = self._kept, self._kept.row, self._kept.asked, self._gen_ai
        said: dict[str, Value] = {
            names.METHOD: kept.method,
            names.STATUS: kept.status,
            names.REQUEST_ID: kept.request_id,
            names.KEPT_FOR: kept.kept_for,
        }
        if kept.route:
            said[names.ROUTE] = kept.route
        if kept.error:
            said[names.ERROR_TYPE] = kept.error
        if kept.batch:
            said[names.BATCH] = kept.batch
        if kept.tenant_id:
            said |= {names.TENANT_ID: kept.tenant_id, names.KEY_ID: kept.key_id}
        told: dict[str, Value] = {}
        operation = names.operation_of(kept.method, kept.route)
        if operation is not None:
            told |= {"operation": operation, "provider": names.PROVIDER, "api_type": names.API_TYPES.get(kept.route)}
        if asked is not None:
            told |= {
                "request_model": asked.model,
                "response_model": None if row is None else asked.model,
                "stream": asked.streams,
                "seed": asked.seed,
                "request_tier": asked.service_tier,
                "output_type": asked.output_type,
            }
        if row is not None:
            told |= {
                "response_id": kept.response_id or None,
                "fingerprint": kept.fingerprint or None,
                "response_tier": row.service_tier,
                "finish_reasons": row.finish_reason.split(",") if row.finish_reason else None,
                "input_tokens": row.num_prompt_tokens,
                "output_tokens": row.num_completion_tokens,
                "cached_tokens": row.num_cached_tokens,
                "reasoning_tokens": row.num_reasoning_tokens or None,
                "num_choices": row.num_sequences if row.num_sequences > 1 else None,
                "time_to_first_chunk": None if row.ttft_ms is None else row.ttft_ms / 1e3,
                "input_messages": kept.prompt or None,
                "output_messages": kept.completion or None,
            }
            said |= {
                names.SLA_CLASS: row.sla_class,
                names.POLICY: f"{row.policy_name}@{row.policy_version}",
                names.CACHE: row.cache,
                names.COST_MICROS: row.cost_micros,
                names.ENGINE_S: row.engine_us / 1e6,
                names.KV_BLOCK_S: row.kv_block_ms / 1e3,
            }
            if row.upstream is not None:
                said[names.UPSTREAM] = row.upstream
        if kept.sampling is not None and operation in ("chat", "text_completion"):
            sampling = kept.sampling
            told |= {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or None,
                "frequency_penalty": sampling.frequency_penalty or None,
                "presence_penalty": sampling.presence_penalty or None,
            }
        for ours, value in told.items():
            if value is not None and (name := gen_ai.get(ours)) is not None:
                said[name] = value
        return said

    def _moments(self) -> Iterator[Event]:
        """What one looks for first."""
        kept = self._kept
        firsts = [ride.first_token_at for ride in kept.rides if ride.first_token_at is not None]
        if firsts and min(firsts) <= kept.ended_at:
            yield Event(names.FIRST_TOKEN, self._ns(min(firsts)), {})
        for ride in kept.rides:
            came_with = [*(stay.num_tokens for stay in ride.stays), ride.num_tokens]
            for number, stay in enumerate(ride.stays):
                if stay.left == "lost":
                    told = {names.WORKER: stay.worker, names.NUM_TOKENS: came_with[number + 1]}
                    yield Event(names.LOST, self._ns(min(stay.left_at, kept.ended_at)), told)

    def _part(self, part: Part, ends_at: float, start_ns: int, end_ns: int, failed: bool) -> None:
        kept, (_, name, stay), said = self._kept, part, dict[str, Value]()
        if failed and kept.error:
            said[names.ERROR_TYPE] = kept.error
        events: tuple[Event, ...] = ()
        span_id = self._next_id()
        below: Iterable[Span] = ()
        if name == names.RECEIVE:
            said[names.LOOP_LAG_MS] = kept.lag_ms
        elif name == names.CACHE_LOOK and kept.row is not None:
            said[names.CACHE] = kept.row.cache
        elif name == names.ROUTING and stay is not None:
            said[names.WORKER] = stay.worker
        elif name in (names.WORKER_SPAN, names.UPSTREAM_SPAN) and stay is not None:
            is_last = stay is kept.rides[0].stays[-1]
            worked, events = self._stay(stay, kept.rides[0], ends_at, is_last)
            said |= worked
            span_id = int(stay.span_id, 16) if stay.span_id else span_id
            failed = failed or stay.left in ("lost", "failed")
        elif name in (names.WORKER_SPAN, names.UPSTREAM_SPAN):
            below = self._rides(span_id, ends_at)
            if kept.num_flights > len(kept.rides):
                said[names.NUM_LEFT_OUT] = kept.num_flights - len(kept.rides)
        link = kept.follows if name == names.SHARED else ""
        self.spans.append(Span(name, span_id, self._root, start_ns, end_ns, said, events, False, failed, link))
        self.spans += below

    def _rides(self, parent_id: int, ends_at: float) -> Iterator[Span]:
        """Prompts that were computed beside each other."""
        for ride in self._kept.rides:
            for number, stay in enumerate(ride.stays):
                until = min(stay.left_at or ends_at, ends_at)
                said, events = self._stay(stay, ride, until, number == len(ride.stays) - 1)
                yield Span(
                    _with(stay),
                    int(stay.span_id, 16) if stay.span_id else self._next_id(),
                    parent_id,
                    self._ns(min(stay.sent_at, until)),
                    self._ns(until),
                    said,
                    events,
                    failed=stay.left in ("lost", "failed"),
                )

    def _stay(
        self, stay: Stay, ride: Ride, ends_at: float, is_last: bool
    ) -> tuple[dict[str, Value], tuple[Event, ...]]:
        """With one worker or upstream: what is said of it, and what happened. What goes on within an upstream nobody
        knows but itself, and its own spans."""
        if stay.span_id:
            told_of = {names.UPSTREAM: stay.worker, names.UPSTREAM_LEFT: stay.left, names.ERROR_TYPE: stay.failure}
            return {name: value for name, value in told_of.items() if value}, ()
        said: dict[str, Value] = {names.WORKER: stay.worker, names.NUM_PROMPT_TOKENS: ride.num_prompt_tokens}
        if ride.has_grammar:
            said[names.HAS_GRAMMAR] = True
        if stay.num_tokens:
            said[names.NUM_CONTINUED] = stay.num_tokens
        if stay.left:
            said[names.LEFT] = stay.left
        told = ride.told
        if not is_last or not told:
            return said, ()
        longest = max(told, key=lambda each: each.queue_s + each.prefill_s + each.decode_s)
        said |= {
            names.NUM_CACHED_TOKENS: told[0].num_cached_tokens,
            names.NUM_TOKENS: ride.num_tokens,
            names.WAIT_MS: 1e3 * longest.queue_s,
            names.PREFILL_MS: 1e3 * longest.prefill_s,
            names.DECODE_MS: 1e3 * longest.decode_s,
            names.NUM_PREEMPTIONS: sum([each.num_preemptions for each in told]),
            names.NUM_DRAFTED: sum([each.num_drafted_tokens for each in told]),
            names.NUM_ACCEPTED: sum([each.num_accepted_tokens for each in told]),
            names.ENGINE_S: sum([each.engine_s for each in told]),
            names.KV_BLOCK_S: sum([each.kv_block_s for each in told]),
        }
        is_first = ride.first_token_at is not None and not stay.num_tokens
        first_at = ride.first_token_at if is_first else stay.sent_at + longest.queue_s + longest.prefill_s
        return said, tuple(self._happened(longest, told, stay.sent_at, first_at or 0.0, ends_at))

    def _happened(
        self, finish: wire.Finish, told: list[wire.Finish], sent_at: float, first_at: float, ends_at: float
    ) -> Iterator[Event]:
        """By the worker's own durations. ``first_at``: when its first token was here; what is before it is that much
        earlier, and what lies between it and when it was sent is the way there, and the wait for its grammar and
        adapter."""
        first_at = min(max(first_at, sent_at), ends_at)
        began_at = max(sent_at, first_at - finish.prefill_s)
        came_at = max(sent_at, began_at - finish.queue_s)
        yield Event(names.TAKEN_IN, self._ns(came_at), {})
        yield Event(names.SCHEDULED, self._ns(began_at), {})
        for number, each in enumerate(told):
            timeline = each.timeline
            if timeline is None:
                continue
            for chunk in timeline.chunks:
                said = {names.NUM_TOKENS: chunk.num_tokens, names.CHUNK_MS: 1e3 * chunk.seconds}
                yield Event(names.CHUNK, self._ns(min(came_at + chunk.began_s, ends_at)), said)
            for at_s in timeline.preempted_s:
                yield Event(names.PREEMPTED, self._ns(min(came_at + at_s, ends_at)), {names.SEQUENCE: number})
        yield Event(names.FIRST_TOKEN, self._ns(first_at), {})
        yield Event(names.LAST_TOKEN, self._ns(min(first_at + finish.decode_s, ends_at)), {})

    def _ns(self, at: float) -> int:
        return self._unix_ns + int(1e9 * at)

    def _next_id(self) -> int:
        """Apart from each other, and with the request's own as random as that is."""
        self._last_id = (self._last_id + 1) % (1 << 64) or 1
        return self._last_id
