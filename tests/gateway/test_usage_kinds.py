"""What finance adds up by OpenAI's kinds of usage: each request in one of them."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from gateway.admin.organization.usage import UNUSED
from tests.builders import write_chain
from tests.gateway.test_usage import DAY_S, MONDAY, a_row, desk, front, reading  # noqa: F401

SPAN = {"start_time": MONDAY, "end_time": MONDAY + DAY_S}


async def test_embeddings_are_counted_as_such_and_with_completions_everything_is_counted_once(front):  # noqa: F811
    vectors = {"num_completion": 0, "model": "encoder"}
    rows = [
        a_row(MONDAY, 101, endpoint="/v1/chat/completions"),
        a_row(MONDAY, 203, endpoint="/v1/rerank", **vectors),
        a_row(MONDAY, 407, endpoint="/v1/embeddings", **vectors),
        a_row(MONDAY, 809, endpoint="/v1/embeddings", **vectors | {"model": "demo"}),
        a_row(MONDAY, 1601, endpoint="/api/embed", key_id="key_2", **vectors),
        a_row(MONDAY, 3203, endpoint="/api/embeddings", tenant_id="ten_2", **vectors),
    ]
    await write_chain(front.gw.store, *rows)
    async with reading(front) as organization:

        async def found(asked: Any, *words: str, **chosen: Any) -> dict[tuple[str, ...], tuple[int, int]]:
            page = await asked(**SPAN, group_by=list(words), **chosen)
            (bucket,) = page.data
            kinds = {type(one).__name__ for one in bucket.results}
            assert kinds <= {f"DataResultOrganizationUsage{asked.__name__.title()}Result"}
            return {
                tuple(getattr(one, word) for word in words): (one.num_model_requests, one.input_tokens)
                for one in bucket.results
            }

        assert await found(organization.completions, "model") == {("demo",): (1, 101), ("encoder",): (1, 203)}
        assert await found(organization.embeddings) == {(): (4, 407 + 809 + 1601 + 3203)}
        assert await found(organization.embeddings, "project_id", "api_key_id", "model") == {
            ("ten_1", "key_1", "demo"): (1, 809),
            ("ten_1", "key_1", "encoder"): (1, 407),
            ("ten_1", "key_2", "encoder"): (1, 1601),
            ("ten_2", "key_1", "encoder"): (1, 3203),
        }
        assert await found(organization.embeddings, models=["demo"]) == {(): (1, 809)}
        assert await found(organization.embeddings, api_key_ids=["key_2"], project_ids=["ten_1"]) == {(): (1, 1601)}
        assert await found(organization.embeddings, "user_id", user_ids=["user_1"]) == {}
        with pytest.raises(openai.BadRequestError) as refused:
            await organization.embeddings(**SPAN, limit=32)
        assert refused.value.param == "limit"


async def test_a_correction_counts_where_what_it_corrects_did(front, desk):  # noqa: F811
    now = int(time.time())
    embedded = a_row(now, 407, 0, endpoint="/v1/embeddings", model="encoder")
    await write_chain(front.gw.store, embedded, a_row(now, 101))
    asked = {"request_id": embedded.request_id, "reason": "a gift", "num_prompt_tokens": -300}
    await desk.made("ledger/corrections", asked)
    since = now - now % 60
    async with reading(front) as organization:
        for kind, num_tokens in ((organization.embeddings, 107), (organization.completions, 101)):
            page = await kind(start_time=since)
            results = [one for bucket in page.data for one in bucket.results]
            assert (sum(one.num_model_requests for one in results), sum(one.input_tokens for one in results)) == (
                1,
                num_tokens,
            )
    lines = (await desk.got(f"usage?since={since}&group_by=endpoint"))["data"]
    assert {line["group"]["endpoint"] for line in lines} == {"/v1/embeddings", "/v1/chat/completions"}


async def test_of_all_other_kinds_that_openai_counts_nothing_is_used(front):  # noqa: F811
    await write_chain(front.gw.store, a_row(MONDAY, 101))
    plain = ("audio_speeches", "audio_transcriptions", "moderations", "decisions")
    asked: dict[str, dict[str, Any]] = {
        **{kind: {"group_by": ["model", "project_id"], "models": ["demo"]} for kind in plain},
        "images": {"group_by": ["size", "source"], "sizes": ["256x256"], "sources": ["image.generation"]},
        "vector_stores": {"group_by": ["project_id"]},
        "code_interpreter_sessions": {"project_ids": ["ten_1"]},
        "file_search_calls": {"group_by": ["vector_store_id"], "vector_store_ids": ["vs_1"]},
        "web_search_calls": {"group_by": ["context_level"], "context_levels": ["low"]},
    }
    assert set(asked) == set(UNUSED)
    async with reading(front) as organization:
        for kind, how in asked.items():
            cursor: dict[str, str] = {}
            days = []
            while not days or cursor:
                page = await getattr(organization, kind)(
                    start_time=MONDAY, end_time=MONDAY + 9 * DAY_S, limit=7, **how, **cursor
                )
                days += [(bucket.start_time, bucket.results) for bucket in page.data]
                cursor = {"page": page.next_page} if page.has_more else {}
            assert days == [(MONDAY + number * DAY_S, []) for number in range(9)]
