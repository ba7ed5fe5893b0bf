"""/v1/conversations, and what is asked of one that there is not."""

from __future__ import annotations

from typing import Any

from tests.gateway.bad_bodies import responses
from tests.gateway.bad_bodies.cases import Case, nested

PATH = "/v1/conversations"
GOOD: dict[str, Any] = {"items": [{"role": "user", "content": "Hello"}]}
NOBODY = "conv_" + "0" * 32
ITEM = "msg_" + "0" * 36


def bad(param: str | None, **fields: Any) -> Case:
    return Case(param, fields, PATH)


def of_one(method: str, path: str, status: int = 404, body: Any = b"", param: str | None = None) -> Case:
    return Case(param, body, f"{PATH}/{path}", status, method=method)


def begun_with(case: Case) -> Case:
    """The same items in a conversation."""
    assert case.param is not None
    return bad(case.param.replace("input", "items", 1), items=case.body["input"])


# Of all else that is wrong with a bad item its company is at fault.
ITEMS = [
    begun_with(case)
    for case in responses.CASES
    if case.path == responses.PATH and str(case.param).startswith("input[") and len(case.body) == 2
]
CASES = [
    *ITEMS,
    bad("items", items=5),
    bad("items", items="Hello"),
    bad("items", items={"role": "user", "content": "Hello"}),
    bad("items", items=[{"role": "user", "content": "x"}] * 21),
    bad("items[1].content", items=[{"role": "user", "content": "x"}, {"role": "user", "content": "\0"}]),
    bad("items[0].content", items=[{"role": "system", "content": [{"type": "input_text", "text": "\0"}]}]),
    bad("metadata", metadata=5),
    bad("metadata", metadata=[]),
    bad("metadata", metadata="a"),
    bad("metadata", metadata={"a": 1}),
    bad("metadata", metadata={"a": None}),
    bad("metadata", metadata={"a": nested()}),
    bad("metadata", metadata={"k" * 65: "v"}),
    bad("metadata", metadata={"k": "v" * 513}),
    bad("metadata", metadata={str(number): "" for number in range(17)}),
    # One that there is not
    of_one("GET", NOBODY),
    of_one("GET", "x"),
    of_one("GET", "%00"),
    of_one("GET", "conv_" + "g" * 32),
    of_one("DELETE", NOBODY),
    of_one("POST", NOBODY, body={"metadata": {}}),
    of_one("PUT", NOBODY, 405),
    of_one("GET", f"{NOBODY}/items"),
    of_one("POST", f"{NOBODY}/items", body={"items": []}),
    of_one("POST", f"{NOBODY}/items?include[]=everything", 400, {"items": []}, "include[][0]"),
    of_one("GET", f"{NOBODY}/items/{ITEM}"),
    of_one("GET", f"{NOBODY}/items/{ITEM}?include[]=5", 400, param="include[][0]"),
    of_one("DELETE", f"{NOBODY}/items/{ITEM}"),
    of_one("PATCH", f"{NOBODY}/items/{ITEM}", 405),
]
