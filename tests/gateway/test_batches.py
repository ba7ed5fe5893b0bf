"""/v1/batches by OpenAI's own client: every line answered once, at half the price, in the least important class; what
is wrong with a line is that line's, and limits are waited for."""

from __future__ import annotations

import json
import time
from codecs import BOM_UTF8
from typing import Any

import msgspec
import openai
import pytest

from gateway.openai import BatchBody
from policies import settings
from policies.pricelist import Proposed
from tests import house as houses
from tests.batches import CHAT, PRICE, another_key, as_file, begun, line, lines, outputs, over, when
from tests.builders import scripted

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """One that answers at once, for tests that change nothing of it."""
    with houses.running(
        tmp_path_factory.mktemp("batches"),
        scripted("--tokens-per-step", 4),
        prices=(Proposed(price=PRICE),),
        batches=settings.Batches(max_lines=3000, max_input_bytes=2_000_000),
    ) as running:
        yield running


async def test_every_line_is_answered_at_half_the_price_in_the_least_important_class(house):
    asked = [*lines(30, temperature=1.0), line("tier", temperature=1.0, service_tier="priority")]
    async with house.client() as client:
        batch = await begun(client, asked, metadata={"for": "a test"})
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"for": "a test"})
        assert batch.expires_at == batch.created_at + 86_400
        batch = await over(client, batch)
        found = await outputs(client, batch.output_file_id)
        file = await client.files.retrieve(batch.output_file_id)
        alone = await client.chat.completions.create(**asked[0]["body"])
    assert (batch.status, batch.error_file_id, batch.errors, batch.model) == ("completed", None, None, "demo")
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (31, 31, 0)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in asked]
    assert len({one["id"] for one in found}) == len(found)
    for one in found:
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        answer = openai.types.chat.ChatCompletion.model_validate(one["response"]["body"])
        assert (answer.usage.completion_tokens, answer.service_tier) == (4, "flex")
    rows = {row.request_id: row for row in await house.ledger_rows() if row.sla_class == "batch"}
    ours = {one["response"]["request_id"]: one["response"]["body"]["usage"] for one in found}
    assert rows.keys() == ours.keys()
    for request_id, row in rows.items():
        assert (row.status, row.num_prompt_tokens) == (200, ours[request_id]["prompt_tokens"])
        assert (row.price_version, row.cost_micros) == (
            "list:1;discount=0.5;batch",
            (10 * row.num_prompt_tokens + 40 * row.num_completion_tokens) // 2,
        )
    usage = batch.usage
    marked = [row.price_version.endswith(";batch") for row in await house.ledger_rows()]
    for is_batch in (True, False):
        query = f"start_time={batch.created_at - 86_400}&batch={str(is_batch).lower()}&group_by[]=batch"
        path = f"/v1/organization/usage/completions?{query}"
        async with house.http(house.admin_key) as session, session.get(path) as told:
            assert told.status == 200, await told.text()
            used = [one for bucket in (await told.json())["data"] for one in bucket["results"]]
        assert [one["batch"] for one in used] == [is_batch] * len(used)
        assert sum(one["num_model_requests"] for one in used) == marked.count(is_batch) > 0
    assert usage.input_tokens == sum(row.num_prompt_tokens for row in rows.values())
    assert usage.output_tokens == sum(row.num_completion_tokens for row in rows.values()) == 4 * len(asked)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    (dear,) = [row for row in await house.ledger_rows() if row.request_id == "req_" + alone.id.partition("-")[2]]
    assert dear.cost_micros == 10 * dear.num_prompt_tokens + 40 * dear.num_completion_tokens


async def test_bare_completions_go_in_batches_too(house):
    async with house.client() as client:
        asked = [line(f"{number}", "/v1/completions", prompt="Once") for number in range(3)]
        batch = await over(client, await begun(client, asked, "/v1/completions"))
        found = await outputs(client, batch.output_file_id)
    assert [one["response"]["body"]["object"] for one in found] == ["text_completion"] * 3


async def test_a_line_that_fails_is_in_the_other_file_and_stops_nobody(house):
    async with house.client() as client:
        asked = [line("good"), line("hot", temperature=9), line("none", messages=[]), line("long", max_tokens="x")]
        batch = await over(client, await begun(client, asked))
        (good,) = await outputs(client, batch.output_file_id)
        bad = await outputs(client, batch.error_file_id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 1, 3)
    assert good["custom_id"] == "good"
    assert [one["custom_id"] for one in bad] == ["hot", "none", "long"]
    for one, param in zip(bad, ("temperature", "messages", "max_tokens"), strict=True):
        assert (one["error"], one["response"]["status_code"]) == (None, 400)
        assert one["response"]["request_id"].startswith("req_")
        assert one["response"]["body"]["error"]["param"] == param


async def test_a_line_that_is_no_json_fails_alone(house):
    twice = json.dumps(line("twice"))[:-2] + ', "max_tokens": 5}}'
    unread = [
        ("hello", None, "invalid_json_line", "Line 3: The body could not be read as JSON"),
        ('{"custom_id": "a"', None, "invalid_json_line", "Line 4: "),
        ('{"custom_id": "\\ud800"}', None, "invalid_json_line", "Line 5: "),
        (json.dumps(line("name", model="\ud800")), None, "invalid_json_line", "Line 6: "),
        (twice, "twice", "duplicate_key", "Line 7: Invalid body: 'body.max_tokens' is there twice."),
    ]
    asked = ["", json.dumps(line("first")), *[text for text, *_ in unread], json.dumps(line("last"))]
    async with house.client() as client:
        batch = await over(client, await begun(client, asked))
        good, bad = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
    counts = batch.request_counts
    assert (batch.status, batch.errors, batch.model) == ("completed", None, "demo")
    assert (counts.total, counts.completed, counts.failed) == (7, 2, 5)
    assert [one["custom_id"] for one in good] == ["first", "last"]
    for one, (_, custom_id, code, message) in zip(bad, unread, strict=True):
        assert (one["custom_id"], one["response"], one["error"]["code"]) == (custom_id, None, code)
        assert one["error"]["message"].startswith(message)


async def test_a_file_that_begins_with_a_byte_order_mark_is_read_as_one_without(house):
    asked = BOM_UTF8 + as_file([*lines(3), "hello"])
    async with house.client() as client:
        batch = await over(client, await begun(client, asked))
        good, bad = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
        assert (await client.files.content(batch.input_file_id)).content == asked, "what was uploaded is given back"
    assert [one["custom_id"] for one in good] == ["line-0", "line-1", "line-2"]
    assert [one["response"]["status_code"] for one in good] == [200] * 3
    assert [one["error"]["message"].partition(":")[0] for one in bad] == ["Line 4"]


WRONG: list[tuple[str | dict[str, Any], str, str | None]] = [
    ("hello", "invalid_json_line", None),
    ('{"custom_id": "a"', "invalid_json_line", None),
    ('{"custom_id": NaN}', "invalid_json_line", None),
    ('{"custom_id": "\\ud800"}', "invalid_json_line", None),
    ("[" * 10_000, "invalid_type", None),
    ('{"custom_id": "a", "method": "POST", "url": "u", "body": ' + "[" * 10_000, "invalid_json_line", None),
    ("[]", "invalid_type", None),
    ('{"method": "POST", "url": "/v1/chat/completions", "body": {}}', "missing_required_parameter", "custom_id"),
    ({**line("x1"), "priority": 1}, "invalid_line", None),
    ({**line("x2"), "custom_id": 7}, "invalid_type", "custom_id"),
    ({**line("x3"), "custom_id": ""}, "empty_string", "custom_id"),
    ({**line("x4"), "custom_id": "first"}, "duplicate_custom_id", "custom_id"),
    ({**line("x5"), "method": "GET"}, "invalid_method", "method"),
    ({**line("x6"), "url": "/v1/completions"}, "mismatched_endpoint", "url"),
    ({**line("x7"), "url": "http://elsewhere/v1/chat/completions"}, "mismatched_endpoint", "url"),
    ({**line("x8"), "body": []}, "invalid_type", "body"),
    ({**line("x9"), "body": {}}, "missing_required_parameter", "body.model"),
    (line("x10", model="nobody"), "model_not_found", "body.model"),
    (line("x11", stream=True), "invalid_value", "body.stream"),
]


async def test_each_bad_line_is_named_and_none_is_asked(house):
    asked = ["", json.dumps(line("first")), *[one for one, _, _ in WRONG], json.dumps(line("last"))]
    num_rows = len(await house.ledger_rows())
    async with house.client() as client:
        batch = await over(client, await begun(client, asked))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at >= batch.created_at
    assert batch.in_progress_at is None
    assert batch.errors.object == "list"
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (number, code, param) for number, (_, code, param) in enumerate(WRONG, 3)
    ]
    assert all(error.message for error in batch.errors.data)
    assert len(await house.ledger_rows()) == num_rows


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\n \n", "empty_file"),
        (as_file(lines(3001)), "too_many_lines"),
        (b"\xff\xfe\x00", "invalid_json_line"),
        (b"x" * 1_999_000, "invalid_json_line"),
        (BOM_UTF8, "empty_file"),
        (BOM_UTF8 + b"\n", "empty_file"),
        (BOM_UTF8 * 2 + as_file(lines(1)), "invalid_json_line"),
    ],
)
async def test_a_file_that_is_no_batch_fails(house, data, code):
    async with house.client() as client:
        batch = await over(client, await begun(client, data))
    assert (batch.status, batch.errors.data[0].code) == ("failed", code)


async def test_of_very_many_bad_lines_a_thousand_are_named_and_the_others_counted(house):
    async with house.client() as client:
        batch = await over(client, await begun(client, ["x"] * 1500))
    assert (len(batch.errors.data), batch.errors.data[-1].message) == (1001, "500 more lines are wrong.")


async def test_what_cannot_become_a_batch_is_refused_by_name(house):
    async with house.client() as client:
        good = await client.files.create(file=("a", as_file(lines(1))), purpose="batch")
        other = await client.files.create(file=("a", as_file(lines(1))), purpose="user_data")
        large = await client.files.create(file=("a", b"x" * 2_000_001), purpose="batch")
        asked = {"input_file_id": good.id, "endpoint": CHAT, "completion_window": "24h"}
        for wrong, param in (
            ({"input_file_id": other.id}, "input_file_id"),
            ({"input_file_id": large.id}, "input_file_id"),
            ({"endpoint": "/v1/moderations"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.batches.create(**{**asked, **wrong})
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(**{**asked, "input_file_id": "file-none"})
        for call in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="No batch found"):
                await call("batch_none")


async def test_a_batch_and_its_files_are_its_tenants_alone(house):
    key = (await another_key(house, is_stranger=True))["key"]
    async with house.client() as client, house.client(key) as stranger:
        batch = await over(client, await begun(client, lines(2)))
        for call in (stranger.batches.retrieve, stranger.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        for file_id in (batch.input_file_id, batch.output_file_id):
            with pytest.raises(openai.NotFoundError):
                await stranger.files.content(file_id)
        with pytest.raises(openai.NotFoundError):
            await stranger.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert (await stranger.batches.list()).data == []


async def test_batches_are_listed_in_pages_the_newest_first(house):
    key = (await another_key(house))["key"]
    async with house.client(key) as client:
        made = [(await begun(client, lines(1))).id for _ in range(5)]
        assert [batch.id async for batch in client.batches.list(limit=2)][:5] == made[::-1]
        page = await client.batches.list(limit=2, after=made[2])
        assert [batch.id for batch in page.data] == [made[1], made[0]]
        with pytest.raises(openai.BadRequestError, match="No batch found") as unknown:
            await client.batches.list(after="batch_x")
        assert unknown.value.param == "after"
        for batch_id in made:
            await over(client, await client.batches.retrieve(batch_id))


async def test_a_key_without_the_scopes_has_no_batches_and_lines_ask_with_the_scopes_of_the_key(house):
    some = await another_key(house, scopes={"endpoints": ["files", "batches"]})
    none = await another_key(house, scopes={"endpoints": ["chat.completions"]})
    async with house.client(none["key"]) as client:
        with pytest.raises(openai.PermissionDeniedError, match="Missing scopes: batches"):
            await client.batches.list()
    async with house.client(some["key"]) as client:
        batch = await over(client, await begun(client, lines(2)))
        bad = await outputs(client, batch.error_file_id)
    assert [one["response"]["status_code"] for one in bad] == [403, 403]
    assert bad[0]["response"]["body"]["error"]["code"] == "missing_scope"


async def test_outputs_go_when_their_client_said(house):
    async with house.client() as client:
        batch = await begun(client, lines(1), output_expires_after={"anchor": "created_at", "seconds": 3600})
        batch = await over(client, batch)
        file = await client.files.retrieve(batch.output_file_id)
    assert file.expires_at - file.created_at == 3600


def test_the_shape_of_a_batch_is_the_official_one():
    assert {field.name for field in msgspec.structs.fields(BatchBody)} == set(openai.types.Batch.model_fields)


async def test_a_cancelled_batch_keeps_what_was_answered(start_house):
    house = start_house("--tokens-per-step", 1, "--step-s", 0.02, batches=settings.Batches(max_in_flight=4))
    async with house.client() as client:
        batch = await begun(client, lines(300))
        with pytest.raises(openai.ConflictError, match="being read by the batch"):
            await client.files.delete(batch.input_file_id)
        await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
        cancelling = await client.batches.cancel(batch.id)
        assert cancelling.status in ("cancelling", "cancelled")
        batch = await over(client, batch)
        answered, unasked = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        assert (await client.files.delete(batch.input_file_id)).deleted
    assert (batch.status, batch.cancelling_at <= batch.cancelled_at) == ("cancelled", True)
    assert len(answered) == batch.request_counts.completed >= 4
    assert len(unasked) == batch.request_counts.failed == 300 - len(answered)
    assert {one["error"]["code"] for one in unasked} == {"batch_cancelled"}
    assert {one["response"] for one in unasked} == {None}
    ids = {one["custom_id"] for one in answered} | {one["custom_id"] for one in unasked}
    assert len(ids) == 300
    rows = await house.ledger_rows()
    assert {row.request_id for row in rows if row.num_completion_tokens} == {
        one["response"]["request_id"] for one in answered
    }


async def test_a_finished_batch_cannot_be_cancelled(house):
    async with house.client() as client:
        batch = await over(client, await begun(client, lines(1)))
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'completed'"):
            await client.batches.cancel(batch.id)


async def test_what_was_not_asked_when_the_window_ends_expires(start_house):
    house = start_house("--tokens-per-step", 1, "--step-s", 0.02, batches=settings.Batches(max_in_flight=4))
    async with house.client() as client:
        batch = await begun(client, lines(300))
        await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
        house.gw.batches.wall = lambda: time.time() + 86_401
        batch = await over(client, batch)
        answered, unasked = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
    assert (batch.status, batch.expired_at >= batch.expires_at) == ("expired", True)
    assert {one["error"]["code"] for one in unasked} == {"batch_expired"}
    assert len(answered) + len(unasked) == 300
    assert len(answered) >= 4
