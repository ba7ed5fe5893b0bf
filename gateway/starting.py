"""``penstock serve``, ``penstock migrate`` and ``penstock worker``: what begins with the settings and the store."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from gateway import open_files
from gateway.importing import importing
from gateway.settings_file import BAD_START, config_option, data_dir_option, fail, load
from policies import settings
from policies.gguf import SUFFIX, part_name

quantize_option = click.option(
    "--quantize",
    type=click.Choice(get_args(settings.Quantization)),
    help="What the matrices of a plain model become when it is loaded [engine.quantize].",
)


@click.command(short_help="Start the gateway and its workers.")
@config_option
@click.option(
    "--model", help='Serve this one: a directory, a GGUF file, a hub id, or "demo" [what the settings say; else demo].'
)
@click.option("--host", help="Address to listen on [server.host].")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on, 0 for any [server.port].")
@quantize_option
@data_dir_option
def serve(
    config: Path | None,
    model: str | None,
    host: str | None,
    port: int | None,
    quantize: str | None,
    data_dir: str | None,
) -> None:
    """Start the gateway and its workers; a line on standard output says when the first model can answer."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # until ``doors.Stop`` hears them
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda signum, frame: os._exit(0))  # nothing has begun yet
    chosen: dict[str, Any] = {
        "server.host": host,
        "server.port": port,
        "store.data_dir": data_dir,
        "engine.quantize": quantize,
    }
    if model is not None:
        chosen["models"] = {served_name(model): {"source": model}}
    loaded = load(config, {name: value for name, value in chosen.items() if value is not None})
    # Imported here: a bad config.toml should not wait for it.
    import uvloop

    from gateway import telemetry
    from gateway.backlog import Backlog

    telemetry.log_to_stderr(loaded.log)
    open_files.take()
    shown = Backlog(sys.stdout, lambda num_lost: "")

    async def until_the_end() -> None:
        status: Any = 0
        try:
            await serving(loaded, lambda line: shown.write(f"{line}\n"))
        except SystemExit as ended:
            status = ended.code
        finally:
            shown.drain(telemetry.LAST_S)
        from gateway.ending import leave

        leave(status)

    uvloop.run(until_the_end())


async def serving(loaded: settings.Settings, announce: Callable[[str], None]) -> None:
    """Until a signal ends it. ``announce``: as for ``app.serve``. What is imported here takes as long as what a worker
    imports, and both are done at once."""
    import asyncio

    from gateway.doors import Stop
    from gateway.launcher import Launcher

    stop, launcher = Stop(), Launcher()
    async with launcher.ahead(list(loaded.models.values())):
        with importing():
            from gateway import app, processes, telemetry
            from gateway.dispatch import NothingToServe

        for _ in range(2):  # what was asked while modules were loaded is noticed, and then heard
            await asyncio.sleep(0)
        if stop.asked.is_set():
            return
        serve_all = processes.serve if loaded.server.processes > 1 else app.serve
        try:
            await serve_all(loaded, os.environ, announce, launcher, stop=stop)
        except app.BAD_STARTS as error:
            telemetry.say(f"penstock: {error}")
            sys.exit(BAD_START)
        except NothingToServe:
            sys.exit(BAD_START)


@click.command(short_help="Bring the store to this version's schema.")
@config_option
@data_dir_option
def migrate(config: Path | None, data_dir: str | None) -> None:
    """Bring the store to this version's schema, as `penstock serve` does when it starts."""
    loaded = load(config, {} if data_dir is None else {"store.data_dir": data_dir})
    import asyncio

    from gateway import store

    async def applied() -> list[str]:
        async with store.opened(loaded.store) as rooms:
            return rooms.applied

    try:
        revisions = asyncio.run(applied())
    except store.StoreError as error:
        fail(str(error))
    click.echo(f"Applied {', '.join(revisions)}." if revisions else "Nothing to do: the store is up to date.")


@click.command(short_help="Start one worker by itself.")
@config_option
@click.option("--model", required=True, help='What it computes: a directory, a GGUF file, a hub id, or "demo".')
@click.option("--name", help="As clients name the model [the last part of --model].")
@click.option("--listen", required=True, help='Where gateways find it: "unix:/path" or "tcp:host:port".')
@quantize_option
@click.option(
    "--device",
    "devices",
    type=click.IntRange(0),
    multiple=True,
    help="Index of the CUDA device, once for each of its ranks [engine.devices].",
)
def worker(
    config: Path | None, model: str, name: str | None, listen: str, quantize: str | None, devices: tuple[int, ...]
) -> None:
    """Start one worker by itself, for a gateway that names it under models.NAME.addresses."""
    name = name or served_name(model)
    loaded = load(config, {} if quantize is None else {"engine.quantize": quantize})
    engine = loaded.models[name].engine if name in loaded.models else loaded.engine
    if devices:
        engine = msgspec.structs.replace(engine, devices=devices)
    told = settings.WorkerSettings(
        name=f"{name}@{listen}", model=name, source=model, listen=listen, engine=engine, log=loaded.log
    )
    from gateway.launcher import COMMAND, environment

    os.execve(COMMAND[0], [*COMMAND, msgspec.json.encode(told).decode()], environment())


def served_name(model: str) -> str:
    """The last part of a directory or a hub id; of a GGUF file, or the first part of one, without its ending."""
    if model == "demo":
        return model
    name = Path(model).expanduser().resolve().name
    return name.removesuffix(SUFFIX) if (part := part_name(name)) is None else part.model
