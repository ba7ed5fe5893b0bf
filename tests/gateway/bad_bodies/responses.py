"""POST /v1/responses and /v1/responses/input_tokens, and what is asked of one that there is not."""

from __future__ import annotations

from typing import Any

from tests.gateway.bad_bodies.cases import HUGE, TEN_MB, Case, nested

PATH, COUNT = "/v1/responses", "/v1/responses/input_tokens"
GOOD: dict[str, Any] = {"model": "demo", "input": "Hello"}
TOOL = {"type": "function", "name": "f"}
NOBODY = "resp_" + "0" * 32


def bad(param: str | None, status: int = 400, **fields: Any) -> Case:
    return Case(param, {**GOOD, **fields}, PATH, status)


def given(param: str, *items: Any) -> Case:
    return bad(param, input=list(items))


def message(param: str, content: Any, role: Any = "user", **others: Any) -> Case:
    return given(param, {"type": "message", "role": role, "content": content, **others})


def chosen(param: str, choice: Any) -> Case:
    return bad(param, tools=[TOOL], tool_choice=choice)


def form(param: str, **of: Any) -> Case:
    return bad(param, text={"format": of})


def count(param: str, status: int = 400, **fields: Any) -> Case:
    return Case(param, {**GOOD, **fields}, COUNT, status)


def of_one(param: str | None, method: str, path: str, status: int = 404, body: Any = b"") -> Case:
    return Case(param, body, f"{PATH}/{path}", status, method=method)


CASES = [
    # What it is asked of
    Case("model", {"input": "Hello"}, PATH),
    bad("model", model=None),
    bad("model", model=5),
    bad("model", model=["demo"]),
    bad("model", 404, model="o3"),
    bad("model", 404, model="demo\0"),
    # What it is given
    Case("input", {"model": "demo"}, PATH),
    bad("input", input=None),
    bad("input", input=5),
    bad("input", input=True),
    bad("input", input={"role": "user", "content": "Hello"}),
    bad("input[0]", input=["Hello"]),
    bad("input[0]", input=[None]),
    bad("input[0]", input=[["user", "Hello"]]),
    bad("input", input=[{"role": "user", "content": "x"}] * 10_001),
    bad("input[0]", input=nested()),
    given("input[0].type", {"type": "picture"}),
    given("input[0].type", {"type": "web_search_call", "id": "ws_1"}),
    given("input[0].type", {"type": "computer_call_output"}),
    given("input[0].type", {"type": 5}),
    given("input[0].type", {"type": ["message"]}),
    given("input[0].role", {"content": "x"}),
    given("input[0].content", {"role": "user"}),
    given("input", {"role": "user", "content": "Hel\0lo"}),
    given("input[0].content", {"type": "message", "role": "user", "content": None}),
    given("input[1].type", {"role": "user", "content": "x"}, {"type": "file"}),
    message("input[0].role", "x", role="king"),
    message("input[0].role", "x", role="tool"),
    message("input[0].role", "x", role=5),
    message("input[0].content", 5),
    message("input[0].content", {"type": "input_text", "text": "x"}),
    message("input[0].content[0]", ["x"]),
    message("input[0].content[0]", [None]),
    message("input[0].content[0].type", [{}]),
    message("input[0].content[0].type", [{"type": "text", "text": "x"}]),
    message("input[0].content[0].type", [{"type": "input_image", "image_url": "https://x"}]),
    message("input[0].content[0].type", [{"type": "input_file", "file_id": "file-1"}]),
    message("input[0].content[0].type", [{"type": "input_audio"}]),
    message("input[0].content[0].text", [{"type": "input_text"}]),
    message("input[0].content[0].text", [{"type": "input_text", "text": 5}]),
    message("input[0].content[0].text", [{"type": "input_text", "text": None}]),
    message("input[0].content[1].type", [{"type": "input_text", "text": "x"}, {"type": "input_video"}]),
    message("input[0].content[0].refusal", [{"type": "refusal"}], role="assistant"),
    message("input[0].status", "x", status="over"),
    message("input[0].id", "x", id=5),
    given("input[0].call_id", {"type": "function_call", "name": "f", "arguments": "{}"}),
    given("input[0].name", {"type": "function_call", "call_id": "c", "arguments": "{}"}),
    given("input[0].arguments", {"type": "function_call", "call_id": "c", "name": "f"}),
    given("input[0].arguments", {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}),
    given("input[0].name", {"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}),
    given("input[0].call_id", {"type": "function_call_output", "output": "x"}),
    given("input[0].output", {"type": "function_call_output", "call_id": "c"}),
    given("input[0].output", {"type": "function_call_output", "call_id": "c", "output": 5}),
    given(
        "input[0].output[0].type",
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
    ),
    given("input[0].summary", {"type": "reasoning", "summary": "x"}),
    given("input[0].summary[0].text", {"type": "reasoning", "summary": [{"type": "summary_text"}]}),
    given("input[0].content[0].text", {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text"}]}),
    given("input[0].id", {"type": "item_reference"}),
    given("input[0].id", {"type": "item_reference", "id": 5}),
    given("input[0].id", {"type": "item_reference", "id": "msg_none"}),
    given("input[0].id", {"id": "msg_" + "0" * 36}),
    given("input[0].id", {"id": "\0"}),
    bad("instructions", instructions=5),
    bad("instructions", instructions=[{"role": "user", "content": "x"}]),
    bad("instructions", instructions={}),
    bad("previous_response_id", previous_response_id=NOBODY),
    bad("previous_response_id", previous_response_id=""),
    bad("previous_response_id", previous_response_id=5),
    bad("previous_response_id", previous_response_id="x" * 65),
    bad("previous_response_id", previous_response_id="resp_\0"),
    bad("previous_response_id", previous_response_id="resp_' OR 1=1 --"),
    bad("conversation", conversation="conv_1"),
    bad("conversation", conversation={"id": "conv_1"}),
    bad("prompt", prompt={"id": "pmpt_1"}),
    bad("moderation", moderation={}),
    bad("context_management", context_management=[{"type": "compaction"}]),
    # How it is answered
    bad("stream", stream="yes"),
    bad("stream", stream=1),
    bad("background", background="yes"),
    bad("background", background=True, store=False),
    bad("store", store="no"),
    bad("store", store=0),
    bad("max_output_tokens", max_output_tokens=0),
    bad("max_output_tokens", max_output_tokens=-1),
    bad("max_output_tokens", max_output_tokens="16"),
    bad("max_output_tokens", max_output_tokens=1.5),
    bad("max_output_tokens", max_output_tokens=HUGE),
    bad("max_tool_calls", max_tool_calls=0),
    bad("max_tool_calls", max_tool_calls="1"),
    bad("temperature", temperature=2.1),
    bad("temperature", temperature=-0.1),
    bad("temperature", temperature="warm"),
    bad("temperature", temperature=HUGE),
    bad("top_p", top_p=1.5),
    bad("top_p", top_p=[]),
    bad("top_logprobs", top_logprobs=21),
    bad("top_logprobs", top_logprobs=-1),
    bad("top_logprobs", top_logprobs="5"),
    bad("include", include="message.output_text.logprobs"),
    bad("include[0]", include=["everything"]),
    bad("include[0]", include=[5]),
    bad("metadata", metadata="a"),
    bad("metadata", metadata={"a": 1}),
    bad("metadata", metadata={"k" * 65: "v"}),
    bad("metadata", metadata={str(number): "" for number in range(17)}),
    bad("service_tier", service_tier="gold"),
    bad("user", user="x" * 513),
    bad("safety_identifier", safety_identifier="x" * 129),
    bad("prompt_cache_key", prompt_cache_key="x" * 513),
    bad("truncation", truncation="middle"),
    bad("truncation", truncation=True),
    bad("reasoning", reasoning="high"),
    bad("reasoning.effort", reasoning={"effort": "some"}),
    bad("reasoning.effort", reasoning={"effort": 5}),
    bad("reasoning.summary", reasoning={"summary": "long"}),
    bad("parallel_tool_calls", parallel_tool_calls="no"),
    bad("seed", seed=2**63),
    bad("top_k", top_k=-2),
    bad("min_p", min_p=2),
    bad("repetition_penalty", repetition_penalty=0),
    bad("penstock.receipt", penstock={"receipt": "x"}),
    # What it must be
    bad("text", text="json"),
    bad("text.verbosity", text={"verbosity": "loud"}),
    bad("text.format", text={"format": "json"}),
    form("text.format.type"),
    form("text.format.type", type="xml"),
    form("text.format.type", type=5),
    form("text.format.name", type="json_schema", schema={}),
    form("text.format.schema", type="json_schema", name="s"),
    form("text.format.name", type="json_schema", name="a b", schema={}),
    form("text.format.name", type="json_schema", name="s\n", schema={}),
    form("text.format.schema", type="json_schema", name="s", schema=[]),
    form("text.format.schema", type="json_schema", name="s", schema={"a": nested(300)}),
    form("text.format.schema.type", type="json_schema", name="s", schema={"type": "nothing"}),
    form("text.format.schema", type="json_schema", name="s", schema={"description": "x" * TEN_MB}),
    form("text.format.strict", type="json_schema", name="s", schema={}, strict="very"),
    # Tools
    bad("tools", tools={}),
    bad("tools[0]", tools=["f"]),
    bad("tools", tools=[TOOL] * 1025),
    bad("tools[0].type", tools=[{}]),
    bad("tools[0].type", tools=[{"type": "web_search"}]),
    bad("tools[0].type", tools=[{"type": "file_search", "vector_store_ids": []}]),
    bad("tools[0].type", tools=[{"type": "mcp", "server_label": "x"}]),
    bad("tools[0].type", tools=[{"type": 5}]),
    bad("tools[0].name", tools=[{"type": "function"}]),
    bad("tools[0].name", tools=[{"type": "function", "function": {"name": "f"}}]),
    bad("tools[0].name", tools=[{"type": "function", "name": "a b"}]),
    bad("tools[0].name", tools=[{"type": "function", "name": "f\n"}]),
    bad("tools[0].parameters", tools=[{**TOOL, "parameters": "{}"}]),
    bad("tools[0].parameters", tools=[{**TOOL, "parameters": {"a": nested(300)}}]),
    bad("tools[0].strict", tools=[{**TOOL, "strict": 1}]),
    bad("tools[1].name", tools=[TOOL, TOOL]),
    chosen("tool_choice", "always"),
    chosen("tool_choice", 5),
    chosen("tool_choice", {}),
    chosen("tool_choice", {"type": "function"}),
    chosen("tool_choice", {"type": "web_search"}),
    chosen("tool_choice.name", {"type": "function", "name": "g"}),
    bad("tool_choice", tool_choice="required"),
    # The count of its tokens
    Case("model", {"input": "Hello"}, COUNT),
    count("model", model=5),
    count("model", 404, model="nobody"),
    count("input", input=5),
    count("input[0].type", input=[{"type": "x"}]),
    count("tools[0].type", tools=[{"type": "x"}]),
    count("conversation", conversation="c"),
    count("previous_response_id", previous_response_id=NOBODY),
    count("truncation", truncation="x"),
    # One that there is not
    of_one(None, "GET", NOBODY),
    of_one(None, "GET", "x"),
    of_one(None, "GET", "%00"),
    of_one(None, "GET", "resp_" + "g" * 32),
    of_one(None, "DELETE", NOBODY),
    of_one(None, "POST", f"{NOBODY}/cancel"),
    of_one(None, "GET", f"{NOBODY}/input_items"),
    of_one(None, "PUT", NOBODY, 405),
    of_one(None, "POST", NOBODY, 405, {"metadata": {}}),
    # Items of which a part is wrong
    message("input[0].content[0].text", [{"type": "output_text", "text": 5}], role="assistant"),
    message("input[0].content[0].refusal", [{"type": "refusal", "refusal": 5}], role="assistant"),
    message("input[0].content[0].type", [{"type": None, "text": "x"}]),
    message("input[0].role", "x", role="User"),
    message("input[0].status", "x", status=5),
    given("input[0].status", {"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "status": "done"}),
    given("input[0].call_id", {"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"}),
    given("input[0].call_id", {"type": "function_call", "call_id": None, "name": "f", "arguments": "{}"}),
    given("input[0].call_id", {"type": "function_call_output", "call_id": ["c"], "output": "x"}),
    given("input[0].output[0]", {"type": "function_call_output", "call_id": "c", "output": ["x"]}),
    given(
        "input[0].output[0].text", {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text"}]}
    ),
    given("input[0].summary[0]", {"type": "reasoning", "summary": ["x"]}),
    given("input[0].summary[0].type", {"type": "reasoning", "summary": [{"type": "output_text", "text": "x"}]}),
    given("input[0].content", {"type": "reasoning", "summary": [], "content": "x"}),
    given("input[0].id", {"type": "item_reference", "id": None}),
    given("input[1].id", {"role": "user", "content": "x"}, {"id": "msg_none"}),
    # Tools and choices of which a part is wrong
    bad("tools", tools="f"),
    bad("tools[0]", tools=[None]),
    bad("tools[0].name", tools=[{"type": "function", "name": "x" * 129}]),
    bad("tools[0].description", tools=[{**TOOL, "description": 5}]),
    bad("tools[0].parameters", tools=[{**TOOL, "parameters": []}]),
    bad("tools[0].parameters", tools=[{**TOOL, "parameters": {"type": "array"}}]),
    bad("tools[1].type", tools=[TOOL, {"type": "mcp", "name": "g"}]),
    chosen("tool_choice", {"type": "allowed_tools", "tools": [TOOL]}),
    chosen("tool_choice.mode", {"type": "allowed_tools", "mode": "must", "tools": [TOOL]}),
    chosen("tool_choice.tools", {"type": "allowed_tools", "mode": "auto", "tools": []}),
    chosen("tool_choice.tools[0]", {"type": "allowed_tools", "mode": "auto", "tools": ["f"]}),
    chosen("tool_choice.tools[0].name", {"type": "allowed_tools", "mode": "auto", "tools": [{**TOOL, "name": "g"}]}),
    bad("tool_choice", tool_choice={"type": "function", "name": "f"}),
    chosen("tool_choice", {"type": "function", "name": "f", "note": nested(300)}),
    # The rest of what it says
    bad("text", text=[]),
    bad("text.verbosity", text={"verbosity": 5}),
    form("text.format.name", type="json_schema", name="", schema={}),
    form("text.format.description", type="json_schema", name="s", schema={}, description=5),
    form("text.format.schema.$ref", type="json_schema", name="s", schema={"$ref": "#/nowhere"}),
    form("text.format.schema.pattern", type="json_schema", name="s", schema={"type": "string", "pattern": "("}),
    bad("reasoning", reasoning=[]),
    bad("reasoning.generate_summary", reasoning={"generate_summary": "long"}),
    bad("prompt_cache_key", prompt_cache_key=5),
    bad("presence_penalty", presence_penalty=2.1),
    bad("frequency_penalty", frequency_penalty=-2.1),
    bad("chat_template_kwargs", chat_template_kwargs="x"),
    bad("top_k", top_k="40"),
    bad("include[1]", include=["message.output_text.logprobs", "usage"]),
    bad("max_tool_calls", max_tool_calls=HUGE),
    bad("max_output_tokens", max_output_tokens=2**63),
    bad("metadata", metadata={"k": "v" * 513}),
    bad("parallel_tool_calls", parallel_tool_calls=1),
    count("tools[0].name", tools=[{"type": "function"}]),
    count("text.format.schema", text={"format": {"type": "json_schema", "name": "s"}}),
    Case("input", b'{"model": "demo", "input": "x", "input": 5}', PATH),
]
