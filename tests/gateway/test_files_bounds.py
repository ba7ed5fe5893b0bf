"""What a tenant's files take on the disk: never more than is allowed, nor what nobody can read, however many come at
once and whenever their clients go away."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import openai
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.errors import QuotaExceeded
from gateway.files import Files, Staged
from gateway.files.uploads import Uploads
from gateway.openai import UploadCompletion
from policies import settings
from tests.builders import until
from tests.gateway.conftest import Front
from tests.gateway.test_files import FORM, another_key, names
from tests.gateway.test_uploads import added, begun

FILE = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n.'
)
END = b"\r\n--x--\r\n"


async def tenant_of(front: Front) -> str:
    async with front.gw.uploads._rooms.engine.connect() as connection:
        return str((await connection.execute(sa.select(store.tenants.c.id))).scalar_one())


async def test_files_that_began_to_come_when_there_was_room_have_no_more_than_there_is(open_front, store_settings):
    bounds = settings.Files(max_tenant_bytes=5000)
    async with open_front(store=store_settings, files=bounds) as front:
        goes_on = [asyncio.Event() for _ in range(4)]

        async def form(number: int):
            yield FILE
            await goes_on[number].wait()
            yield b"." * 2400 + END

        async def sent(number: int) -> int:
            async with front.http.post(f"{front.url}/v1/files", data=form(number), headers=FORM) as answer:
                return answer.status

        tasks = [asyncio.create_task(sent(number)) for number in range(4)]
        await until(lambda: front.gw.files.arriving.places.num_taken == 4)
        statuses = []
        for event, task in zip(goes_on, tasks, strict=True):
            event.set()
            statuses.append(await task)
        assert statuses == [200, 200, 403, 403]
        assert len(names(front)) == 2


async def test_files_and_parts_that_are_noted_at_once_have_no_more_than_there_is(open_front, store_settings):
    bounds = settings.Files(max_tenant_bytes=5000)
    async with open_front(store=store_settings, files=bounds) as front:
        tenant_id, upload = await tenant_of(front), await begun(front.client, 2000)

        async def noted(number: int) -> bool:
            place = front.gw.files.parts if number % 2 else None
            async with front.gw.files.staged(tenant_id, place) as staged:
                await staged.write(b"." * 1000)
                try:
                    if number % 2:
                        await front.gw.uploads.add(tenant_id, upload.id, staged)
                    else:
                        await front.gw.files.keep(staged, tenant_id, "a", "user_data")
                except QuotaExceeded:
                    return False
            return True

        assert sum(await asyncio.gather(*map(noted, range(12)))) == 5
        assert len(names(front)) == 5


async def test_a_tenant_has_so_many_files_however_small_they_are(open_front, store_settings):
    async with open_front(store=store_settings, files=settings.Files(max_tenant_files=2)) as front:

        async def sent() -> tuple[int, Any]:
            async with front.http.post(f"{front.url}/v1/files", data=FILE[:-1] + END, headers=FORM) as answer:
                return answer.status, await answer.json()

        (_, first), (_, second) = await sent(), await sent()
        assert (first["bytes"], second["bytes"]) == (0, 0)
        status, refused = await sent()
        assert (status, refused["error"]["code"]) == (403, "storage_quota_exceeded")
        with pytest.raises(openai.PermissionDeniedError, match="has 2 files"):
            await front.client.uploads.create(purpose="batch", bytes=3, filename="a", mime_type="text/plain")
        await front.client.files.delete(first["id"])
        assert (await sent())[0] == 200
        assert len(names(front)) == 2


async def test_no_more_uploads_are_begun_at_once_than_may_be_pending(open_front, store_settings):
    async with open_front(store=store_settings, files=settings.Files(max_open_uploads=3)) as front:
        begun_at_once = await asyncio.gather(*(begun(front.client) for _ in range(12)), return_exceptions=True)
        assert [type(each) for each in begun_at_once].count(openai.RateLimitError) == 9


async def test_no_tenant_has_all_the_places_of_files_that_are_coming(open_front, store_settings):
    bounds = settings.Files(max_arriving=3, max_arriving_per_tenant=2)
    async with open_front(store=store_settings, files=bounds) as front:
        another = {**FORM, "authorization": f"Bearer {await another_key(front)}"}
        upload, go_on = await begun(front.client, 1), asyncio.Event()

        async def form():
            yield FILE
            await go_on.wait()
            yield END

        async def sent(headers: dict[str, str], path: str = "files") -> tuple[int, str, str | None]:
            async with front.http.post(f"{front.url}/v1/{path}", data=form(), headers=headers) as answer:
                error = (await answer.json()).get("error") or {}
                return answer.status, error.get("code", ""), answer.headers.get("retry-after")

        first = [asyncio.create_task(sent(FORM)) for _ in range(2)]
        await until(lambda: front.gw.files.arriving.places.num_taken == 2)
        for path in ("files", f"uploads/{upload.id}/parts"):
            assert await sent(FORM, path) == (429, "rate_limit_exceeded", "1")
        other = asyncio.create_task(sent(another))
        await until(lambda: front.gw.files.arriving.places.num_taken == 3)
        assert await sent(another) == (503, "server_is_overloaded", "1")
        go_on.set()
        assert [status for status, _, _ in await asyncio.gather(*first, other)] == [200] * 3
        assert await sent(FORM) == (200, "", None)
        assert not front.gw.files.arriving.places.num_taken


async def test_parts_that_hold_nothing_are_refused_and_so_are_too_many_of_a_tenants(open_front, store_settings):
    async with open_front(store=store_settings, files=settings.Files(max_open_parts=3)) as front:
        uploads = front.client.uploads
        first, second = await begun(front.client, 2), await begun(front.client, 2)
        with pytest.raises(openai.BadRequestError) as refused:
            await uploads.parts.create(first.id, data=b"")
        assert (refused.value.param, refused.value.code) == ("data", "empty_part")
        part_ids = [*await added(front.client, first, b"a"), *await added(front.client, first, b"b")]
        more = await asyncio.gather(*(added(front.client, second, b"c") for _ in range(6)), return_exceptions=True)
        refusals = [each for each in more if isinstance(each, openai.RateLimitError)]
        assert (len(refusals), {each.code for each in refusals}) == (5, {"part_limit_exceeded"})
        assert refusals[0].response.headers["x-should-retry"] == "false"
        assert len(names(front)) == 3
        stranger = front.client.with_options(api_key=await another_key(front))
        await added(stranger, await begun(stranger, 1), b"x")
        # Those of an upload that is over count no more.
        await uploads.complete(first.id, part_ids=part_ids)
        await added(front.client, second, b"d")


async def test_an_upload_that_is_completed_many_times_at_once_is_copied_once_at_a_time(front, monkeypatch):
    upload = await begun(front.client, 3)
    part_ids = await added(front.client, upload, b"abc")
    copying: list[int] = []

    async def append(staged, path, also, real=Staged.append):
        copying.append(len(list(front.gw.files._staging.iterdir())))
        await real(staged, path, also)

    monkeypatch.setattr(Staged, "append", append)
    ends = [front.client.uploads.complete(upload.id, part_ids=part_ids) for _ in range(8)]
    assert len({end.file.id for end in await asyncio.gather(*ends)}) == 1
    assert copying == [1]


@pytest.mark.parametrize("moment", ["when it was noted", "at some time"])
async def test_whatever_is_listed_can_be_read_whenever_its_client_went_away(
    moment, open_front, store_settings, monkeypatch
):
    """Among them the moment of the commit, after which nobody knows whether it was done."""
    async with open_front(store=store_settings) as front:
        tenant_id, tasks = await tenant_of(front), []

        async def note(files, connection, file, real=Files.note):
            await real(files, connection, file)
            if moment == "when it was noted":
                asyncio.get_running_loop().call_soon(tasks[-1].cancel)

        async def kept() -> None:
            async with front.gw.files.staged(tenant_id) as staged:
                await staged.write(b"abc")
                await front.gw.files.keep(staged, tenant_id, "a", "user_data")

        monkeypatch.setattr(Files, "note", note)
        for number in range(8):
            upload = await begun(front.client, 3)
            asked = UploadCompletion(part_ids=await added(front.client, upload, b"abc"))
            for work in (kept(), front.gw.uploads.complete(tenant_id, upload.id, asked)):
                tasks.append(asyncio.create_task(work))
                if moment == "at some time":
                    await asyncio.sleep(1e-3 * number)
                    tasks[-1].cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await tasks[-1]
        listed = [file.id async for file in front.client.files.list()]
        assert len(listed) >= (16 if moment == "when it was noted" else 0)
        for file_id in listed:
            assert (await front.client.files.content(file_id)).content == b"abc"
        if moment == "when it was noted":
            assert list(front.gw.files.parts.iterdir()) == []


async def test_whoever_goes_away_while_an_upload_is_cancelled_leaves_nothing_of_its_parts(front, monkeypatch):
    tenant_id, tasks = await tenant_of(front), []

    async def end(uploads, *asked, real=Uploads._end, **became):
        ended = await real(uploads, *asked, **became)
        asyncio.get_running_loop().call_soon(tasks[-1].cancel)
        return ended

    monkeypatch.setattr(Uploads, "_end", end)
    for _ in range(5):
        upload = await begun(front.client, 3)
        await added(front.client, upload, b"a", b"b")
        tasks.append(asyncio.create_task(front.gw.uploads.cancel(tenant_id, upload.id)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[-1]
    assert list(front.gw.files.parts.iterdir()) == []


async def test_a_form_has_a_field_so_many_times_at_most(front):
    upload = await begun(front.client, 3)
    field = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n'
    body = field * 17 + b'--x\r\nContent-Disposition: form-data; name="data"\r\n\r\nabc' + END
    async with front.http.post(f"{front.url}/v1/uploads/{upload.id}/parts", data=body, headers=FORM) as answer:
        assert (answer.status, "16 fields" in await answer.text()) == (400, True)


async def test_while_nothing_can_be_written_it_is_said_so_and_the_next_file_is_taken(front):
    arriving = front.gw.files.directory / "arriving"
    upload = await begun(front.client, 5)
    for place in (arriving, front.gw.files.parts):
        place.rename(f"{place}.away")
        place.touch()
    for sent in (
        front.client.files.create(file=("a", b"x"), purpose="batch"),
        front.client.uploads.parts.create(upload.id, data=b"piece"),
    ):
        with pytest.raises(openai.InternalServerError, match="cannot write files at the moment") as refused:
            await sent
        assert (refused.value.status_code, refused.value.code) == (503, "files_unavailable")
    for place in (arriving, front.gw.files.parts):
        place.unlink()
        place.with_name(f"{place.name}.away").rename(place)
    await front.client.files.create(file=("a", b"x"), purpose="batch")
    await added(front.client, upload, b"piece")


async def test_what_is_deleted_is_gone_for_its_tenant_also_where_its_bytes_cannot_be_deleted_yet(front, caplog):
    file = await front.client.files.create(file=("a", b"x"), purpose="user_data")
    upload = await begun(front.client, 5)
    (part_id,) = await added(front.client, upload, b"piece")
    for path in (front.gw.files.path(file.id), front.gw.files.parts / part_id):
        path.unlink()
        path.mkdir()  # which is deleted in another way
    assert (await front.client.files.delete(file.id)).deleted
    assert (await front.client.uploads.cancel(upload.id)).status == "cancelled"
    assert caplog.text.count("is nobody's, and cannot be deleted") == 2
    with pytest.raises(openai.NotFoundError):
        await front.client.files.retrieve(file.id)
