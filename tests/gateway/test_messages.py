"""The Messages API: Anthropic's own client is answered as it expects, and what is not taken is said in its words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import anthropic
import msgspec
import pytest

from gateway.anthropic import parse_message
from gateway.anthropic.failures import limited, seconds
from gateway.openai import Malformed
from policies import wire
from policies.policy import Budget, Limits, Policy, Price
from tests import official
from tests.builders import PATIENCE_S
from tests.gateway.conftest import HELLO, KEY, Front

MESSAGES = "/v1/messages"
END = 3
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
async def claude(front: Front) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own; it does not try again."""
    async with official.Anthropic(base_url=front.url, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def asked(client: anthropic.AsyncAnthropic, **others: Any) -> asyncio.Task[Any]:
    call: dict[str, Any] = {"model": "demo", "max_tokens": 64, "messages": HELLO, **others}
    return asyncio.create_task(client.messages.create(**call))


@pytest.mark.parametrize(
    ("asked", "tier"),
    [
        ({"speed": "fast"}, "priority"),
        ({"speed": "fast", "service_tier": "standard_only"}, "default"),
        ({"speed": "standard", "diagnostics": {"previous_message_id": None}, "service_tier": "auto"}, "auto"),
        ({}, None),
    ],
)
def test_speed_is_a_class(asked, tier):
    body = {"model": "demo", "max_tokens": 5, "messages": HELLO, **asked}
    assert parse_message(msgspec.json.encode(body)).service_tier == tier


@pytest.mark.parametrize(
    ("asked", "switches"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "enabled"}, "output_config": {"effort": "low"}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
        ),
    ],
)
def test_whether_to_think_is_told_to_the_template(asked, switches):
    body = {"model": "demo", "max_tokens": 5, "messages": HELLO, **asked}
    assert parse_message(msgspec.json.encode(body)).template_switches == switches


async def test_a_message_is_answered_with_a_message(front: Front, claude):
    task = asked(claude, system="Be brief.", metadata={"user_id": "ada"}, service_tier="standard_only")
    submit = await front.peer.submitted()
    assert submit.sampling.max_tokens == 64
    assert "system\nBe brief." in front.text._tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False)
    front.peer.say(submit, [*front.ids("Good day."), END], "stop", num_cached_tokens=5)
    message = await task
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert [block.text for block in message.content] == ["Good day."]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(submit.prompt_token_ids) - 5, 5)
    assert usage.output_tokens == len(front.ids("Good day.")) + 1
    assert usage.service_tier == "standard"
    assert message._request_id == submit.request_id
    (row,) = await front.settled(1)
    assert (row["endpoint"], row["end_user"], row["num_cached_tokens"]) == (MESSAGES, "ada", 5)
    assert row["num_prompt_tokens"] == len(submit.prompt_token_ids)


async def test_a_stream_has_anthropics_events_in_their_order(front: Front):
    call = {"model": "demo", "max_tokens": 64, "messages": HELLO, "stream": True}
    asking = asyncio.create_task(front.http.post(front.url + MESSAGES, json=call))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Good"))
    answer = await asking
    front.peer.say(submit, [*front.ids(" day."), END], "stop", num_cached_tokens=0)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [
        (name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: ")))
        for name, data in (event.split("\n") for event in (await answer.text()).strip().split("\n\n"))
    ]
    assert all(name == event["type"] for name, event in events)
    assert [name for name, _ in events if name != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    by_name = dict(events)
    assert by_name["message_start"]["message"]["content"] == []
    assert by_name["message_start"]["message"]["stop_reason"] is None
    assert by_name["message_start"]["message"]["usage"]["input_tokens"] == len(submit.prompt_token_ids)
    assert by_name["content_block_start"] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert by_name["message_delta"]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert by_name["message_delta"]["usage"]["output_tokens"] == len(front.ids("Good")) + len(front.ids(" day.")) + 1
    texts = [event["delta"]["text"] for name, event in events if name == "content_block_delta"]
    assert "".join(texts) == "Good day."


async def test_the_client_adds_a_stream_up_to_the_same_message(front: Front, claude):
    async def read() -> Any:
        async with claude.messages.stream(model="demo", max_tokens=64, messages=HELLO) as stream:
            return await stream.get_final_message()

    task = asyncio.create_task(read())
    submit = await front.peer.submitted()
    for word in ("one", " two", " three"):
        front.peer.say(submit, front.ids(word))
    front.peer.say(submit, [END], "stop", num_cached_tokens=2)
    message = await task
    assert message.content[0].text == "one two three"
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_said_which_stop_sequence_ended_a_message(front: Front, claude, stream):
    task = asked(claude, stop_sequences=["never", "three", "a", "b", "c", "d"], stream=stream)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("one two three"))
    assert (await front.peer.cancelled()).request_id == submit.request_id
    front.peer.say(submit, [], "cancelled")
    if stream:
        (delta,) = [event for event in [event async for event in await task] if event.type == "message_delta"]
        assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("stop_sequence", "three")
    else:
        message = await task
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
        assert message.content[0].text == "one two "


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_a_stop_sequence_has_cut_is_none_to_be_acted_on(front: Front, claude, stream):
    task = asked(claude, tools=[WEATHER], stop_sequences=["Arden"], stream=stream)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids('{"name": "weather", "arguments": {"city": "Arden"}}'))
    front.peer.say(submit, [], "cancelled")
    message = await task
    if stream:
        events = [event async for event in message]
        (block,) = [event.content_block for event in events if event.type == "content_block_start"]
        (end,) = [event.delta for event in events if event.type == "message_delta"]
    else:
        (block,), end = message.content, message
    assert (block.type, block.name, block.input) == ("tool_use", "weather", {})
    assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", "Arden")


def test_a_form_may_have_its_older_name():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    bodies = [
        msgspec.json.encode({"model": "demo", "max_tokens": 5, "messages": HELLO, **others})
        for others in ({"output_format": form}, {"output_config": {"format": form, "effort": None}})
    ]
    older, newer = (parse_message(body) for body in bodies)
    assert older.response_format == newer.response_format
    assert older.response_format is not None


@pytest.mark.parametrize(("most", "reason"), [(4, "max_tokens"), (1_000_000, "model_context_window_exceeded")])
async def test_it_is_said_what_cut_a_message(front: Front, claude, most, reason):
    task = asked(claude, max_tokens=most)
    submit = await front.peer.submitted()
    ids = front.ids("one") * submit.sampling.max_tokens
    front.peer.say(submit, ids[: submit.sampling.max_tokens], "length")
    assert (await task).stop_reason == reason


async def test_tokens_of_a_conversation_are_counted_without_computing(front: Front, claude):
    counted = await claude.messages.count_tokens(model="demo", system="Be brief.", messages=HELLO)
    task = asked(claude, system="Be brief.")
    submit = await front.peer.submitted()
    front.peer.say(submit, [END], "stop")
    await task
    assert counted.input_tokens == len(submit.prompt_token_ids)
    assert len(await front.settled(1)) == 1, "counting owes nothing"


async def test_a_conversation_is_counted_whose_last_word_the_model_has_had(front: Front, claude):
    said = [*HELLO, {"role": "assistant", "content": "Good day."}]
    counted = await claude.messages.count_tokens(model="demo", messages=said)
    task = asked(claude, messages=[*said, {"role": "user", "content": "And?"}])
    submit = await front.peer.submitted()
    front.peer.say(submit, [END], "stop")
    await task
    first = await claude.messages.count_tokens(model="demo", messages=HELLO)
    assert first.input_tokens < counted.input_tokens < len(submit.prompt_token_ids)


async def test_a_conversation_with_tools_becomes_a_chat():
    call = parse_message(
        msgspec.json.encode(
            {
                "model": "demo",
                "max_tokens": 9,
                "tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}}],
                "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
                "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "And Arden?"}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "I must look.", "signature": "s"},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "text", "text": "One moment."},
                            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Arden"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain."},
                            {"type": "text", "text": "So?"},
                        ],
                    },
                ],
            }
        )
    )
    assert [message.role for message in call.messages] == ["system", "user", "assistant", "tool", "user"]
    answered, result = call.messages[2], call.messages[3]
    assert (answered.content, answered.reasoning_content) == ("One moment.", "I must look.")
    assert answered.tool_calls is not None
    assert (answered.tool_calls[0].id, answered.tool_calls[0].function.name) == ("toolu_1", "weather")
    assert (result.tool_call_id, result.content) == ("toolu_1", "Rain.")
    assert call.asked_tokens == 9


def test_a_tool_may_be_called_by_a_servers_name_and_its_own():
    name = "mcp__" + "x" * 123
    call = parse_message(msgspec.json.encode({**said(TEXT), "tools": [{**WEATHER, "name": name}]}))
    assert call.tools is not None
    assert call.tools[0]["function"]["name"] == name


def test_what_a_tool_is_shown_by_is_shown_and_what_is_so_anyway_may_be_said():
    tool = {**WEATHER, "input_examples": [{"city": "Arden"}], "allowed_callers": ["direct"], "defer_loading": False}
    context = {"context_management": {"edits": [CLEARING]}, "mcp_servers": []}
    call = parse_message(msgspec.json.encode({**said(TEXT), "tools": [tool], **context}))
    tooling = call.tooling()
    assert tooling is not None
    assert tooling.shown[0]["function"]["input_examples"] == [{"city": "Arden"}]


def said(*blocks: object, role: str = "user") -> dict[str, object]:
    return {"model": "demo", "max_tokens": 9, "messages": [{"role": role, "content": list(blocks)}]}


TEXT = {"type": "text", "text": "x"}
CLEARING = {"type": "clear_thinking_20251015", "keep": "all"}
REFUSED = [
    (b"{", "JSON"),
    (b"[]", "object"),
    (b'{"x": ' + b"[" * 10_000, "nested"),
    (b'{"model": "\\ud800"}', "JSON"),
    ({"model": "demo", "messages": HELLO}, "max_tokens"),
    ({"model": "demo", "max_tokens": 0, "messages": HELLO}, "max_tokens"),
    ({"model": "demo", "max_tokens": 9, "messages": []}, "messages"),
    ({"model": "demo", "max_tokens": 9, "messages": HELLO, "temperature": 3}, "temperature"),
    ({"model": "demo", "max_tokens": 9, "messages": HELLO, "stop_sequences": [""]}, "stop_sequences"),
    ({"model": "demo", "max_tokens": 9, "messages": HELLO, "stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"model": "demo", "max_tokens": 9, "messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
    ({"model": "demo", "max_tokens": 9, "messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "end with"),
    (said(), "say something"),
    (said({"type": "image", "source": {}}), "image"),
    (said({"type": "document", "source": {}}), "document"),
    (said({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}), "image"),
    (said({"type": "tool_use", "id": "1", "name": "x", "input": {}}), "tool_use"),
    (said({"type": "tool_use", "id": "1", "name": "x", "input": []}), "input"),
    (said({"type": "tool_result", "tool_use_id": "1"}, role="assistant"), "tool_result"),
    ({**said(TEXT), "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({**said(TEXT), "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124 is one of Anthropic's own"),
    ({**said(TEXT), "tools": [{"name": "two words", "input_schema": {}}]}, r"tools\[0\].name"),
    ({**said(TEXT), "tools": [{"name": "x"}]}, "input_schema"),
    ({**said(TEXT), "tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({**said(TEXT), "tool_choice": {"type": "some"}}, "tool_choice"),
    ({**said(TEXT), "thinking": {"type": "deep"}}, "thinking"),
    ({**said(TEXT), "metadata": {"user_id": "x" * 600}}, "user_id"),
    ({**said(TEXT), "tools": [{**WEATHER, "defer_loading": True}]}, r"tools\[0\].defer_loading"),
    ({**said(TEXT), "tools": [{**WEATHER, "allowed_callers": ["code"]}]}, r"tools\[0\].allowed_callers"),
    ({**said(TEXT), "mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
    ({**said(TEXT), "compaction": {"type": "summarize"}}, "compaction"),
    ({**said(TEXT), "thread": {"type": "create"}}, "thread"),
    ({**said(TEXT), "output_config": {"task_budget": {"type": "tokens", "total": 20_000}}}, "task_budget"),
    ({**said(TEXT), "context_management": {"edits": [CLEARING, {"type": "compact_20260112"}]}}, r"edits\[1\]"),
]


@pytest.mark.parametrize(("body", "says"), REFUSED)
async def test_a_bad_message_is_refused_in_anthropics_words(front: Front, body, says):
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        if path != MESSAGES and says in ("max_tokens", "temperature", "stop_sequences", "user_id", "end with"):
            continue
        status, answer, headers = await front.post(path, body)
        assert status == 400, answer
        assert answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
        assert re.search(says, answer["error"]["message"]), answer
        assert headers["request-id"] == answer["request_id"]
        assert headers["anthropic-organization-id"].startswith("org_")
    assert front.peer.is_quiet()


async def test_every_kind_of_failure_is_one_of_the_clients_own(front: Front, claude):
    with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
        await asked(claude.with_options(api_key="sk-unknown"))
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await asked(claude, model="another")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum'"):
        await asked(claude, messages=[{"role": "user", "content": "one " * 9000}])
    with pytest.raises(anthropic.BadRequestError, match="it is a date"):
        await asked(claude, extra_headers={"anthropic-version": "new"})
    with pytest.raises(anthropic.NotFoundError, match="it is not served here"):
        await claude.messages.batches.list()
    task = asked(claude)
    submit = await front.peer.submitted()
    front.peer.send(wire.Failed(submit.request_id, "overloaded", "no room"))
    with pytest.raises(anthropic.APIStatusError, match="overloaded") as refused:
        await task
    assert (refused.value.status_code, refused.value.body["error"]["type"]) == (529, "overloaded_error")


async def test_a_stream_that_fails_ends_with_an_error_event(front: Front, claude):
    task = asked(claude, stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("one"))
    stream = await task
    front.peer.send(wire.Failed(submit.request_id, "internal", "it broke"))
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        async for _ in stream:
            pass


async def test_a_spent_budget_has_anthropics_names_too(open_front):
    policy = Policy(budget=Budget(Decimal("0.001")), prices={"*": Price(request=Decimal("0.002"))})
    async with open_front(policies={"default": policy}) as front:
        status, answer, headers = await front.post(MESSAGES, {"model": "demo", "max_tokens": 4, "messages": HELLO})
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert "Limit 0.001 USD, Spent 0.00 USD, Reserved 0.00 USD, Requested 0.002 USD" in answer["error"]["message"]
        assert headers["anthropic-ratelimit-budget-limit"] == "0.001"
        assert headers["anthropic-ratelimit-budget-spent"] == "0.00"
        assert headers["anthropic-ratelimit-budget-reset"].endswith("Z")


async def test_a_bearer_key_opens_as_well(front: Front):
    async with official.Anthropic(base_url=front.url, api_key=None, auth_token=KEY, max_retries=0) as client:
        assert (await client.messages.count_tokens(model="demo", messages=HELLO)).input_tokens > 0


async def test_limits_have_anthropics_names(open_front):
    policy = Policy(limits=Limits(requests_per_minute=1, tokens_per_minute=10_000))
    async with open_front(policies={"default": policy}) as front:
        call = {"model": "demo", "max_tokens": 4, "messages": HELLO}
        asking = asyncio.create_task(front.post(MESSAGES, call, **{"x-api-key": KEY}))
        front.peer.say(await front.peer.submitted(), [END], "stop")
        _, _, headers = await asking
        assert headers["anthropic-ratelimit-requests-limit"] == "1"
        assert headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert headers["anthropic-ratelimit-tokens-limit"] == "10000"
        status, answer, headers = await front.post(MESSAGES, call)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        assert int(headers["retry-after"]) > 0
        assert not [name for name in headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("duration", "expected"), [("12ms", 0.012), ("1.5s", 1.5), ("6m0s", 360.0), ("23h59m0.5s", 86_340.5), ("0ms", 0.0)]
)
def test_durations_are_read_as_they_are_written(duration, expected):
    assert seconds(duration) == pytest.approx(expected)
    assert limited({"retry-after": "1"}) == {"retry-after": "1"}


def test_more_stops_than_openai_takes_are_taken():
    body = msgspec.json.encode({**said(TEXT), "stop_sequences": ["a", "b", "c", "d", "e"]})
    assert len(parse_message(body).stops) == 5
    with pytest.raises(Malformed):
        parse_message(msgspec.json.encode({**said(TEXT), "stop_sequences": ["x" * 2000]}))
