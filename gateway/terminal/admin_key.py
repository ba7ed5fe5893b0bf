"""`penstock admin-key`: the way back in, for whoever has the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gateway.settings_file import config_option, data_dir_option
from gateway.terminal.ledger import run, store_of
from gateway.terminal.options import json_option
from policies import settings

if TYPE_CHECKING:
    from gateway.admin.admin_keys import MadeAdminKey


@click.command(name="admin-key", short_help="Make an owner's key, where none is at hand.")
@config_option
@data_dir_option
@json_option
def admin_key(config: Path | None, data_dir: str | None, as_json: bool) -> None:
    """Make an owner's key of the administration in the store itself, where all that there were are lost.

    It may run beside a gateway, which goes by the key a second later, and is in the audit log.
    """
    made = run(_made(store_of(config, data_dir)))
    click.echo(msgspec.json.encode(made) if as_json else made.key)


async def _made(config: settings.Store) -> MadeAdminKey:
    from gateway import store
    from gateway.recovery import owner_key

    async with store.beside(config) as rooms:
        return await owner_key(rooms)
