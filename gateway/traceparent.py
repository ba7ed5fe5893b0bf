"""W3C trace context, in and out (Trace Context level 1 and 2, Baggage).

What comes from outside is believed as far as it has the form that the standards give it: a header that does not is as
if it were not there. Nothing of it but the trace's id, the parent's and the flags is ever looked into.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from multidict import CIMultiDictProxy, istr

TRACEPARENT, TRACESTATE, BAGGAGE = istr("traceparent"), istr("tracestate"), istr("baggage")
MAX_STATE_CHARS, MAX_STATE_MEMBERS = 512, 32
MAX_BAGGAGE_BYTES, MAX_BAGGAGE_MEMBERS = 8192, 64

UNDECIDED = "00"
"""In place of a traceparent, of a request that has no trace so far and may come to have one: it is made when somebody
asks (``context_of``), as most have none."""
NO_TRACE = ("", UNDECIDED)
TRACE, SPAN = slice(4, 36), slice(20, 36)
"""Of a request's id, what is that of a trace that begins with it, and of its span. It is random where they have to
be: whoever has the one has the others."""
TAIL = slice(-14, None)
"""Of either's trace id, the 56 bits that are random by level 2."""

SAMPLED, RANDOM = 1, 2
"""The flags that there are; the others are left out of what is passed on, as both levels have it."""

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-[ -~]*)?"
)
_STATE = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x21-\x2b\x2d-\x3c\x3e-\x7e\x20]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MEMBER = re.compile(
    r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\s*=\s*[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*(?:\s*;[\x20-\x2b\x2d-\x7e\t]*)?"
)


class Parent(NamedTuple):
    """Who asked, by its traceparent."""

    trace_id: str
    """32 hex digits, not all zero."""
    span_id: str
    """16 of them."""
    is_sampled: bool
    is_random: bool = False
    """The tail of the trace's id is, by level 2, and whoever goes on with the trace may rely on it."""


def parent_of(traceparent: str) -> Parent | None:
    """Section 3.2 of Trace Context; None where it names no trace. A later version may say more behind what this one
    has, and is read as far as this one goes."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    if found["trace"] == "0" * 32 or found["parent"] == "0" * 16:
        return None
    flags = int(found["flags"], 16)
    return Parent(found["trace"], found["parent"], bool(flags & SAMPLED), bool(flags & RANDOM))


def parent_in(headers: CIMultiDictProxy[str]) -> Parent | None:
    """As ``parent_of``; of several headers none counts, since nobody knows which is the forged one."""
    told = headers.getall(TRACEPARENT, ())
    return parent_of(told[0].strip(" \t")) if len(told) == 1 else None


def state_of(headers: CIMultiDictProxy[str]) -> str:
    """``tracestate`` as it may be passed on, section 3.3: empty where any member of it is malformed, or named twice."""
    members = _members(headers, TRACESTATE)
    names = [member.partition("=")[0] for member in members]
    text = ",".join(members)
    is_good = (
        len(members) <= MAX_STATE_MEMBERS
        and len(text) <= MAX_STATE_CHARS
        and len(set(names)) == len(names)
        and all(_STATE.fullmatch(member) for member in members)
    )
    return text if is_good else ""


def baggage_of(headers: CIMultiDictProxy[str]) -> str:
    """``baggage`` as it may be passed on: its members that have the form, as many as there may be."""
    kept: list[str] = []
    num_bytes = 0
    for member in _members(headers, BAGGAGE):
        num_bytes += len(member) + 1
        if len(kept) == MAX_BAGGAGE_MEMBERS or num_bytes > MAX_BAGGAGE_BYTES:
            break
        if _MEMBER.fullmatch(member):
            kept.append(member)
    return ",".join(kept)


def traceparent(trace_id: str, span_id: str, is_sampled: bool, is_random: bool = False) -> str:
    """Of a span of ours, for whoever it asks."""
    return f"00-{trace_id}-{span_id}-{SAMPLED * is_sampled | RANDOM * is_random:02x}"


def context_of(request_id: str, said: str) -> str:
    """The traceparent of this request; ``said``: it, or UNDECIDED, or nothing where there are no traces."""
    return traceparent(request_id[TRACE], request_id[SPAN], False) if said == UNDECIDED else said


def below(parent: str, span_id: str) -> str:
    """Of another span of ours in the same trace, by the traceparent of the one above it."""
    return parent[:36] + span_id + parent[52:]


def _members(headers: CIMultiDictProxy[str], name: istr) -> list[str]:
    told = ",".join(headers.getall(name, ()))
    return [member for each in told.split(",") if (member := each.strip(" \t"))]
