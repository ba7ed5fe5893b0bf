"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from tests.gateway.bad_bodies.cases import HUGE, TEN_MB, Case, nested

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, Any] = {"model": "demo", "messages": HELLO}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def bad(param: str | None, status: int = 400, **fields: Any) -> Case:
    return Case(param, {**GOOD, **fields}, PATH, status)


def said(param: str, *messages: Any) -> Case:
    return Case(param, {**GOOD, "messages": list(messages)}, PATH)


def user(param: str, content: Any, **others: Any) -> Case:
    return said(param, {"role": "user", "content": content, **others})


def called(param: str, *calls: Any) -> Case:
    return said(param, {"role": "assistant", "content": None, "tool_calls": list(calls)})


def tool(param: str, **function: Any) -> Case:
    return bad(param, tools=[{"type": "function", "function": function}])


def chosen(param: str, choice: Any) -> Case:
    return bad(param, tools=[FUNCTION], tool_choice=choice)


def form(param: str, **response_format: Any) -> Case:
    return bad(param, response_format=response_format)


def schema(param: str, of: Any, **others: Any) -> Case:
    form = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": of, **others}}
    return bad(param, response_format=form)


ALLOWED = "tool_choice.allowed_tools.tools"
SCHEMA = "response_format.json_schema"
CASES = [
    # What it is asked of
    Case("model", {"messages": HELLO}),
    bad("model", model=None),
    bad("model", model=5),
    bad("model", model=["demo"]),
    bad("model", model={"id": "demo"}),
    bad("model", 404, model=""),
    bad("model", 404, model="demo "),
    bad("model", 404, model="DEMO"),
    bad("model", 404, model="demo\0"),
    bad("model", 404, model="../demo"),
    bad("model", 404, model="x" * 100_000),
    Case("model", b'{"model": "demo", "model": 5, "messages": [{"role": "user", "content": "x"}]}'),
    # The conversation
    Case("messages", {"model": "demo"}),
    bad("messages", messages=None),
    bad("messages", messages=[]),
    bad("messages", messages="Hello"),
    bad("messages", messages={"role": "user", "content": "Hello"}),
    bad("messages", messages=5),
    said("messages[0]", None),
    said("messages[0]", "Hello"),
    said("messages[0]", ["user", "Hello"]),
    said("messages[0].role", {}),
    said("messages[0].role", {"content": "Hello"}),
    said("messages[0].role", {"role": "king", "content": "x"}),
    said("messages[0].role", {"role": "User", "content": "x"}),
    said("messages[0].role", {"role": "", "content": "x"}),
    said("messages[0].role", {"role": None, "content": "x"}),
    said("messages[0].role", {"role": 7, "content": "x"}),
    said("messages[1].role", *HELLO, {"content": "x"}),
    said("messages[2]", *HELLO, *HELLO, 3),
    user("messages[0].content", None),
    user("messages[0].content", 5),
    user("messages[0].content", "Hel\0lo"),
    user("messages[0].content", [{"type": "text", "text": "x"}, {"type": "text", "text": "\0"}]),
    said("messages[1].content", *HELLO, {"role": "developer", "content": "\0"}),
    user("messages[0].content", True),
    user("messages[0].content", {"type": "text", "text": "x"}),
    user("messages[0].content[0]", ["x"]),
    user("messages[0].content[0]", [None]),
    user("messages[0].content[0].type", [{}]),
    user("messages[0].content[0].type", [{"text": "x"}]),
    user("messages[0].content[0].type", [{"type": 5, "text": "x"}]),
    user("messages[0].content[0].type", [{"type": "", "text": "x"}]),
    user("messages[0].content[0].type", [{"type": "input_text", "text": "x"}]),
    user("messages[0].content[0].type", [{"type": "image_url", "image_url": {"url": "https://x"}}]),
    user("messages[0].content[0].type", [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]),
    user("messages[0].content[0].type", [{"type": "file", "file": {"file_id": "file-1"}}]),
    user("messages[0].content[0].type", [{"type": "refusal", "refusal": "No."}]),
    user("messages[0].content[0].text", [{"type": "text"}]),
    user("messages[0].content[0].text", [{"type": "text", "text": None}]),
    user("messages[0].content[0].text", [{"type": "text", "text": 5}]),
    user("messages[0].content[0].text", [{"type": "text", "text": ["x"]}]),
    user("messages[0].content[1].type", [{"type": "text", "text": "x"}, {"type": "video"}]),
    user("messages[0].name", "x", name=5),
    user("messages[0].name", "x", name=["me"]),
    user("messages[0].tool_calls", "x", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
    user("messages[0].function_call", "x", function_call={"name": "f", "arguments": "{}"}),
    user("messages[0].reasoning_content", "x", reasoning_content=5),
    user("messages[0].refusal", "x", refusal={}),
    said("messages[0].content", {"role": "assistant"}),
    said("messages[0].content", {"role": "assistant", "content": None, "tool_calls": []}),
    said("messages[0].content", {"role": "system", "content": None}),
    said("messages[0].content", {"role": "developer"}),
    said("messages[0].tool_call_id", {"role": "tool", "content": "x"}),
    said("messages[0].tool_call_id", {"role": "tool", "content": "x", "tool_call_id": 5}),
    said("messages[0].content", {"role": "tool", "tool_call_id": "c"}),
    said("messages[0].name", {"role": "function", "content": "x"}),
    called("messages[0].tool_calls[0]", None),
    called("messages[0].tool_calls[0]", "f()"),
    called("messages[0].tool_calls[0].function", {"id": "c", "type": "function"}),
    called("messages[0].tool_calls[0].type", {"type": "mcp", "function": {"name": "f", "arguments": "{}"}}),
    called("messages[0].tool_calls[0].id", {"id": 5, "function": {"name": "f", "arguments": "{}"}}),
    called("messages[0].tool_calls[0].function.name", {"function": {"arguments": "{}"}}),
    called("messages[0].tool_calls[0].function.name", {"function": {"name": None, "arguments": "{}"}}),
    called("messages[0].tool_calls[0].function.arguments", {"function": {"name": "f"}}),
    called("messages[0].tool_calls[0].function.arguments", {"function": {"name": "f", "arguments": 5}}),
    called("messages[0].tool_calls[0].function.arguments", {"function": {"name": "f", "arguments": ["a"]}}),
    # How it is sampled
    bad("temperature", temperature=-0.01),
    bad("temperature", temperature=2.01),
    bad("temperature", temperature="0.5"),
    bad("temperature", temperature=[1]),
    bad("temperature", temperature=False),
    bad("temperature", temperature=HUGE),
    Case("temperature", b'{"model": "demo", "temperature": 1e999}'),
    bad("top_p", top_p=-0.1),
    bad("top_p", top_p=1.1),
    bad("top_p", top_p="all"),
    bad("n", n=0),
    bad("n", n=-1),
    bad("n", n=129),
    bad("n", n=1.5),
    bad("n", n="2"),
    bad("n", n=2**64),
    bad("max_tokens", max_tokens=0),
    bad("max_tokens", max_tokens=-5),
    bad("max_tokens", max_tokens="many"),
    bad("max_tokens", max_tokens=2.5),
    bad("max_tokens", max_tokens=HUGE),
    bad("max_completion_tokens", max_completion_tokens=0),
    bad("max_completion_tokens", max_completion_tokens=[]),
    bad("min_tokens", min_tokens=-1),
    bad("min_tokens", min_tokens=9, max_tokens=8),
    bad("presence_penalty", presence_penalty=2.1),
    bad("presence_penalty", presence_penalty="high"),
    bad("frequency_penalty", frequency_penalty=-2.1),
    bad("frequency_penalty", frequency_penalty={}),
    bad("repetition_penalty", repetition_penalty=0),
    bad("repetition_penalty", repetition_penalty=101),
    bad("top_k", top_k=-2),
    bad("top_k", top_k=2**31),
    bad("min_p", min_p=1.01),
    bad("seed", seed=2**63),
    bad("seed", seed=-(2**63) - 1),
    bad("seed", seed=0.5),
    bad("seed", seed="lucky"),
    bad("stop", stop=["a"] * 65),
    bad("stop", stop=""),
    bad("stop", stop="x" * 1025),
    bad("stop", stop=5),
    bad("stop", stop={"a": 1}),
    bad("stop[1]", stop=["a", ""]),
    bad("stop[0]", stop=[None]),
    bad("stop[2]", stop=["a", "b", ["c"]]),
    bad("stop_token_ids", stop_token_ids=[600]),
    bad("stop_token_ids", stop_token_ids=[5] * 257),
    bad("stop_token_ids[0]", stop_token_ids=[-1]),
    bad("stop_token_ids[0]", stop_token_ids=["</s>"]),
    bad("logit_bias", logit_bias=[5]),
    bad("logit_bias", logit_bias={"a": 1}),
    bad("logit_bias", logit_bias={" 5": 1}),
    bad("logit_bias", logit_bias={"-5": 1}),
    bad("logit_bias", logit_bias={"5\0": 1}),
    bad("logit_bias", logit_bias={"600": 1}),
    bad("logit_bias", logit_bias={"5": 100.1}),
    bad("logit_bias", logit_bias={"5": "up"}),
    bad("logit_bias", logit_bias={"5": None}),
    bad("logprobs", logprobs=5),
    bad("top_logprobs", top_logprobs=5),
    bad("top_logprobs", logprobs=True, top_logprobs=21),
    bad("top_logprobs", logprobs=True, top_logprobs=-1),
    bad("ignore_eos", ignore_eos="yes"),
    # How it is answered
    bad("stream", stream="yes"),
    bad("stream", stream=1),
    bad("stream_options", stream_options={"include_usage": True}),
    bad("stream_options", stream=True, stream_options=[]),
    bad("stream_options.include_usage", stream=True, stream_options={"include_usage": "yes"}),
    bad("service_tier", service_tier="gold"),
    bad("service_tier", service_tier=1),
    bad("user", user="x" * 513),
    bad("user", user=5),
    bad("safety_identifier", safety_identifier="x" * 129),
    bad("store", store="yes"),
    bad("metadata", metadata="a=b"),
    bad("metadata", metadata={"a": 1}),
    bad("metadata", metadata={"a": None}),
    bad("metadata", metadata={"a": "x" * 513}),
    bad("metadata", metadata={"x" * 65: "a"}),
    bad("metadata", metadata={str(number): "" for number in range(17)}),
    bad("penstock", penstock=True),
    bad("penstock.receipt", penstock={"receipt": "please"}),
    bad("modalities", modalities=["text", "audio"]),
    bad("modalities", modalities="text"),
    bad("audio", audio={"voice": "alloy", "format": "wav"}),
    bad("web_search_options", web_search_options={}),
    bad("moderation", moderation={}),
    bad("reasoning_effort", reasoning_effort="some"),
    bad("reasoning_effort", reasoning_effort=3),
    bad("verbosity", verbosity="loud"),
    bad("prediction", prediction="Hello"),
    bad("prediction.content", prediction={"type": "content"}),
    bad("prediction.content[0].type", prediction={"content": [{"text": "x"}]}),
    bad("prediction.type", prediction={"type": "guess", "content": "x"}),
    bad("prompt_cache_key", prompt_cache_key="x" * 1025),
    bad("prompt_cache_retention", prompt_cache_retention="forever"),
    bad("chat_template_kwargs", chat_template_kwargs=[]),
    # Tools
    bad("tools", tools={"type": "function"}),
    bad("tools", tools="f"),
    bad("tools[0]", tools=["f"]),
    bad("tools[0].type", tools=[{}]),
    bad("tools[0].type", tools=[{"type": "web_search"}]),
    bad("tools[0].function", tools=[{"type": "function"}]),
    bad("tools[0].function", tools=[{"type": "function", "function": "f"}]),
    tool("tools[0].function.name", description="nameless"),
    tool("tools[0].function.name", name=""),
    tool("tools[0].function.name", name="a b"),
    tool("tools[0].function.name", name="größe"),
    tool("tools[0].function.name", name="x" * 129),
    tool("tools[0].function.name", name="f\n"),
    tool("tools[0].function.name", name="f\0"),
    tool("tools[0].function.description", name="f", description=5),
    tool("tools[0].function.parameters", name="f", parameters=[]),
    tool("tools[0].function.parameters", name="f", parameters={"type": "array"}),
    tool("tools[0].function.parameters", name="f", parameters="{}"),
    tool("tools[0].function.strict", name="f", strict="very"),
    bad("tools[1].function.name", tools=[FUNCTION, FUNCTION]),
    chosen("tool_choice", "always"),
    chosen("tool_choice", 3),
    chosen("tool_choice", []),
    bad("tool_choice", tool_choice="required"),
    chosen("tool_choice.type", {}),
    chosen("tool_choice.type", {"type": "tool"}),
    chosen("tool_choice.function", {"type": "function"}),
    chosen("tool_choice.function.name", {"type": "function", "function": {}}),
    chosen("tool_choice.function.name", {"type": "function", "function": {"name": "g"}}),
    chosen("tool_choice.allowed_tools", {"type": "allowed_tools"}),
    chosen("tool_choice.allowed_tools.mode", {"type": "allowed_tools", "allowed_tools": {"tools": [FUNCTION]}}),
    chosen(
        "tool_choice.allowed_tools.tools", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    ),
    bad("parallel_tool_calls", tools=[FUNCTION], parallel_tool_calls="no"),
    bad("functions", functions=[{"name": "f"}], tools=[FUNCTION]),
    bad("functions[0].name", functions=[{}]),
    bad("functions[0]", functions=[5]),
    bad("function_call", functions=[{"name": "f"}], function_call={"name": "g"}),
    bad("function_call", functions=[{"name": "f"}], function_call="must"),
    # What the answer must be
    bad("response_format", response_format="json"),
    bad("response_format", response_format=[]),
    form("response_format.type"),
    form("response_format.type", type="xml"),
    form("response_format.type", type=5),
    form(SCHEMA, type="json_schema"),
    form(SCHEMA, type="json_schema", json_schema="{}"),
    form(f"{SCHEMA}.name", type="json_schema", json_schema={"schema": {}}),
    form(f"{SCHEMA}.name", type="json_schema", json_schema={"name": "a b", "schema": {}}),
    form(f"{SCHEMA}.schema", type="json_schema", json_schema={"name": "s"}),
    form(f"{SCHEMA}.strict", type="json_schema", json_schema={"name": "s", "schema": {}, "strict": 1}),
    schema(f"{SCHEMA}.schema", []),
    schema(f"{SCHEMA}.schema", None),
    schema(f"{SCHEMA}.schema", {"type": "object", "description": "x" * TEN_MB}),
    schema(f"{SCHEMA}.schema.type", {"type": "nothing"}),
    schema(f"{SCHEMA}.schema.$ref", {"$ref": "#/nowhere"}),
    schema(f"{SCHEMA}.schema.pattern", {"type": "string", "pattern": "("}),
    schema(
        f"{SCHEMA}.schema.properties.a", {"type": "object", "properties": {"a": {"$ref": "https://example.com/s.json"}}}
    ),
    bad(None, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": nested()}}}),
    form("response_format.regex", type="regex"),
    form("response_format.regex", type="regex", regex="("),
    form("response_format.grammar", type="grammar", grammar=5),
    form("response_format.grammar", type="grammar", grammar="start: nothing"),
    bad("guided_regex", guided_regex="[a-"),
    bad("guided_regex", guided_regex=5),
    bad("guided_choice", guided_choice=[]),
    bad("guided_choice[0]", guided_choice=[""]),
    bad("guided_json", guided_json="{"),
    bad("guided_grammar", guided_grammar="start: a b"),
    bad("guided_regex", guided_json={}, guided_regex="a"),
    bad("structured_outputs", structured_outputs=[]),
    bad("structured_outputs.regex", structured_outputs={"regex": "*"}),
    bad("structured_outputs.choice", structured_outputs={"choice": "a"}),
    bad("regex", regex="a{2,1}"),
    bad("ebnf", ebnf="?"),
]
