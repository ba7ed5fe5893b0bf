"""Whoever has lost every owner's key, and has the store, makes another one."""

from __future__ import annotations

import asyncio
import sys

from policies import settings
from tests.builders import ROOT, when
from tests.gateway.test_cli import ENVIRON


async def admin_key(config: settings.Store, *options: str) -> tuple[int | None, str, str]:
    """Its exit status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "admin-key", "--data-dir", config.data_dir, *options),
        cwd=ROOT,
        env={**ENVIRON, "PENSTOCK_STORE__URL": config.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, errors = await process.communicate()
    return process.returncode, said.decode(), errors.decode()


async def test_a_key_that_is_made_in_the_store_opens_a_gateway_that_runs(start_house, store_settings):
    house = start_house(store=store_settings)
    status, said, _ = await admin_key(store_settings)
    assert status == 0
    async with house.http(said.strip()) as http:
        answer = await when(lambda: http.get("/admin/v1/admin_keys"), lambda answer: answer.status != 401)
        made = [key for key in (await answer.json())["data"] if key["name"] == "recovery"]
        assert [(key["role"], key["expires_at"], key["last_four"]) for key in made] == [("owner", None, said[-5:-1])]
        (line,) = (await (await http.get("/admin/v1/audit_log")).json())["data"]
        assert (line["actor_name"], line["action"]) == ("penstock admin-key", "admin_key.created")
        assert line["object_id"] == made[0]["id"]
        assert said.strip() not in str(line)


async def test_a_store_that_has_no_keys_yet_is_left_to_its_first_start(store_settings):
    status, said, errors = await admin_key(store_settings, "--json")
    assert (status, said) == (2, "")
    assert errors == "penstock: the store is empty: the first start of `penstock serve` makes its keys\n"
