"""W3C trace context from outside: what is read of it, what is passed on, and what is as if it were not there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.traceparent import Parent, baggage_of, parent_in, parent_of, state_of, traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEX = "0123456789abcdef"


def headers(*pairs):
    return CIMultiDictProxy(CIMultiDict(pairs))


def digits(num):
    return st.text(HEX, min_size=num, max_size=num)


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", Parent(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-00", Parent(TRACE, SPAN, False)),
        (f"00-{TRACE}-{SPAN}-03", Parent(TRACE, SPAN, True, True)),
        (f"00-{TRACE}-{SPAN}-fe", Parent(TRACE, SPAN, False, True)),
        (f"01-{TRACE}-{SPAN}-01-more", Parent(TRACE, SPAN, True)),
        (f"cc-{TRACE}-{SPAN}-01", Parent(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"01-{TRACE}-{SPAN}-01more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        (f" 00-{TRACE}-{SPAN}-01", None),
        ("", None),
    ],
)
def test_a_parent_is_named_as_w3c_says_or_not_at_all(header, parent):
    assert parent_of(header) == parent


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-fx]{2}-[0-9a-f]{30,34}-[0-9a-f]{15,17}-[0-9a-f]{1,3}.?"))
def test_whatever_comes_is_a_whole_parent_or_none(header):
    parent = parent_of(header)
    if parent is not None:
        assert header[3:35] == parent.trace_id != "0" * 32
        assert header[36:52] == parent.span_id != "0" * 16
        assert set(parent.trace_id + parent.span_id) <= set(HEX)


@given(digits(32), digits(16), st.booleans(), st.booleans())
def test_what_is_passed_on_is_what_came(trace_id, span_id, is_sampled, is_random):
    parent = parent_of(traceparent(trace_id, span_id, is_sampled, is_random))
    if int(trace_id, 16) and int(span_id, 16):
        assert parent == Parent(trace_id, span_id, is_sampled, is_random)
    else:
        assert parent is None


@given(
    st.integers(1, 254), digits(32), digits(16), digits(2), st.text(st.characters(min_codepoint=32, max_codepoint=126))
)
def test_a_later_version_is_read_as_far_as_this_one_goes(version, trace_id, span_id, flags, more):
    told = f"{version:02x}-{trace_id}-{span_id}-{flags}"
    assert parent_of(told) == parent_of(f"{told}-{more}")
    assert (parent_of(told) is None) == (not int(trace_id, 16) or not int(span_id, 16))


def test_of_two_parents_neither_counts():
    one, other = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN[::-1]}-01"
    assert parent_in(headers(("traceparent", one))) == Parent(TRACE, SPAN, True)
    assert parent_in(headers(("traceparent", one), ("TraceParent", other))) is None
    assert parent_in(headers()) is None


@pytest.mark.parametrize(
    ("told", "passed_on"),
    [
        (["congo=t61rcWkgMzE, rojo=00f067aa0ba902b7"], "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"),
        (["congo=1", "rojo=2"], "congo=1,rojo=2"),
        (["fw529a3039@dt=FfAAAA"], "fw529a3039@dt=FfAAAA"),
        (["congo=1,congo=2"], ""),
        (["Congo=1"], ""),
        (["congo"], ""),
        (["congo=a=b"], ""),
        ([",".join(f"a{n}=1" for n in range(33))], ""),
        (["a=" + "b" * 600], ""),
        ([], ""),
    ],
)
def test_a_state_is_passed_on_whole_or_not_at_all(told, passed_on):
    assert state_of(headers(*(("tracestate", each) for each in told))) == passed_on


@given(st.lists(st.text(max_size=300), max_size=40))
def test_baggage_is_what_has_the_form_and_within_bounds(told):
    passed_on = baggage_of(headers(*(("baggage", each) for each in told)))
    assert len(passed_on) <= 8192
    assert baggage_of(headers(("baggage", passed_on))) == passed_on
    assert all("=" in member for member in passed_on.split(",") if passed_on)


def test_baggage_keeps_its_properties():
    assert baggage_of(headers(("baggage", "user=1;secret , bad one,session=a%20b"))) == "user=1;secret,session=a%20b"
