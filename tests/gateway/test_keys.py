"""Keys that are twice in an object are found however the JSON is written, and nothing else is taken for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai import Malformed
from gateway.openai.keys import check_keys

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


@given(VALUE, WRITTEN)
def test_what_has_each_key_once_passes(value: Any, written: dict[str, Any]):
    check_keys(json.dumps([value], **written).encode())


@given(st.dictionaries(TEXT, VALUE, min_size=1, max_size=3), VALUE, VALUE, WRITTEN)
def test_a_key_that_is_there_twice_is_named(value: dict[str, Any], other: Any, beside: Any, written: dict[str, Any]):
    key = next(iter(value))
    inside = json.dumps(value, **written).rstrip()[:-1] + f",{json.dumps(key)}:{json.dumps(other)}}}"
    body = f'{{"": {json.dumps(beside)}, "a": [0, {inside}]}}'.encode()
    with pytest.raises(Malformed) as refused:
        check_keys(body)
    assert (refused.value.param, refused.value.code) == (f"a[1].{key}", "duplicate_key")


def test_a_key_may_be_spelled_in_two_ways():
    with pytest.raises(Malformed, match=r"'a\.b' is there twice"):
        check_keys(rb'{"a": {"b": 1, "\u0062": 2}}')
