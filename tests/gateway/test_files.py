"""/v1/files by OpenAI's own client: uploads up to the bounds, lists in pages, ranges, and whose they are."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import resource
import time
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp
import brotli
import msgspec
import openai
import pytest

from gateway.bodies import PIECE_BYTES
from gateway.files import Files
from gateway.openai import FileBody
from policies import settings
from tests.builders import until

LINES = b'{"custom_id": "one"}\n'


def names(front: Any) -> set[str]:
    """What is in the directory."""
    return {path.name for path in front.gw.files.directory.rglob("*") if path.is_file()}


async def another_key(front: Any, **scopes: Any) -> str:
    """Of another tenant, or with scopes of the same one."""
    admin = {"authorization": "Bearer sk-of-the-tests-admin"}
    async with front.http.get(f"{front.url}/admin/v1/tenants", headers=admin) as answer:
        tenant_id = (await answer.json())["data"][0]["id"]
    if not scopes:
        async with front.http.post(f"{front.url}/admin/v1/tenants", json={"name": "another"}, headers=admin) as answer:
            tenant_id = (await answer.json())["id"]
    body = {"tenant_id": tenant_id, "name": "k", **scopes}
    async with front.http.post(f"{front.url}/admin/v1/keys", json=body, headers=admin) as answer:
        assert answer.status == 201, await answer.text()
        key: str = (await answer.json())["key"]
        return key


async def test_a_file_is_called_what_its_client_called_it(front):
    for name in ('the "first".jsonl', "two\r\nlines", "back\\slash", "größe; x=y.jsonl"):
        made = await front.client.files.create(file=(name, b"{}"), purpose="user_data")
        assert made.filename == name
        content = await front.client.files.content(made.id)
        assert content.response.headers["content-disposition"].endswith(quote(name, safe=""))


async def test_a_file_is_uploaded_read_in_ranges_and_deleted(front):
    data = b"x" * 3_000_000 + "ünicode".encode()
    made = await front.client.files.create(file=("größe.jsonl", data), purpose="user_data")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(data), "größe.jsonl", "user_data")
    assert (made.status, made.expires_at) == ("processed", None)
    assert made.penstock["sha256"] == hashlib.sha256(data).hexdigest()
    assert await front.client.files.retrieve(made.id) == made
    assert (await front.client.files.content(made.id)).content == data
    url = f"{front.url}/v1/files/{made.id}/content"
    async with front.http.get(url, headers={"range": "bytes=2999999-3000001"}) as answer:
        assert (answer.status, await answer.read()) == (206, "xü".encode())
        assert answer.headers["content-range"] == f"bytes 2999999-3000001/{len(data)}"
        assert answer.headers["x-request-id"].startswith("req_")
    for asked in ("bytes=3000008-", "bytes=5-2", "bytes=0-1,4-5", "lines=1-2"):
        async with front.http.get(url, headers={"range": asked}) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], len(error)) == (416, "range_not_satisfiable", 4)
            assert answer.headers["content-range"] == f"bytes */{len(data)}"
    assert (await front.client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        await front.client.files.retrieve(made.id)
    assert names(front) == set()


async def test_a_form_may_come_packed_and_leaves_nothing_where_it_is_not_whole(front):
    data = os.urandom(300_000) + LINES * 100_000
    part = b'--b\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    form = part % (b"purpose", b"", b"evals") + part % (b"file", b'; filename="f.jsonl"', data) + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    packings = {"gzip": gzip.compress, "x-gzip": gzip.compress, "br": partial(brotli.compress, quality=1)}
    for encoding, pack in packings.items():
        packed = pack(form)
        for sent, status in (
            (packed, 200),
            (packed[:-1], 400),
            (packed + b"x", 400),
            (pack(form + b".\r\n" * 5000), 400),
        ):
            told = {**headers, "content-encoding": encoding}
            async with front.http.post(f"{front.url}/v1/files", data=sent, headers=told) as answer:
                body = await answer.json()
                assert answer.status == status, body
            if status == 200:
                assert (await front.client.files.content(body["id"])).content == data
                await front.client.files.delete(body["id"])
    async with front.http.post(
        f"{front.url}/v1/files", data=form, headers={**headers, "content-encoding": "zstd"}
    ) as answer:
        assert answer.status == 415
    assert names(front) == set()


async def test_files_are_listed_in_pages_by_purpose_and_order(front):
    made = [
        (await front.client.files.create(file=(f"{number}", b"."), purpose=purpose)).id
        for number, purpose in enumerate(("batch", "evals", "batch", "batch"))
    ]
    assert [file.id async for file in front.client.files.list(limit=2)] == made[::-1]
    assert [file.id async for file in front.client.files.list(limit=1, order="asc")] == made
    page = await front.client.files.list(limit=2, purpose="batch", order="asc")
    assert ([file.id for file in page.data], page.has_more) == ([made[0], made[2]], True)
    page = await front.client.files.list(after=made[3], order="asc")
    assert (page.data, page.has_more) == ([], False)
    assert [file.id async for file in front.client.files.list(limit=2) if await front.client.files.delete(file.id)] == (
        made[::-1]
    ), "a page goes on behind one that is gone"
    for query in ("limit=0", "limit=x", "order=up", "after=file-x", f"after={made[0]}0", "after=batch_x"):
        async with front.http.get(f"{front.url}/v1/files?{query}") as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_file_expires_when_its_client_said_and_a_batchs_in_thirty_days(open_front, tmp_path):
    async with open_front() as front:
        soon = await front.client.files.create(
            file=("a", b"a"), purpose="evals", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        later = await front.client.files.create(file=("b", b"b"), purpose="batch")
        assert (soon.expires_at - soon.created_at, later.expires_at - later.created_at) == (3600, 2_592_000)
        front.gw.files.wall = lambda: time.time() + 3601
        with pytest.raises(openai.NotFoundError):
            await front.client.files.content(soon.id)
        assert [file.id async for file in front.client.files.list()] == [later.id]
        await front.gw.files.sweep()
        assert names(front) == {later.id}


async def test_a_file_is_its_tenants_alone(front):
    made = await front.client.files.create(file=("a", b"secret"), purpose="batch")
    stranger = front.client.with_options(api_key=await another_key(front))
    for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            await call(made.id)
    assert (await stranger.files.list()).data == []
    assert (await front.client.files.retrieve(made.id)).id == made.id


async def test_a_key_without_the_scope_has_no_files(front):
    scoped = front.client.with_options(api_key=await another_key(front, scopes={"endpoints": ["chat.completions"]}))
    with pytest.raises(openai.PermissionDeniedError, match="Missing scopes: files"):
        await scoped.files.list()
    able = front.client.with_options(api_key=await another_key(front, scopes={"endpoints": ["files"]}))
    assert (await able.files.list()).data == []


async def test_bounds_on_a_file_and_on_all_of_a_tenants(open_front):
    config = settings.Files(max_file_bytes=1000, max_tenant_bytes=1500)
    async with open_front(files=config) as front:
        with pytest.raises(openai.APIStatusError, match="at most 1000 bytes") as refused:
            await front.client.files.create(file=("a", b"x" * 1001), purpose="batch")
        assert refused.value.status_code == 413
        first = await front.client.files.create(file=("a", b"x" * 1000), purpose="batch")
        with pytest.raises(openai.PermissionDeniedError, match="1500 bytes together"):
            await front.client.files.create(file=("b", b"x" * 501), purpose="batch")
        await front.client.files.create(file=("b", b"x" * 500), purpose="batch")
        await front.client.files.delete(first.id)
        await front.client.files.create(file=("c", b"x" * 1000), purpose="batch")
        assert len(names(front)) == 2


BODIES = [
    ({"purpose": "batch"}, None, "file"),
    ({}, b"x", "purpose"),
    ({"purpose": "batch_output"}, b"x", "purpose"),
    ({"purpose": "nonsense"}, b"x", "purpose"),
    ({"purpose": "batch", "expires_after[anchor]": "created_at"}, b"x", "expires_after.seconds"),
    ({"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, b"x", None),
    ({"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, b"x", None),
    ({"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"}, b"x", None),
    ({"purpose": "batch", "expires_after": "soon"}, b"x", "expires_after"),
    ({"purpose": "x" * 5000}, b"x", "purpose"),
    ({f"field{number}": "x" for number in range(20)}, b"x", None),
]


async def test_what_is_wrong_with_an_upload_is_named_and_leaves_nothing(front):
    for fields, data, param in BODIES:
        form = aiohttp.FormData(default_to_multipart=True)
        for name, value in fields.items():
            form.add_field(name, value)
        if data is not None:
            form.add_field("file", data, filename="a.jsonl")
        async with front.http.post(f"{front.url}/v1/files", data=form) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["type"]) == (400, "invalid_request_error"), fields
            assert param is None or error["param"] == param
        assert names(front) == set(), fields


NO_FORMS = [
    ("application/json", b"{}", 415),
    ("multipart/form-data", b"hello", 400),
    ("multipart/form-data; boundary=x", b"hello", 400),
    ("multipart/form-data; boundary=x", b"--x\r\n\r\nhello\r\n--x--\r\n", 400),
    ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nhel', 400),
    ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y--\r\n", 400),
    ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="\x0c"\r\n\r\nhello', 400),
    ("multipart/form-data; boundary=x", b"--x\r\nA header that is none\r\n\r\nhello\r\n--x--\r\n", 400),
]


async def test_a_body_that_is_no_form_is_refused_and_leaves_nothing(front):
    for content_type, body, status in NO_FORMS:
        headers = {"content-type": content_type}
        async with front.http.post(f"{front.url}/v1/files", data=body, headers=headers) as answer:
            assert answer.status == status, body
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
        assert names(front) == set(), body


FORM = {"content-type": "multipart/form-data; boundary=x"}


async def half_a_form():
    yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2_000_000
    await asyncio.Event().wait()


async def test_a_client_that_says_no_more_leaves_nothing(open_front):
    async with open_front(server=settings.Server(stall_s=0.3)) as front:
        async with front.http.post(f"{front.url}/v1/files", data=half_a_form(), headers=FORM) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (408, "request_timeout")
        await until(lambda: not names(front))


@pytest.mark.parametrize("opened", ['name="file"; filename="a"', 'name="purpose"'])
async def test_a_client_that_says_next_to_nothing_keeps_no_place(open_front, opened):
    async def trickling():
        yield b"--x\r\nContent-Disposition: form-data; " + opened.encode() + b"\r\n\r\n"
        while True:
            yield b"x" * 8  # more than the boundary, without which aiohttp would not look at it
            await asyncio.sleep(0.01)  # the clock of the other end is real

    async with open_front(server=settings.Server(stall_s=0.3)) as front:
        async with front.http.post(f"{front.url}/v1/files", data=trickling(), headers=FORM) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (408, "request_timeout")
        await until(lambda: not names(front))


async def test_a_form_that_keeps_coming_is_waited_for(open_front):
    async def steady():
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(10):
            yield b"x" * PIECE_BYTES
            await asyncio.sleep(0.1)  # the clock of the other end is real
        yield b"\r\n--x--\r\n"

    async with (
        open_front(server=settings.Server(stall_s=0.5)) as front,
        front.http.post(f"{front.url}/v1/files", data=steady(), headers=FORM) as answer,
    ):
        assert (answer.status, (await answer.json())["bytes"]) == (200, 10 * PIECE_BYTES)


async def test_a_client_that_hangs_up_leaves_nothing(front):
    hanging = asyncio.create_task(
        front.http.post(f"{front.url}/v1/files", data=half_a_form(), headers=FORM).__aenter__()
    )
    await until(lambda: names(front))
    hanging.cancel()
    await until(lambda: not names(front))


async def test_a_full_disk_is_said_so_and_the_next_upload_is_taken(front):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))  # no file grows beyond it
    try:
        with pytest.raises(openai.InternalServerError, match="no room for the file") as full:
            await front.client.files.create(file=("a", b"x" * 600_000), purpose="batch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (full.value.status_code, full.value.code) == (507, "insufficient_storage")
    assert names(front) == set()
    await front.client.files.create(file=("a", b"x" * 600_000), purpose="batch")


async def test_what_was_never_finished_is_swept_up_after_a_day(front):
    files: Files = front.gw.files
    left = files.directory / "arriving" / "arriving_1"
    left.write_bytes(b"x")
    await files.sweep()
    assert left.exists()
    files.wall = lambda: time.time() + 86_500
    await files.sweep()
    assert not left.exists()


async def test_a_file_without_a_row_is_swept_up_after_a_day_at_the_next_start(open_front):
    async with open_front() as front:
        kept = await front.client.files.create(file=("a", LINES), purpose="user_data")
        directory, long_ago = front.gw.files.directory, time.time() - 90_000
        for name, is_old in ((kept.id, True), ("file-old", True), ("file-new", False), ("batch_1.journal", True)):
            (directory / name).touch()
            if is_old:
                os.utime(directory / name, (long_ago, long_ago))
    async with open_front() as front:
        await until(lambda: not (directory / "file-old").exists())
        assert names(front) == {kept.id, "file-new", "batch_1.journal"}
        assert (await front.client.files.content(kept.id)).content == LINES


def test_the_shape_of_a_file_is_the_official_one():
    ours = {field.name for field in msgspec.structs.fields(FileBody)}
    assert ours - set(openai.types.FileObject.model_fields) == {"penstock"}
    assert set(openai.types.FileObject.model_fields) <= ours
