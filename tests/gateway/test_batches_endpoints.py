"""Batches of every endpoint that takes them, computed by a real worker."""

from __future__ import annotations

import pytest

from tests.batches import begun, line, outputs, over

RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"


async def test_responses_and_vectors_go_in_batches(house):
    asked = {
        RESPONSES: [line(f"{number}", RESPONSES, input=f"Count to {number}") for number in range(4)],
        EMBEDDINGS: [line(f"{number}", EMBEDDINGS, input=["a fox", "a hen"]) for number in range(4)],
    }
    for some in asked[RESPONSES]:
        some["body"]["max_output_tokens"] = some["body"].pop("max_tokens")
    for some in asked[EMBEDDINGS]:
        del some["body"]["max_tokens"]
    async with house.client() as client:
        for endpoint, kind in ((RESPONSES, "response"), (EMBEDDINGS, "list")):
            batch = await over(client, await begun(client, asked[endpoint], endpoint))
            found = await outputs(client, batch.output_file_id)
            assert batch.status == "completed", batch
            assert [one["custom_id"] for one in found] == ["0", "1", "2", "3"], await outputs(
                client, batch.error_file_id
            )
            assert {one["response"]["body"]["object"] for one in found} == {kind}
            ids = [one["response"]["request_id"] for one in found]
            rows = [row for row in await house.ledger_rows(status=200) if row.request_id in ids]
            assert len(rows) == 4
            assert {(row.endpoint, row.sla_class) for row in rows} == {(endpoint, "batch")}


@pytest.mark.parametrize("field", ["stream", "background"])
async def test_what_would_be_answered_elsewhere_or_piece_by_piece_is_no_line(house, field):
    async with house.client() as client:
        some = line("a", RESPONSES, input="Hello", **{field: True})
        batch = await over(client, await begun(client, [some], RESPONSES))
    assert [(error.line, error.param) for error in batch.errors.data] == [(1, f"body.{field}")]


async def test_two_lines_that_ask_the_same_are_both_answered_and_one_is_computed(house):
    some = {"temperature": 0, "messages": [{"role": "user", "content": "Say something unheard of."}]}
    async with house.client() as client:
        batch = await over(client, await begun(client, [line("a", **some), line("b", **some)]))
        one, other = await outputs(client, batch.output_file_id)
    rows = {row.request_id: row for row in await house.ledger_rows(status=200)}
    first, second = (each["response"] for each in (one, other))
    assert first["body"]["choices"] == second["body"]["choices"]
    assert sorted(rows[each["request_id"]].cache for each in (first, second)) in (["hit", "miss"], ["miss", "shared"])
