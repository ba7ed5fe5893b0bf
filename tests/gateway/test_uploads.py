"""/v1/uploads by OpenAI's own client: files in parts, what is wrong with them, and what is left of those that end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from typing import Any

import msgspec
import openai
import pytest

from gateway.openai import UploadBody, UploadPartBody
from policies import settings
from tests.builders import until
from tests.gateway.conftest import Front
from tests.gateway.test_files import FORM, another_key, names

DATA = bytes(range(256)) * 40


async def begun(client: openai.AsyncOpenAI, num_bytes: int = len(DATA), **others: Any) -> Any:
    asked: dict[str, Any] = {"filename": "größe.jsonl", "purpose": "user_data", "mime_type": "text/jsonl", **others}
    return await client.uploads.create(bytes=num_bytes, **asked)


async def added(client: openai.AsyncOpenAI, upload: Any, *pieces: bytes) -> list[str]:
    """Ids, in the order of the pieces; all of them are sent at once."""
    parts = await asyncio.gather(*(client.uploads.parts.create(upload.id, data=piece) for piece in pieces))
    assert {(part.object, part.upload_id) for part in parts} == {("upload.part", upload.id)}
    return [part.id for part in parts]


async def test_parts_come_at_once_and_make_a_file_in_the_order_that_is_said(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        upload = await begun(front.client, expires_after={"anchor": "created_at", "seconds": 7200})
        assert (upload.object, upload.status, upload.bytes, upload.file) == ("upload", "pending", len(DATA), None)
        assert upload.expires_at == upload.created_at + 3600
        last, first, middle = await added(front.client, upload, DATA[9000:], DATA[:100], DATA[100:9000])
        await added(front.client, upload, b"not of the file")
        md5 = hashlib.md5(DATA).hexdigest().upper()
        done = await front.client.uploads.complete(upload.id, part_ids=[first, middle, last], md5=md5)
        assert (done.id, done.status, done.filename) == (upload.id, "completed", "größe.jsonl")
        assert (done.file.bytes, done.file.filename, done.file.purpose) == (len(DATA), "größe.jsonl", "user_data")
        assert done.file.expires_at == done.file.created_at + 7200
        assert done.file.penstock["sha256"] == hashlib.sha256(DATA).hexdigest()
        assert await front.client.files.retrieve(done.file.id) == done.file
        assert (await front.client.files.content(done.file.id)).content == DATA
        assert names(front) == {done.file.id}


async def test_the_clients_own_loop_makes_a_file_for_a_batch(front):
    upload = await front.client.uploads.upload_file_chunked(
        file=DATA, filename="in.jsonl", bytes=len(DATA), mime_type="text/jsonl", purpose="batch", part_size=4000
    )
    assert (upload.status, upload.file.purpose, upload.file.bytes) == ("completed", "batch", len(DATA))
    assert upload.file.expires_at == upload.file.created_at + 2_592_000
    batch = await front.client.batches.create(
        input_file_id=upload.file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert (batch.status, batch.input_file_id) == ("validating", upload.file.id)


async def test_what_the_parts_are_not_is_said_and_they_may_still_be_completed(front):
    upload, other = await begun(front.client, 6), await begun(front.client, 3)
    (first, second), (stranger,) = (
        await added(front.client, upload, b"abc", b"def"),
        await added(front.client, other, b"x"),
    )
    wrong: list[tuple[list[str], str | None, str, str]] = [
        ([first], None, "part_ids", "bytes_mismatch"),
        ([], None, "part_ids", "bytes_mismatch"),
        ([first, first], None, "part_ids[1]", "invalid_part"),
        ([first, stranger], None, "part_ids[1]", "invalid_part"),
        ([first, "../" + first], None, "part_ids[1]", "invalid_part"),
        ([second, first], hashlib.md5(b"abcdef").hexdigest(), "md5", "md5_mismatch"),
    ]
    for part_ids, md5, param, code in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await front.client.uploads.complete(upload.id, part_ids=part_ids, md5=md5 or openai.omit)
        assert (refused.value.param, refused.value.code) == (param, code)
    twice = b'--x\r\nContent-Disposition: form-data; name="data"\r\n\r\n.\r\n' * 2 + b"--x--\r\n"
    for body, content_type, status, param in (
        (b"--x--\r\n", FORM["content-type"], 400, "data"),
        (twice, FORM["content-type"], 400, "data"),
        (b"{}", "application/json", 415, None),
    ):
        url, headers = f"{front.url}/v1/uploads/{upload.id}/parts", {"content-type": content_type}
        async with front.http.post(url, data=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (status, param)
    assert names(front) == {first, second, stranger}
    done = await front.client.uploads.complete(upload.id, part_ids=[second, first])
    assert (await front.client.files.content(done.file.id)).content == b"defabc"


async def ends_as(front: Front, upload: Any, part_ids: list[str], status: str) -> None:
    """It takes no more, and is told so in the same words whatever else is asked of it."""
    uploads = front.client.uploads
    for asked in (
        uploads.parts.create(upload.id, data=b"x"),
        uploads.complete(upload.id, part_ids=part_ids),
        uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.BadRequestError, match=f"is {status} already") as refused:
            await asked
        assert refused.value.code == f"upload_{status}"


async def test_what_is_over_takes_no_more_and_leaves_nothing(front):
    completed, cancelled, expired = [await begun(front.client, 3) for _ in range(3)]
    (of_completed,) = await added(front.client, completed, b"abc")
    (of_cancelled,) = await added(front.client, cancelled, b"abc")
    (of_expired,) = await added(front.client, expired, b"abc")
    file = (await front.client.uploads.complete(completed.id, part_ids=[of_completed])).file
    assert (await front.client.uploads.cancel(cancelled.id)).status == "cancelled"
    assert names(front) == {file.id, of_expired}
    await ends_as(front, completed, [], "completed")
    await ends_as(front, cancelled, [of_cancelled], "cancelled")
    front.gw.files.wall = lambda: time.time() + 3601
    await ends_as(front, expired, [of_expired], "expired")
    await front.gw.uploads.sweep()
    assert names(front) == {file.id}
    front.gw.files.wall = lambda: time.time() + 3601 + 86_400
    await front.gw.uploads.sweep()
    with pytest.raises(openai.NotFoundError, match="No such Upload object"):
        await front.client.uploads.cancel(completed.id)
    assert (await front.client.files.content(file.id)).content == b"abc"


async def test_of_those_that_end_it_at_once_one_way_wins(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        upload = await begun(front.client, 3)
        part_ids = await added(front.client, upload, b"abc")
        uploads = front.client.uploads
        ends = await asyncio.gather(
            *(uploads.complete(upload.id, part_ids=part_ids) for _ in range(3)),
            uploads.cancel(upload.id),
            return_exceptions=True,
        )
        winners = [end for end in ends if not isinstance(end, Exception)]
        if winners[0].status == "cancelled":
            assert len(winners) == 1
            assert names(front) == set()
        else:  # as if one client had asked again and again
            assert [winner.id for winner in winners] == [upload.id] * 3
            (file_id,) = {winner.file.id for winner in winners}
            assert names(front) == {file_id}
        assert [type(end) for end in ends if end not in winners] == [openai.BadRequestError] * (4 - len(winners))


async def test_a_completion_said_again_is_answered_again_and_another_one_is_not(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        upload = await begun(front.client, 3)
        first, second, unused = await added(front.client, upload, b"ab", b"c", b"not of the file")
        uploads, md5 = front.client.uploads, hashlib.md5(b"abc").hexdigest()
        done = await uploads.complete(upload.id, part_ids=[first, second], md5=md5)
        assert done == await uploads.complete(upload.id, part_ids=[first, second], md5=md5.upper())
        for part_ids, others in (([second, first], {"md5": md5}), ([first, second], {}), ([unused], {"md5": md5})):
            with pytest.raises(openai.BadRequestError) as refused:
                await uploads.complete(upload.id, part_ids=part_ids, **others)
            assert refused.value.code == "upload_completed"
        stranger = front.client.with_options(api_key=await another_key(front)).uploads
        with pytest.raises(openai.NotFoundError):
            await stranger.complete(upload.id, part_ids=[first, second], md5=md5)
        assert names(front) == {done.file.id}
    async with open_front(store=store_settings) as front:
        uploads = front.client.uploads
        assert done == await uploads.complete(upload.id, part_ids=[first, second], md5=md5)
        await front.client.files.delete(done.file.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await uploads.complete(upload.id, part_ids=[first, second], md5=md5)
        assert refused.value.code == "upload_completed"


async def test_a_part_whose_upload_ends_while_it_comes_is_refused_and_leaves_nothing(front):
    upload, goes_on = await begun(front.client), asyncio.Event()

    async def form():
        yield b'--x\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\n' + b"x" * 2_000_000
        await goes_on.wait()
        yield b"x\r\n--x--\r\n"

    async def sent() -> tuple[int, Any]:
        async with front.http.post(f"{front.url}/v1/uploads/{upload.id}/parts", data=form(), headers=FORM) as answer:
            return answer.status, (await answer.json())["error"]["code"]

    part = asyncio.create_task(sent())
    await until(lambda: names(front))
    await front.client.uploads.cancel(upload.id)
    goes_on.set()
    assert await part == (400, "upload_cancelled")
    await until(lambda: not names(front))


async def test_an_upload_is_its_tenants_alone(front):
    upload = await begun(front.client, 3)
    part_ids = await added(front.client, upload, b"abc")
    uploads = front.client.with_options(api_key=await another_key(front)).uploads
    for asked in (
        uploads.parts.create(upload.id, data=b"x"),
        uploads.complete(upload.id, part_ids=part_ids),
        uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.NotFoundError, match="No such Upload object"):
            await asked
    assert names(front) == set(part_ids)
    scoped = front.client.with_options(api_key=await another_key(front, scopes={"endpoints": ["chat.completions"]}))
    with pytest.raises(openai.PermissionDeniedError, match="Missing scopes: files"):
        await begun(scoped)


async def test_bounds_on_uploads_on_their_parts_and_on_all_of_a_tenants(open_front, monkeypatch):
    monkeypatch.setattr("gateway.files.MAX_PART_BYTES", 1000)
    monkeypatch.setattr("gateway.openai.MAX_PARTS", 3)
    config = settings.Files(max_file_bytes=2000, max_tenant_bytes=2500, max_open_uploads=2)
    async with open_front(files=config) as front:
        uploads = front.client.uploads
        with pytest.raises(openai.APIStatusError, match="at most 2000 bytes") as refused:
            await begun(front.client, 2001)
        assert refused.value.status_code == 413
        kept, other = await begun(front.client, 2000), await begun(front.client, 2000)
        with pytest.raises(openai.RateLimitError, match="2 uploads that are pending") as refused:
            await begun(front.client, 1)
        assert refused.value.code == "upload_limit_exceeded"
        with pytest.raises(openai.APIStatusError, match="part is too large: this server takes at most 1000 bytes"):
            await uploads.parts.create(kept.id, data=b"x" * 1001)
        part_ids = await added(front.client, kept, b"x" * 1000, b"y" * 1000)
        with pytest.raises(openai.PermissionDeniedError, match="2500 bytes together"):
            await uploads.parts.create(other.id, data=b"x" * 501)
        with pytest.raises(openai.PermissionDeniedError, match="2500 bytes together"):
            await front.client.files.create(file=("a", b"x" * 501), purpose="batch")
        await uploads.cancel(other.id)
        await added(front.client, kept, b"z")
        with pytest.raises(openai.BadRequestError, match="at most 3 parts"):
            await uploads.parts.create(kept.id, data=b"x")
        await uploads.complete(kept.id, part_ids=part_ids)
        with pytest.raises(openai.PermissionDeniedError, match="2500 bytes together"):
            await begun(front.client, 501)
        assert len(names(front)) == 1
        empty = await uploads.complete((await begun(front.client, 0)).id, part_ids=[])
        assert (empty.file.bytes, (await front.client.files.content(empty.file.id)).content) == (0, b"")


async def test_a_restart_goes_on_with_what_is_pending_and_sweeps_up_what_was_never_a_part(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        upload = await begun(front.client, 6)
        (first,) = await added(front.client, upload, b"abc")
        place, long_ago = front.gw.files.parts, time.time() - 3700
        for name in ("part_without_a_row", "arriving_1"):
            (place / name).write_bytes(b"x")
            os.utime(place / name, (long_ago, long_ago))
    async with open_front(store=store_settings) as front:
        await until(lambda: names(front) == {first})
        (second,) = await added(front.client, upload, b"def")
        done = await front.client.uploads.complete(upload.id, part_ids=[first, second])
        assert (await front.client.files.content(done.file.id)).content == b"abcdef"


def test_the_shapes_are_the_official_ones():
    for ours, theirs in ((UploadBody, openai.types.Upload), (UploadPartBody, openai.types.uploads.UploadPart)):
        assert {field.name for field in msgspec.structs.fields(ours)} == set(theirs.model_fields)
