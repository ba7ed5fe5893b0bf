"""Keys that are twice in an object are found however the JSON is written, and nothing else is taken for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai import Malformed, duplicate_keys, parse_chat

TEXT = st.text(st.sampled_from('"\\:{},n\n\0u0é🙂 '), max_size=8)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
WRITTEN = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 1]),
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([None, (",", ":")]),
    }
)


def checked(body: bytes) -> None:
    duplicate_keys.check_keys(body, duplicate_keys.count_quotes(body))


@given(VALUE, WRITTEN)
def test_what_has_each_key_once_passes(value: Any, written: dict[str, Any]):
    checked(json.dumps([value], **written).encode())


@given(st.dictionaries(TEXT, VALUE, min_size=1, max_size=3), VALUE, VALUE, WRITTEN)
def test_a_key_that_is_there_twice_is_named(value: dict[str, Any], other: Any, beside: Any, written: dict[str, Any]):
    key = next(iter(value))
    inside = json.dumps(value, **written).rstrip()[:-1] + f",{json.dumps(key)}:{json.dumps(other)}}}"
    body = f'{{"": {json.dumps(beside)}, "a": [0, {inside}]}}'.encode()
    with pytest.raises(Malformed) as refused:
        checked(body)
    assert (refused.value.param, refused.value.code) == (f"a[1].{key}", "duplicate_key")


def test_a_key_may_be_spelled_in_two_ways():
    with pytest.raises(Malformed, match=r"'a\.b' is there twice"):
        checked(rb'{"a": {"b": 1, "\u0062": 2}}')


MESSAGE = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT | st.just([{"type": "text", "text": "x"}])},
    optional={"name": TEXT, "refusal": st.none(), "reasoning_content": TEXT},
)
CHAT = st.fixed_dictionaries(
    {"model": TEXT, "messages": st.lists(MESSAGE, min_size=1, max_size=3)},
    optional={
        "temperature": st.none() | st.floats(0, 2),
        "stop": st.none() | st.lists(st.just("x"), max_size=2) | st.just("x"),
        "stream": st.just(True),
        "stream_options": st.sampled_from([None, {}, {"include_usage": True}]),
        "metadata": st.none() | st.just({"a": "b"}),
        "tools": st.sampled_from([None, []]),
        "nobody_reads": VALUE,
    },
)


def with_more(value: dict[str, Any], more: str, written: dict[str, Any]) -> str:
    return f"{json.dumps(value, **written).rstrip()[:-1]}, {more}}}"


@given(CHAT, MESSAGE, st.booleans(), WRITTEN, st.data())
def test_a_chat_passes_unless_a_key_of_it_is_there_twice(
    chat: dict[str, Any], message: dict[str, Any], is_within: bool, written: dict[str, Any], data: Any
):
    chat["stream"] = True
    parse_chat(json.dumps(chat, **written).encode())
    key, value = data.draw(st.sampled_from([*(message if is_within else chat).items()]))
    again = f"{json.dumps(key)}: {json.dumps(value)}"
    if is_within:
        del chat["messages"]
        again = f'"messages": [{with_more(message, again, written)}]'
    with pytest.raises(Malformed) as refused:
        parse_chat(with_more(chat, again, written).encode())
    assert (refused.value.param, refused.value.code) == (f"messages[0].{key}" if is_within else key, "duplicate_key")


@given(VALUE, WRITTEN, st.integers(1, 9))
def test_a_long_body_is_counted_in_slices(value: Any, written: dict[str, Any], slice_bytes: int):
    body = json.dumps([value, "\\" * 9, '"'], **written).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(duplicate_keys, "LONG_BYTES", 0)
        patched.setattr(duplicate_keys, "SLICE_BYTES", slice_bytes)
        in_slices = duplicate_keys.count_quotes(body)
    assert in_slices == duplicate_keys.count_quotes(body)


@pytest.mark.parametrize("value", [[[]], [{}], ["a"], ["\\", '"'], {"a": "b"}, [None]])
def test_a_long_body_has_so_many_parts_and_no_more(value: Any):
    inside = json.dumps(value)[1:-1]
    most = (
        duplicate_keys.MAX_VALUES
        if value == [None]
        else duplicate_keys.MAX_PARTS // len(value) // (1 + isinstance(value, dict))
    )
    outside = b'{"a": "%s", "b": ' % (b"[{,:" * duplicate_keys.MAX_VALUES)  # in a string they are none
    few, many = (f"{', '.join([inside] * number)}".encode() for number in (most - 10, most + 10))
    opening, closing = (b"{", b"}") if isinstance(value, dict) else (b"[", b"]")
    assert duplicate_keys.count_quotes(outside + opening + few + closing + b"}") > 0
    with pytest.raises(Malformed) as refused:
        duplicate_keys.count_quotes(outside + opening + many + closing + b"}")
    assert refused.value.code == "too_many_parts"
