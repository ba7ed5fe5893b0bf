"""Stores that cannot be opened: one sentence, which names the setting and no password."""

from __future__ import annotations

import os

import pytest
from sqlalchemy.exc import DBAPIError

from gateway import store
from policies import settings

URL = r"store\.url \(PENSTOCK_STORE__URL\)"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data_dir": "{tmp}/file"}, r"store\.data_dir \(--data-dir\) .*/file is no directory, but a file"),
        ({"data_dir": "{tmp}/file/data"}, "the data directory .* cannot be written: Not a directory"),
        ({"url": "mysql://user:secret@host/db"}, f"{URL} names mysql, but only postgresql"),
        ({"url": "no url at all"}, f"{URL} is no database URL"),
        ({"url": "postgresql://user:a@b:/secret@127.0.0.1/db"}, f"{URL} is no database URL.* PGPASSWORD"),
        ({"url": "postgresql://user:a@secret@127.0.0.1/db"}, f"{URL} is no database URL.* PGPASSWORD"),
        ({"url": "postgresql://user:secret@127.0.0.1/db?port=54x2"}, f"{URL} is no database URL"),
        (
            {"url": "postgresql://user:secret@127.0.0.1:1/db"},
            rf"the database postgresql\+asyncpg://user:\*\*\*@127.0.0.1:1/db of {URL} cannot be opened: .*111",
        ),
        (
            {"url": "postgresql://127.0.0.1:1/db?user=me&password=secret"},
            rf"the database postgresql\+asyncpg://127.0.0.1:1/db\?password=\*\*\*&user=me of {URL} cannot be opened",
        ),
        ({"url": "postgresql://127.0.0.1:1/db?pool=9"}, f"of {URL} cannot be opened: .* unexpected .* 'pool'"),
    ],
)
async def test_a_store_that_cannot_be_opened_says_why_in_a_sentence(tmp_path, changes, sentence):
    (tmp_path / "file").touch()
    changes = {name: value.replace("{tmp}", str(tmp_path)) for name, value in changes.items()}
    with pytest.raises(store.StoreError, match=sentence) as refused:
        async with store.opened(settings.Store(**{"data_dir": str(tmp_path), **changes})):
            pass
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_a_database_that_is_none_is_refused(tmp_path):
    (tmp_path / "penstock.db").write_bytes(os.urandom(8192))
    with pytest.raises(store.StoreError, match=r"penstock\.db cannot be opened: file is not a database"):
        async with store.opened(settings.Store(data_dir=str(tmp_path))):
            pass


def test_what_a_database_says_is_one_line_and_never_empty():
    assert store.cause_of(DBAPIError("select 1", None, Exception("the disk\n  is full"))) == "the disk is full"
    assert store.cause_of(TimeoutError()) == "TimeoutError"
