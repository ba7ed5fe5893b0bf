"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Any

from tests.gateway.bad_bodies.cases import HUGE, Case, nested

PATH = "/v1/embeddings"
GOOD: dict[str, Any] = {"model": "demo", "input": "Hello"}


def bad(param: str | None, status: int = 400, **fields: Any) -> Case:
    return Case(param, {**GOOD, **fields}, PATH, status)


def given(param: str, *inputs: Any) -> Case:
    return bad(param, input=list(inputs))


def called(name: str, value: Any) -> Case:
    """The texts under another server's name for them."""
    return Case("input", {"model": "demo", name: value}, PATH)


def raw(param: str | None, body: bytes) -> Case:
    return Case(param, body, PATH)


def at(method: str, path: str, status: int) -> Case:
    return Case(None, b"", path, status, method=method)


CASES = [
    # What it is asked of, and of what
    Case("model", {"input": "Hello"}, PATH),
    bad("model", model=None),
    bad("model", model=3),
    bad("model", model={}),
    bad("model", 404, model="text-embedding-3-small"),
    bad("model", 404, model="demo\0"),
    Case("input", {"model": "demo"}, PATH),
    bad("input", input=None),
    bad("input", input=""),
    bad("input", input=5),
    bad("input", input=True),
    bad("input", input={"text": "Hello"}),
    bad("input", input=[]),
    bad("input", input=[""]),
    bad("input", input=["Hello", ""]),
    bad("input", input=[[]]),
    bad("input", input=[[5], []]),
    bad("input", input=["Hello", 5]),
    bad("input", input=[5, "Hello"]),
    bad("input", input=[5, [5]]),
    bad("input", input=["Hello", [5]]),
    bad("input[0]", input=[None]),
    bad("input[0]", input=[True]),
    bad("input[0]", input=[1.5]),
    bad("input[0]", input=[{"text": "Hello"}]),
    bad("input[1]", input=[5, -1]),
    bad("input[0]", input=[2**31]),
    bad("input[0]", input=[HUGE]),
    bad("input[0][0]", input=[["Hello"]]),
    bad("input[0][1]", input=[[5, 5.5]]),
    bad("input[1][0]", input=[[5], [-5]]),
    bad("input[0][0]", input=nested()),
    bad("input", input=["Hello"] * 2049),
    bad("encoding_format", encoding_format="hex"),
    bad("encoding_format", encoding_format="Base64"),
    bad("encoding_format", encoding_format=5),
    bad("encoding_format", encoding_format=["float"]),
    bad("dimensions", dimensions=0),
    bad("dimensions", dimensions=-8),
    bad("dimensions", dimensions="8"),
    bad("dimensions", dimensions=8.5),
    bad("dimensions", dimensions=HUGE),
    bad("dimensions", dimensions=True),
    bad("user", user=5),
    bad("user", user="x" * 513),
    bad("safety_identifier", safety_identifier="x" * 129),
    bad("service_tier", service_tier="bulk"),
    bad("metadata", metadata={"a": 5}),
    bad("metadata", metadata=[["a", "b"]]),
    bad("metadata", metadata={str(number): "" for number in range(17)}),
    bad("penstock", penstock=5),
    bad("penstock.receipt", penstock={"receipt": "yes"}),
    Case("input", b'{"model": "demo", "input": "Hello", "input": 5}', PATH),
    bad("model"),  # which gives no vectors, as is known once all else is well
    bad("model", input=[599]),
    # Other names of the model
    bad("model", model=True),
    bad("model", model=1.5),
    bad("model", model=["demo"]),
    bad("model", 404, model=""),
    bad("model", 404, model="demo "),
    bad("model", 404, model="DEMO"),
    bad("model", 404, model="../demo"),
    bad("model", 404, model="x" * 100_000),
    # Texts among what is none
    given("input[1]", "Hello", None),
    given("input[1]", "Hello", True),
    given("input[1]", "Hello", 1.5),
    given("input[2]", "Hello", "there", {"text": "x"}),
    given("input[0]", {"type": "text", "text": "Hello"}),
    given("input[0]", {}),
    given("input", "", "Hello"),
    given("input", "Hello", "", "there"),
    # Token ids among what is none
    given("input[1]", 5, None),
    given("input[1]", 5, True),
    given("input[1]", 5, 5.5),
    given("input[1]", 5, {}),
    given("input[1]", 5, 2**31),
    given("input[1]", 5, -HUGE),
    given("input[2]", 0, 0, -1),
    given("input", 5, "5"),
    given("input", 5, []),
    # Lists of token ids among what is none
    given("input[0][0]", [None]),
    given("input[0][0]", [True]),
    given("input[0][0]", [{}]),
    given("input[0][0]", [[5]]),
    given("input[0][1]", [5, "Hello"]),
    given("input[0][1]", [5, -1]),
    given("input[0][0]", [2**31]),
    given("input[1][0]", [5], [HUGE]),
    given("input[1][1]", [5], [6, [7]]),
    given("input[1][0]", [5], ["Hello"]),
    given("input", [5], "Hello"),
    given("input", [5], 6),
    given("input", [], [5]),
    given("input", [5], [6], []),
    given("input[1]", [5], None),
    given("input[1]", [5], {"ids": [6]}),
    # What is no list
    bad("input", input=False),
    bad("input", input=0),
    bad("input", input=1.5),
    bad("input", input=HUGE),
    bad("input", input={}),
    bad("input", input={"ids": [5]}),
    bad("input", input=[[5]] * 2049),
    called("text", "Hello"),
    called("texts", ["Hello"]),
    called("inputs", "Hello"),
    called("prompt", "Hello"),
    called("content", "Hello"),
    called("messages", [{"role": "user", "content": "Hello"}]),
    called("Input", "Hello"),
    # How the vectors are written
    bad("encoding_format", encoding_format=""),
    bad("encoding_format", encoding_format="FLOAT"),
    bad("encoding_format", encoding_format="base64 "),
    bad("encoding_format", encoding_format="float32"),
    bad("encoding_format", encoding_format="int8"),
    bad("encoding_format", encoding_format="ubinary"),
    bad("encoding_format", encoding_format=True),
    bad("encoding_format", encoding_format=0),
    bad("encoding_format", encoding_format={"type": "float"}),
    # How long they are
    bad("dimensions", dimensions=-HUGE),
    bad("dimensions", dimensions=2**63),
    bad("dimensions", dimensions=0.5),
    bad("dimensions", dimensions="all"),
    bad("dimensions", dimensions=[8]),
    bad("dimensions", dimensions={"size": 8}),
    bad("dimensions", dimensions=False),
    # Whom it is for, and what it costs
    bad("user", user=[]),
    bad("user", user={"id": "me"}),
    bad("user", user=True),
    bad("user", user="ü" * 513),
    bad("safety_identifier", safety_identifier=5),
    bad("safety_identifier", safety_identifier=["me"]),
    bad("safety_identifier", safety_identifier=False),
    bad("service_tier", service_tier=""),
    bad("service_tier", service_tier="Default"),
    bad("service_tier", service_tier="standard"),
    bad("service_tier", service_tier=1),
    bad("service_tier", service_tier=["auto"]),
    bad("metadata", metadata="a=b"),
    bad("metadata", metadata=5),
    bad("metadata", metadata=True),
    bad("metadata", metadata=["a"]),
    bad("metadata", metadata={"a": None}),
    bad("metadata", metadata={"a": True}),
    bad("metadata", metadata={"a": ["b"]}),
    bad("metadata", metadata={"a": {"b": "c"}}),
    bad("metadata", metadata={"k" * 65: "v"}),
    bad("metadata", metadata={"k": "v" * 513}),
    bad("metadata", metadata={"a": nested()}),
    bad("penstock", penstock=True),
    bad("penstock", penstock="receipt"),
    bad("penstock", penstock=["receipt"]),
    bad("penstock.receipt", penstock={"receipt": 1}),
    bad("penstock.receipt", penstock={"receipt": {}}),
    bad("penstock.receipt", penstock={"receipt": "true"}),
    # Said twice, of which the last counts
    raw("model", b'{"model": "demo", "input": "Hello", "model": null}'),
    raw("dimensions", b'{"model": "demo", "input": "Hello", "dimensions": 8, "dimensions": 0}'),
    raw("encoding_format", b'{"model": "demo", "input": "x", "encoding_format": "float", "encoding_format": "hex"}'),
    raw("metadata", b'{"model": "demo", "input": "Hello", "metadata": {"a": "b", "a": 5}}'),
    # Numbers that are none, or more than any
    raw("input[0]", b'{"model": "demo", "input": [1e999]}'),
    raw("input[1]", b'{"model": "demo", "input": [5, -1e400]}'),
    raw("input[0][0]", b'{"model": "demo", "input": [[5.0e-1]]}'),
    raw("input[0]", b'{"model": "demo", "input": [-0.1]}'),
    raw("dimensions", b'{"model": "demo", "input": "Hello", "dimensions": 1e999}'),
    raw("dimensions", b'{"model": "demo", "input": "Hello", "dimensions": -0}'),
    raw(None, b'{"model": "demo", "input": [05]}'),
    raw(None, b'{"model": "demo", "input": [+5]}'),
    raw(None, b'{"model": "demo", "input": [5,]}'),
    raw(None, b'{"model": "demo", "input": [5 6]}'),
    raw(None, b'{"model": "demo", "input": [0x05]}'),
    raw(None, b'{"model": "demo", "input": [NaN]}'),
    raw(None, b'{"model": "demo", "input": [5'),
    raw(None, b'{"model": "demo", "input": (5, 6)}'),
    # Texts that are none
    raw(None, b'{"model": "demo", "input": "\\ud800"}'),
    raw(None, b'{"model": "demo", "input": ["Hello", "\\udfff"]}'),
    raw(None, b'{"model": "demo", "input": ["Hello\xff"]}'),
    raw(None, b'{"model": "demo", "input": "Hello\nthere"}'),
    raw(None, b'{"model": "demo", "input": "Hello\0"}'),
    raw(None, b'{"model": "demo", "input": "Hello", "metadata": {"\\ud800": "x"}}'),
    raw(None, b'{"model": "demo", "input": "Hello", "user": "\\ud800"}'),
    raw(None, b"{'model': 'demo', 'input': 'Hello'}"),
    # Where it is not asked
    at("GET", PATH, 405),
    at("PUT", PATH, 405),
    at("PATCH", PATH, 405),
    at("DELETE", PATH, 405),
    Case(None, GOOD, f"{PATH}/", 404),
    Case(None, GOOD, "/v1/embedding", 404),
    Case(None, GOOD, "/v1/engines/demo/embeddings", 404),
    Case(None, GOOD, f"{PATH}/demo", 404),
    # What the heads of a request may not say
    Case("Idempotency-Key", GOOD, PATH, headers={"idempotency-key": "x" * 256}),
    Case("Idempotency-Key", GOOD, PATH, headers={"idempotency-key": "a\tb"}),
]
NUM_DIMENSIONS = 8
WITH_VECTORS = [
    bad("dimensions", dimensions=NUM_DIMENSIONS + 1),
    bad("dimensions", dimensions=2**63 - 1),
    bad("input", input=[600]),
    bad("input", input=[5, 599, 600]),
    bad("input", input=[[5], [2**31 - 1]]),
    bad("input", input=[5] * 4097),
    bad("input", input=[[5], [5] * 4097]),
    bad("input", input="stones " * 5000),
    bad("input", input=["Hello", "stones " * 5000]),
    Case("x-penstock-receipt", GOOD, PATH, headers={"x-penstock-receipt": "perhaps"}),
    Case("x-penstock-receipt", GOOD, PATH, headers={"x-penstock-receipt": ""}),
]
"""Of a model that gives vectors of so many numbers, and has 600 tokens and room for 4096."""
