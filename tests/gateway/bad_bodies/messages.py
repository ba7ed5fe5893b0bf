"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes. Its errors name no parameter apart, so that
``param`` here is what their message says."""

from __future__ import annotations

from typing import Any

from tests.gateway.bad_bodies.cases import HUGE, TEN_MB, Case, nested

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, Any] = {"model": "demo", "max_tokens": 8, "messages": HELLO}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def bad(param: str | None, status: int = 400, **fields: Any) -> Case:
    return Case(param, {**GOOD, **fields}, PATH, status)


def said(param: str, *messages: Any) -> Case:
    return bad(param, messages=list(messages))


def user(param: str, *blocks: Any) -> Case:
    return said(param, {"role": "user", "content": list(blocks)})


def assistant(param: str, *blocks: Any) -> Case:
    return said(param, {"role": "assistant", "content": list(blocks)}, *HELLO)


def tool(param: str, **of: Any) -> Case:
    return bad(param, tools=[{**TOOL, **of}])


def count(param: str, status: int = 400, **fields: Any) -> Case:
    return Case(param, {"model": "demo", "messages": HELLO, **fields}, COUNT, status)


CASES = [
    # What of a system's words is not done
    said("messages[0].clear_at", {"role": "system", "content": "Hi", "clear_at": "next_user_message"}, *HELLO),
    said("messages[0].output_config", {"role": "system", "content": "Hi", "output_config": {"effort": "low"}}, *HELLO),
    # What it is asked of, and how much
    Case("model", {"max_tokens": 8, "messages": HELLO}, PATH),
    bad("model", model=None),
    bad("model", model=5),
    bad("model", model=["demo"]),
    bad("model", 404, model="claude-sonnet-4-5"),
    bad(None, 404, model=""),
    bad(None, 404, model="demo\0"),
    Case("max_tokens", {"model": "demo", "messages": HELLO}, PATH),
    bad("max_tokens", max_tokens=None),
    bad("max_tokens", max_tokens=0),
    bad("max_tokens", max_tokens=-1),
    bad("max_tokens", max_tokens="8"),
    bad("max_tokens", max_tokens=8.5),
    bad("max_tokens", max_tokens=True),
    bad("max_tokens", max_tokens=HUGE),
    # The conversation
    Case("messages", {"model": "demo", "max_tokens": 8}, PATH),
    bad("messages", messages=None),
    bad("messages", messages=[]),
    bad("messages", messages="Hello"),
    bad("messages", messages={"role": "user", "content": "Hello"}),
    said("messages[0]", None),
    said("messages[0]", "Hello"),
    said("messages[0]", ["user", "Hello"]),
    said("messages[0].role", {}),
    said("messages[0].role", {"content": "x"}),
    said("messages[0].role", {"role": "king", "content": "x"}),
    said("messages[0].role", {"role": "tool", "content": "x"}),
    said("messages[0].role", {"role": "developer", "content": "x"}),
    said("messages[0].role", {"role": 5, "content": "x"}),
    said("messages[0].content", {"role": "user"}),
    said("messages[0].content", {"role": "user", "content": None}),
    said("messages[0].content", {"role": "user", "content": 5}),
    said("messages[0].content", {"role": "user", "content": "Hel\0lo"}),
    said("messages[0].content", {"role": "user", "content": {}}),
    said("messages[0].content", {"role": "user", "content": ""}),
    said("messages[0].content", {"role": "user", "content": []}),
    said("messages[1].role", *HELLO, {"content": "x"}),
    said("messages", *HELLO, {"role": "assistant", "content": "So"}),
    user("messages[0].content[0]", "x"),
    user("messages[0].content[0]", None),
    user("messages[0].content[0]", ["x"]),
    user("messages[0].content[0]", {}),
    user("messages[0].content[0].type", {"type": "image", "source": {"type": "url", "url": "https://x"}}),
    user("messages[0].content[0].type", {"type": "document", "source": {"type": "text", "data": "x"}}),
    user("messages[0].content[0].type", {"type": "search_result"}),
    user("messages[0].content[0].type", {"type": "video"}),
    user("messages[0].content[0].type", {"type": 5}),
    user("messages[0].content[0].text", {"type": "text"}),
    user("messages[0].content[0].text", {"type": "text", "text": None}),
    user("messages[0].content[0].text", {"type": "text", "text": 5}),
    user("messages[0].content[0].cache_control", {"type": "text", "text": "x", "cache_control": "ephemeral"}),
    user("messages[0].content[0].cache_control.type", {"type": "text", "text": "x", "cache_control": {}}),
    user("messages[0].content[0].cache_control", {"type": "text", "text": "x", "cache_control": {"type": "eternal"}}),
    user(
        "messages[0].content[0].cache_control.ttl",
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1d"}},
    ),
    user("messages[0].content[0].type", {"type": "tool_use", "id": "t", "name": "f", "input": {}}),
    user("messages[0].content[0].type", {"type": "thinking", "thinking": "x"}),
    user("messages[0].content[0].tool_use_id", {"type": "tool_result", "content": "x"}),
    user("messages[0].content[0].tool_use_id", {"type": "tool_result", "tool_use_id": 5}),
    user("messages[0].content[0].content", {"type": "tool_result", "tool_use_id": "t", "content": 5}),
    user("messages[0].content[0].content[0]", {"type": "tool_result", "tool_use_id": "t", "content": ["x"]}),
    user(
        "messages[0].content[0].content[0]",
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]},
    ),
    user("messages[0].content[0].is_error", {"type": "tool_result", "tool_use_id": "t", "is_error": "yes"}),
    assistant("messages[0].content[0].id", {"type": "tool_use", "name": "f", "input": {}}),
    assistant("messages[0].content[0].name", {"type": "tool_use", "id": "t", "input": {}}),
    assistant("messages[0].content[0].input", {"type": "tool_use", "id": "t", "name": "f"}),
    assistant("messages[0].content[0].input", {"type": "tool_use", "id": "t", "name": "f", "input": "{}"}),
    assistant("messages[0].content[0].input", {"type": "tool_use", "id": "t", "name": "f", "input": []}),
    assistant("messages[0].content[0].type", {"type": "tool_result", "tool_use_id": "t"}),
    assistant("messages[0].content[0].thinking", {"type": "thinking"}),
    assistant("messages[0].content[0].data", {"type": "redacted_thinking"}),
    bad("system", system=5),
    bad("system", system={"text": "x"}),
    bad("system[0]", system=["x"]),
    bad("system[0].text", system=[{"type": "text"}]),
    bad("system[0]", system=[{"type": "image"}]),
    bad("system[0].cache_control", system=[{"type": "text", "text": "x", "cache_control": 5}]),
    # How it is sampled
    bad("temperature", temperature=-0.1),
    bad("temperature", temperature=2.1),
    bad("temperature", temperature="cold"),
    bad("temperature", temperature=HUGE),
    bad("top_p", top_p=1.1),
    bad("top_p", top_p="x"),
    bad("top_k", top_k=-1),
    bad("top_k", top_k=2**31),
    bad("top_k", top_k=1.5),
    bad("stop_sequences", stop_sequences="x"),
    bad("stop_sequences", stop_sequences=["x"] * 65),
    bad("stop_sequences[0]", stop_sequences=[""]),
    bad("stop_sequences[0]", stop_sequences=["x" * 1025]),
    bad("stop_sequences[1]", stop_sequences=["x", 5]),
    bad("stream", stream="yes"),
    bad("stream", stream=1),
    bad("metadata", metadata="me"),
    bad("metadata.user_id", metadata={"user_id": 5}),
    bad("metadata.user_id", metadata={"user_id": "x" * 513}),
    bad("service_tier", service_tier="priority"),
    bad("service_tier", service_tier=5),
    bad("speed", speed="slow"),
    bad("container", container="container_1"),
    bad("container", container={"skills": []}),
    bad("inference_geo", inference_geo="us"),
    bad("inference_geo", inference_geo=5),
    bad("diagnostics", diagnostics="all"),
    bad("diagnostics.previous_message_id", diagnostics={"previous_message_id": 5}),
    bad("thinking", thinking="yes"),
    bad("thinking.type", thinking={}),
    bad("thinking.type", thinking={"type": "hard"}),
    bad("thinking.budget_tokens", thinking={"type": "enabled", "budget_tokens": 0}),
    bad("thinking.budget_tokens", thinking={"type": "enabled", "budget_tokens": "many"}),
    bad("thinking.budget_tokens", thinking={"type": "enabled", "budget_tokens": HUGE}),
    bad("thinking.display", thinking={"type": "enabled", "display": "loud"}),
    bad("output_config", output_config="x"),
    bad("output_format.type", output_format={"schema": {}}),
    bad(
        "'output_format'",
        output_format={"type": "json_schema", "schema": {}},
        output_config={"format": {"type": "json_schema", "schema": {}}},
    ),
    bad("output_config.effort", output_config={"effort": "some"}),
    bad("output_config.format", output_config={"format": "json"}),
    bad("output_config.format.type", output_config={"format": {"schema": {}}}),
    bad("output_config.format.schema", output_config={"format": {"type": "json_schema"}}),
    bad("output_config.format.schema", output_config={"format": {"type": "json_schema", "schema": []}}),
    bad(
        "'output_config.format.schema.type'",
        output_config={"format": {"type": "json_schema", "schema": {"type": "nothing"}}},
    ),
    bad(
        "'output_config.format.schema'",
        output_config={"format": {"type": "json_schema", "schema": {"description": "x" * TEN_MB}}},
    ),
    bad(
        "'output_config.format.schema'", output_config={"format": {"type": "json_schema", "schema": {"maximum": HUGE}}}
    ),
    bad("cache_control.type", cache_control={"type": "x"}),
    bad("penstock.receipt", penstock={"receipt": 5}),
    # Tools
    bad("tools", tools={}),
    bad("tools[0]", tools=["f"]),
    bad("tools[0].name", tools=[{"input_schema": {}}]),
    bad("tools[0].input_schema", tools=[{"name": "f"}]),
    tool("tools[0].name", name=""),
    tool("tools[0].name", name="a b"),
    tool("tools[0].name", name="f\n"),
    tool("tools[0].name", name="x" * 129),
    tool("tools[0].name", name=5),
    tool("tools[0].description", description=5),
    tool("tools[0].input_schema", input_schema="{}"),
    tool("'tools[0].input_schema'", input_schema={"type": "array"}),
    tool("tools[0].type", type="web_search_20250305"),
    tool("tools[0].type", type="bash_20250124"),
    tool("tools[0].type", type=5),
    tool("tools[0].strict", strict="x"),
    tool("tools[0].cache_control", cache_control=[]),
    bad("'tools[1].name'", tools=[TOOL, TOOL]),
    bad("tool_choice", tools=[TOOL], tool_choice="auto"),
    bad("tool_choice.type", tools=[TOOL], tool_choice={}),
    bad("tool_choice.type", tools=[TOOL], tool_choice={"type": "must"}),
    bad("tool_choice.name", tools=[TOOL], tool_choice={"type": "tool"}),
    bad("'tool_choice.name'", tools=[TOOL], tool_choice={"type": "tool", "name": "g"}),
    bad("tool_choice", tool_choice={"type": "any"}),
    bad("tool_choice.disable_parallel_tool_use", tool_choice={"type": "auto", "disable_parallel_tool_use": "x"}),
    # The count of its tokens
    Case("model", {"messages": HELLO}, COUNT),
    Case("messages", {"model": "demo"}, COUNT),
    count("model", model=5),
    count("nobody", 404, model="nobody"),
    count("messages", messages=[]),
    count("messages[0].role", messages=[{"role": "x", "content": "x"}]),
    count("messages[0].content", messages=[{"role": "user", "content": nested()}]),
    count("system", system=5),
    count("tools[0].input_schema", tools=[{"name": "f"}]),
    Case("messages", b'{"model": "demo", "max_tokens": 8, "messages": [], "messages": 5}', PATH),
    # Parts of a conversation that are nearly right
    bad("max_tokens", max_tokens=2**63),
    said("messages[0].role", {"role": "User", "content": "x"}),
    said("messages[0].role", {"role": None, "content": "x"}),
    said("messages[0].content", {"role": "user", "content": True}),
    said("messages[1].content", *HELLO, {"role": "assistant", "content": []}, *HELLO),
    said(
        "messages[1].content[0].type", *HELLO, {"role": "assistant", "content": [{"type": "server_tool_use"}]}, *HELLO
    ),
    said("messages", *HELLO, {"role": "assistant", "content": [{"type": "text", "text": "So"}]}),
    said("messages[0].content[0].type", {"role": "system", "content": [{"type": "tool_result", "tool_use_id": "t"}]}),
    user("messages[0].content[0].text", {"type": "text", "text": ["x"]}),
    user("messages[0].content[1].text", {"type": "text", "text": "x"}, {"type": "text"}),
    user("messages[0].content[0].type", {"type": "Text", "text": "x"}),
    user("messages[0].content[0].type", {"type": "redacted_thinking", "data": "x"}),
    user(
        "messages[0].content[0].cache_control.ttl",
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": 300}},
    ),
    user("messages[0].content[0].tool_use_id", {"type": "tool_result", "tool_use_id": None, "content": "x"}),
    user("messages[0].content[0].content", {"type": "tool_result", "tool_use_id": "t", "content": {"text": "x"}}),
    user(
        "messages[0].content[0].content[0].text",
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]},
    ),
    user("messages[0].content[0].cache_control", {"type": "tool_result", "tool_use_id": "t", "cache_control": "x"}),
    assistant("messages[0].content[0].id", {"type": "tool_use", "id": 5, "name": "f", "input": {}}),
    assistant("messages[0].content[0].name", {"type": "tool_use", "id": "t", "name": ["f"], "input": {}}),
    assistant("messages[0].content[0].input", {"type": "tool_use", "id": "t", "name": "f", "input": None}),
    assistant("messages[0].content[0].thinking", {"type": "thinking", "thinking": 5}),
    assistant("messages[0].content[0].signature", {"type": "thinking", "thinking": "x", "signature": 5}),
    assistant("messages[0].content[0].data", {"type": "redacted_thinking", "data": {}}),
    bad("system", system=True),
    bad("system[0]", system=[None]),
    bad("system[1].text", system=[{"type": "text", "text": "x"}, {"type": "text", "text": 5}]),
    bad(
        "system[0].cache_control.ttl",
        system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "2h"}}],
    ),
    # How it is sampled
    bad("max_tokens", max_tokens=[8]),
    bad("temperature", temperature=True),
    bad("temperature", temperature=[0.5]),
    bad("top_p", top_p=-0.1),
    bad("top_k", top_k="40"),
    bad("stop_sequences", stop_sequences={"0": "x"}),
    bad("stop_sequences[0]", stop_sequences=[None]),
    bad("stop_sequences[0]", stop_sequences=[["x"]]),
    bad("stream", stream=[]),
    bad("metadata", metadata=[]),
    bad("metadata.user_id", metadata={"user_id": ["me"]}),
    bad("thinking", thinking=[]),
    bad("thinking.type", thinking={"type": 5}),
    bad("thinking.budget_tokens", thinking={"type": "enabled", "budget_tokens": -1}),
    bad("thinking.budget_tokens", thinking={"type": "enabled", "budget_tokens": 1024.5}),
    bad("output_config", output_config=[]),
    bad("output_config.effort", output_config={"effort": 5}),
    bad("output_config.format.type", output_config={"format": {"type": "regex", "schema": {}}}),
    bad("output_config.format.schema", output_config={"format": {"type": "json_schema", "schema": "{}"}}),
    bad("cache_control", cache_control="ephemeral"),
    bad("penstock", penstock=True),
    # Tools
    bad("tools", tools="f"),
    bad("tools[0]", tools=[None]),
    bad("tools[1].name", tools=[TOOL, {"input_schema": {}}]),
    tool("tools[0].name", name=None),
    tool("tools[0].name", name="f\0"),
    tool("tools[0].input_schema", input_schema=[]),
    tool("tools[0].type", type="text_editor_20250728"),
    tool("tools[0].type", type="computer_20250124"),
    tool("tools[0].cache_control.ttl", cache_control={"type": "ephemeral", "ttl": "x"}),
    bad("tool_choice", tools=[TOOL], tool_choice=[]),
    bad("tool_choice.type", tools=[TOOL], tool_choice={"type": "function", "name": "f"}),
    bad("tool_choice.name", tools=[TOOL], tool_choice={"type": "tool", "name": 5}),
    bad("tool_choice.name", tools=[TOOL], tool_choice={"type": "tool", "name": ""}),
    bad("tool_choice", tools=[], tool_choice={"type": "any"}),
    # The count of its tokens
    count("messages", messages="Hello"),
    count("messages[0].content[0].type", messages=[{"role": "user", "content": [{"type": "image"}]}]),
    count("system[0].text", system=[{"type": "text"}]),
    count("tools[0].type", tools=[{**TOOL, "type": "web_fetch_20250910"}]),
    count("'tools[0].input_schema'", tools=[{"name": "f", "input_schema": {"type": "string"}}]),
    count("'tools[1].name'", tools=[TOOL, TOOL]),
    count("tool_choice.type", tools=[TOOL], tool_choice={"type": "x"}),
    count("thinking.type", thinking={"type": "x"}),
    count("output_config.effort", output_config={"effort": "most"}),
]
