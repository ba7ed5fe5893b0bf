"""/v1/responses as OpenAI's own client sees it: asked, streamed, kept, gone on from."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from policies import settings, wire
from policies.policy import Policy
from tests import batches
from tests.gateway.conftest import KEY, Front
from tests.gateway.peer import Peer
from tests.gateway.responding import ASSISTANT, END, another_tenant, answered, ask, prompt_of, turn
from tests.gateway.test_files_bounds import tenant_of

pytestmark = pytest.mark.usefixtures("patient_store")


async def test_a_response_has_output_usage_and_a_row_in_the_ledger(front: Front):
    call = ask(front, max_output_tokens=20, metadata={"team": "a"}, user="me", temperature=0.5, extra_body={"seed": 7})
    submit = await front.peer.submitted()
    assert (submit.sampling.max_tokens, submit.sampling.temperature, submit.sampling.seed) == (20, 0.5, 7)
    tokens = [*front.ids("Hi there."), END]
    front.peer.say(submit, tokens, "stop", num_cached_tokens=2)
    response = await call
    assert (response.object, response.status, response.output_text) == ("response", "completed", "Hi there.")
    assert response.id == submit.request_id.replace("req_", "resp_")
    assert (response.temperature, response.max_output_tokens, response.metadata) == (0.5, 20, {"team": "a"})
    assert response.completed_at >= response.created_at
    assert (response.error, response.incomplete_details, response.service_tier) == (None, None, "default")
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(submit.prompt_token_ids), len(tokens))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens_details.reasoning_tokens == 0
    (row,) = front.rows()
    assert (row["endpoint"], row["status"], row["finish_reason"]) == ("/v1/responses", 200, "stop")
    assert (row["num_completion_tokens"], row["end_user"]) == (len(tokens), "me")


async def test_an_answer_that_was_cut_is_incomplete(front: Front):
    call = ask(front, max_output_tokens=2)
    front.peer.say(await front.peer.submitted(), front.ids("Hi")[:2], "length")
    response = await call
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


async def test_the_prompt_is_the_items_as_a_conversation(front: Front):
    call = ask(
        front,
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Three"}]},
            {"role": "user", "content": "Four"},
        ],
    )
    prompt, _ = await prompt_of(front, call)
    turns = [("system", "Be brief.\n\nBe kind."), ("user", "One\nTwo"), ("assistant", "Three"), ("user", "Four")]
    assert prompt == "".join([turn(*one) for one in turns]) + ASSISTANT


async def test_a_response_goes_on_from_another_without_its_instructions(front: Front):
    first = await answered(front, instructions="Be brief.")
    prompt, second = await prompt_of(front, ask(front, input="And?", previous_response_id=first.id))
    assert prompt == turn("user", "Hello") + turn("assistant", "Hi there.") + turn("user", "And?") + ASSISTANT
    prompt, third = await prompt_of(front, ask(front, input="So?", previous_response_id=second.id))
    assert prompt.endswith(turn("user", "And?") + turn("assistant", "Yes.") + turn("user", "So?") + ASSISTANT)
    assert third.previous_response_id == second.id


async def test_an_output_is_the_next_input_as_it_stands_or_by_its_id(front: Front):
    first = await answered(front)
    whole = [{"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "And?"}]
    expected = turn("user", "Hello") + turn("assistant", "Hi there.") + turn("user", "And?") + ASSISTANT
    prompt, _ = await prompt_of(front, ask(front, input=whole))
    assert prompt == expected
    whole[1] = {"type": "item_reference", "id": first.output[0].id}
    prompt, _ = await prompt_of(front, ask(front, input=whole))
    assert prompt == expected


async def test_what_is_referred_to_has_a_bound(front: Front, monkeypatch):
    told = [(await answered(front)).output[0].id for _ in range(2)]
    kept = [await front.gw.responses.shelf.find(await tenant_of(front), f"resp_{id[4:36]}") for id in told]
    num_bytes = sum([each.num_bytes for each in kept if each is not None])
    given: Any = [{"type": "item_reference", "id": id} for id in (*told, *told)]
    monkeypatch.setattr("gateway.responses.shelf.MAX_CHAIN_BYTES", num_bytes)
    assert (await prompt_of(front, ask(front, input=given)))[0].count("Hi there.") == 4
    monkeypatch.setattr("gateway.responses.shelf.MAX_CHAIN_BYTES", num_bytes - 1)
    with pytest.raises(
        openai.BadRequestError, match=f"have {num_bytes} bytes, and may have {num_bytes - 1}"
    ) as refused:
        await ask(front, input=given)
    assert refused.value.param == "input[1].id"


async def test_a_response_is_kept_until_it_is_deleted(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        made = await answered(front, metadata={"k": "v"})
        found = await front.client.responses.retrieve(made.id)
        assert found == made
        await front.client.responses.delete(made.id)
        for again in (front.client.responses.retrieve, front.client.responses.delete, front.client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await again(made.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(front, previous_response_id=made.id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_a_conversation_with_a_response_that_is_gone_cannot_be_gone_on_with(front: Front):
    first = await answered(front)
    second = await answered(front, previous_response_id=first.id)
    await front.client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=first.id):
        await ask(front, previous_response_id=second.id)


async def test_input_items_are_listed_page_by_page_in_either_order(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        first = await answered(front, input=[{"role": "user", "content": str(n)} for n in range(3)])
        second = await answered(front, input="last", previous_response_id=first.id)
        items = front.client.responses.input_items

        async def texts(**query: Any) -> list[str]:
            return [item.content[0].text async for item in await items.list(second.id, **query)]

        whole = ["0", "1", "2", "Hi there.", "last"]
        assert await texts(order="asc", limit=2) == whole
        assert await texts(limit=1) == await texts() == whole[::-1]
        page = await items.list(second.id, limit=2)
        assert (page.has_more, page.first_id, page.last_id) == (True, page.data[0].id, page.data[1].id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await texts(after="msg_of_nobody")
        with pytest.raises(openai.BadRequestError, match="limit"):
            await texts(limit=101)


async def test_what_is_not_to_be_stored_is_not(front: Front):
    made = await answered(front, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        await front.client.responses.retrieve(made.id)


@pytest.mark.parametrize("by", ["settings", "policy"])
async def test_nothing_is_stored_where_the_operator_wants_it_so(open_front, by):
    sections: dict[str, Any] = (
        {"responses": settings.Responses(store=False)}
        if by == "settings"
        else {"policies": {"default": Policy(store_responses=False)}}
    )
    async with open_front(**sections) as front:
        made = await answered(front)
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            await front.client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await ask(front, background=True)


async def test_another_tenants_response_is_not_there(front: Front):
    made = await answered(front)
    running = await ask(front, background=True)
    submit = await front.peer.submitted()
    async with another_tenant(front) as client:
        theirs = client.responses
        for one in (made, running):
            for asked in (theirs.retrieve, theirs.delete, theirs.cancel, theirs.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await asked(one.id)
            with pytest.raises(openai.BadRequestError, match="not found"):
                await theirs.create(model="demo", input="And?", previous_response_id=one.id)
        reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
        with pytest.raises(openai.BadRequestError, match="not found"):
            await theirs.create(model="demo", input=reference)
    front.peer.say(submit, [END], "stop")
    assert (await front.client.responses.retrieve(made.id)).id == made.id


async def test_tokens_are_counted_as_the_prompt_would_be(front: Front):
    first = await answered(front)
    parameters: Any = {"model": "demo", "input": "And?", "previous_response_id": first.id, "instructions": "Be brief."}
    counted = await front.client.responses.input_tokens.count(**parameters)
    call = ask(front, **parameters)
    submit = await front.peer.submitted()
    front.peer.say(submit, [END], "stop")
    await call
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", len(submit.prompt_token_ids))


async def test_with_truncation_the_oldest_turns_make_room(open_front):
    async with open_front(peer=Peer(max_model_tokens=120)) as front:
        said = [{"role": "system", "content": "Be brief."}]
        for number in range(12):
            said += [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": str(number)}]
        said.append({"role": "user", "content": "And?"})
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(front, input=said)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
        call = ask(front, input=said, truncation="auto", max_output_tokens=1)
        submit = await front.peer.submitted()
        front.peer.say(submit, [front.ids("a")[0]], "length")
        await call
        prompt = front.text._tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False)
        assert prompt.startswith(turn("system", "Be brief.") + "<|im_start|>user\nSay ")
        assert prompt.endswith(turn("user", "And?") + ASSISTANT)
        assert len(submit.prompt_token_ids) < 120 <= len(submit.prompt_token_ids) + 40
        with pytest.raises(openai.BadRequestError, match="context"):
            await ask(front, input="so " * 500, truncation="auto")


async def test_logprobs_come_with_the_text_where_they_are_asked_for(front: Front):
    call = ask(front, include=["message.output_text.logprobs"], top_logprobs=2)
    submit = await front.peer.submitted()
    assert submit.sampling.num_logprobs == 2
    tokens = [*front.ids("Hi"), END]
    front.peer.say(
        submit, tokens, "stop", logprobs=[wire.TokenLogprob(-0.5, [token, 300], [-0.5, -2.0]) for token in tokens]
    )
    response = await call
    entries = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == "Hi"
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


async def test_the_form_of_the_text_is_a_grammar_for_the_worker(front: Front):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    schema["additionalProperties"] = False
    form: dict[str, Any] = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    call = ask(front, text={"format": form, "verbosity": "low"})
    submit = await front.peer.submitted()
    assert submit.grammar is not None
    assert (submit.grammar.kind, json.loads(submit.grammar.source)) == ("json_schema", schema)
    front.peer.say(submit, [*front.ids('{"city": "Arden"}'), END], "stop")
    response = await call
    assert json.loads(response.output_text) == {"city": "Arden"}
    assert (response.text.format.type, response.text.format.schema_) == ("json_schema", schema)
    assert (response.text.format.name, response.text.format.strict, response.text.verbosity) == ("place", True, "low")
    call = ask(front, text={"format": {"type": "json_object"}})
    submit = await front.peer.submitted()
    assert submit.grammar is not None
    assert submit.grammar.kind == "json_object"
    front.peer.say(submit, [*front.ids("{}"), END], "stop")
    assert (await call).output_text == "{}"
    form["schema"] = {"type": "object", "properties": {"city": {"type": "number", "multipleOf": "x"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(front, text={"format": form})
    assert refused.value.param.startswith("text.format.schema")


async def test_a_synchronous_client_is_answered_and_parses_a_model(front: Front):
    class Place(pydantic.BaseModel):
        city: str

    def asked() -> tuple[Any, list[Any]]:
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key=KEY, max_retries=0) as client:
            parsed = client.responses.parse(model="demo", input="Where?", text_format=Place)
            with client.responses.stream(model="demo", input="Where?", text_format=Place) as stream:
                return parsed.output_parsed, [*stream, stream.get_final_response().output_parsed]

    call = asyncio.create_task(asyncio.to_thread(asked))
    for _ in range(2):
        front.peer.say(await front.peer.submitted(), [*front.ids('{"city": "Arden"}'), END], "stop")
    parsed, (*events, final) = await call
    assert parsed == final == Place(city="Arden")
    assert events[-1].type == "response.completed"


async def test_a_stream_that_is_repeated_under_its_key_is_the_same_and_stored_once(front: Front):
    headers = {"Idempotency-Key": "once"}
    stream = ask(front, stream=True, extra_headers=headers)
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi there."), END], "stop")
    events = [event async for event in await stream]
    assert [event async for event in await ask(front, stream=True, extra_headers=headers)] == events
    assert await front.client.responses.retrieve(events[-1].response.id) == events[-1].response
    assert len(front.rows()) == 1


async def test_a_stream_that_fails_says_so_and_is_kept_as_it_is(front: Front):
    stream = ask(front, stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    opened = await stream
    begun = await anext(opened)
    front.peer.say(submit, [], "error")
    events = [begun, *[event async for event in opened]]
    assert [event.type for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    failed = await front.client.responses.retrieve(begun.response.id)
    assert failed == events[-1].response
    assert (failed.status, failed.error.code, failed.output[0].status) == ("failed", "server_error", "incomplete")


async def test_what_fails_before_its_first_event_has_a_status_of_its_own(front: Front):
    stream = ask(front, stream=True)
    front.peer.say(await front.peer.submitted(), [], "error")
    with pytest.raises(openai.InternalServerError):
        await stream


async def test_lines_of_a_batch_are_responses(front: Front):
    url = "/v1/responses"
    line = {"method": "POST", "url": url}
    asked = {"custom_id": "0", **line, "body": {"model": "demo", "input": "Hello"}}
    batch = await batches.begun(front.client, [asked], url)
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi there."), END], "stop")
    batch = await batches.over(front.client, batch)
    (said,) = await batches.outputs(front.client, batch.output_file_id)
    response = Response.model_validate(said["response"]["body"])
    assert (said["custom_id"], response.output_text) == ("0", "Hi there.")
    assert await front.client.responses.retrieve(response.id) == response
    behind = {"custom_id": "1", **line, "body": {"model": "demo", "input": "Hello", "background": True}}
    batch = await batches.over(front.client, await batches.begun(front.client, [asked, behind], url))
    (error,) = batch.errors.data
    assert (batch.status, error.line, error.param) == ("failed", 2, "body.background")


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 7}, "input"),
    ({"input": [7]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"model": None}, "model"),
    ({"previous_response_id": "resp_nobody"}, "previous_response_id"),
    ({"previous_response_id": 7}, "previous_response_id"),
    ({"conversation": 7}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"include": ["everything"]}, "include[0]"),
    ({"metadata": {"k": 7}}, "metadata"),
    ({"truncation": "some"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}, {"type": "file_search"}]}, "tools[1].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": nested(300)}]}, "tools[0].parameters"),
    ({"previous_response_id": "\0"}, "previous_response_id"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
    ({"background": True, "store": False}, "background"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{number}-{param}" for number, (_, param) in enumerate(BAD)])
async def test_what_cannot_be_answered_is_refused_by_name(front: Front, body, param):
    status, said, _ = await front.post("/v1/responses", {"model": "demo", "input": "Hello", **body})
    assert (status, said["error"]["type"], said["error"]["param"]) == (400, "invalid_request_error", param)
    assert front.peer.is_quiet()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model":"demo","input":"\\ud800"}', b"\xff"])
async def test_what_is_no_request_is_refused(front: Front, body):
    status, said, _ = await front.post("/v1/responses", body)
    assert (status, said["error"]["type"]) == (400, "invalid_request_error")


async def test_what_no_model_answers_is_refused_with_the_usual_statuses(front: Front):
    with pytest.raises(openai.NotFoundError) as missing:
        await ask(front, model="nobody")
    assert missing.value.code == "model_not_found"
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.create(model="demo", input="Hello")
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.retrieve("resp_1")
