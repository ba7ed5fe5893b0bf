"""`penstock doctor`: what the gateway finds on this machine, and what the engine says of it.

The engine's part comes from a process of its own, so that nothing of torch is loaded here.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway import open_files
from gateway.launcher import COMMAND, environment
from gateway.settings_file import config_option, data_dir_option, load
from policies.settings import Settings

if TYPE_CHECKING:
    import sqlalchemy as sa

PACKAGES = ("penstock", "aiohttp", "uvloop", "msgspec", "sqlalchemy", "aiosqlite", "asyncpg", "alembic", "tokenizers")
FEW_FILES = 4096
"""Open files: a connection takes one, and an idle client keeps its connection."""
SLOW_SYNC_MS = 5.0
ENGINE_S = 480.0
"""It compiles the kernels and tries them, as the first start would, and may take three minutes for either."""
DATABASE_S = 20.0
REDIS_MS = 5000.0

Finding = dict[str, str]
"""``severity`` ("fatal", "slow" or "note") and ``text``, as ``worker.doctor`` gives them."""


@click.command()
@config_option
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Facts and findings as one JSON object.")
def doctor(config: Path | None, data_dir: str | None, as_json: bool) -> None:
    """What is installed, which device, what would be slow and why. Exit status 1 if something must be mended first."""
    loaded = load(config, {} if data_dir is None else {"store.data_dir": data_dir})
    gateway, findings = examine(loaded)
    if not as_json:
        _tell("Gateway", gateway)  # the engine may have to be compiled first
    engine = _engine()
    findings += engine["findings"]
    if as_json:
        report = {"gateway": gateway, "engine": engine["facts"], "findings": findings}
        click.echo(json.dumps(report, indent=2))
    else:
        _tell("Engine", engine["facts"])
        for finding in findings:
            colour = {"fatal": "red", "slow": "yellow"}.get(finding["severity"])
            click.secho(f"{finding['severity']:>5}: {finding['text']}", fg=colour)
        if not findings:
            click.secho("Nothing stands in the way.", fg="green")
    sys.exit(1 if any(finding["severity"] == "fatal" for finding in findings) else 0)


def examine(config: Settings) -> tuple[dict[str, Any], list[Finding]]:
    """The gateway's own facts, and what follows from them. Changes nothing that it looks at."""
    facts: dict[str, Any] = {"python": platform.python_version(), "packages": _versions()}
    findings: list[Finding] = []
    _loop(facts, findings)
    _files(facts, findings)
    _port(config, facts, findings)
    _certificate(config, findings)
    _data_dir(Path(config.store.data_dir), facts, findings)
    asyncio.run(_database(config, facts, findings))
    if config.redis.url:
        asyncio.run(_redis(config, facts, findings))
    return facts, findings


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _loop(facts: dict[str, Any], findings: list[Finding]) -> None:
    try:
        import uvloop
    except ImportError as error:
        facts["event_loop"] = None
        findings.append({"severity": "fatal", "text": f"uvloop cannot be loaded ({error}): pip install penstock"})
    else:
        facts["event_loop"] = uvloop.Loop.__module__


def _files(facts: dict[str, Any], findings: list[Finding]) -> None:
    facts["max_open_files"] = most = open_files.most()
    if most < FEW_FILES:
        text = f"at most {most} files may be open, so about as many connections: ulimit -Hn says so, or LimitNOFILE."
        findings.append({"severity": "note", "text": text})


def _port(config: Settings, facts: dict[str, Any], findings: list[Finding]) -> None:
    host, port = config.server.host, config.server.port
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            facts["port"] = f"{port} of {host} is free"
    except OSError as error:
        facts["port"] = f"{port} of {host}: {error.strerror}"
        findings.append(
            {"severity": "note", "text": f"port {port} of {host} cannot be listened on now: {error.strerror}."}
        )


def _certificate(config: Settings, findings: list[Finding]) -> None:
    from gateway.certificate import Certificate
    from gateway.doors import DoorsError

    if config.server.tls_cert:
        try:
            trouble = Certificate(config.server).trouble
        except DoorsError as error:
            findings.append({"severity": "fatal", "text": f"{error}."})
        else:
            if trouble:
                text = f"server.tls_cert {config.server.tls_cert}: {trouble}. Renew it, or set the system's clock."
                findings.append({"severity": "fatal", "text": text})


def _data_dir(data_dir: Path, facts: dict[str, Any], findings: list[Finding]) -> None:
    """Where it is, or would be made."""
    place = data_dir.absolute()
    try:
        while not place.exists():
            place = place.parent
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise PermissionError
        facts["data_dir"] = str(data_dir) if data_dir.exists() else f"{data_dir} (will be made)"
        facts["disk_sync_ms"] = sync_ms = round(_sync_ms(place), 3)
    except OSError as error:
        why = f": {error.strerror}" if error.strerror else ""
        facts["data_dir"] = f"{data_dir} cannot be written{why}"
        findings.append({"severity": "fatal", "text": f"the data directory {data_dir} cannot be written{why}."})
        return
    if sync_ms > SLOW_SYNC_MS:
        text = f"the disk under {data_dir} takes {sync_ms:.1f} ms to make a write durable; every answer waits for one."
        findings.append({"severity": "slow", "text": text})


def _sync_ms(place: Path) -> float:
    """Median of a few small durable writes, as the ledger makes them."""
    probe = place / f".penstock-doctor-{os.getpid()}"
    file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        took_ms = []
        for _ in range(9):
            started_at = time.perf_counter()
            os.write(file, bytes(4096))
            os.fsync(file)
            took_ms.append(1e3 * (time.perf_counter() - started_at))
        return statistics.median(took_ms)
    finally:
        os.close(file)
        probe.unlink()


def _is_new(url: sa.URL) -> bool:
    return url.drivername.startswith("sqlite") and not os.path.exists(url.database or "")


async def _database(config: Settings, facts: dict[str, Any], findings: list[Finding]) -> None:
    import sqlalchemy as sa
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.asyncio import create_async_engine

    import migrations
    from gateway import store

    try:
        url = store.url_of(config.store)
    except store.StoreError as error:
        findings.append({"severity": "fatal", "text": f"{error}."})
        return
    where = store.named(url)
    facts["store"] = store.shown(url)
    if _is_new(url):
        facts["store"] += " (will be made)"
        return
    engine = create_async_engine(**store.driven(url))
    try:
        async with asyncio.timeout(DATABASE_S), engine.connect() as connection:
            known = await connection.run_sync(lambda sync: sa.inspect(sync).has_table("alembic_version"))
            query = sa.text("SELECT version_num FROM alembic_version")
            facts["schema"] = (await connection.execute(query)).scalar() if known else None
            await connection.run_sync(migrations.missing_of)
    except migrations.Unknown as revision:
        text = f"the store was written by a newer Penstock (revision {revision}), and this one refuses it."
        findings.append({"severity": "fatal", "text": text})
    except TimeoutError:
        text = f"the {where} has not answered for {DATABASE_S:.3g} s."
        findings.append({"severity": "fatal", "text": text})
    except (SQLAlchemyError, OSError, TypeError, ValueError) as error:  # the last two: of an option in the URL
        text = f"the {where} cannot be opened: {store.cause_of(error)}."
        findings.append({"severity": "fatal", "text": text})
    finally:
        await engine.dispose()


async def _redis(config: Settings, facts: dict[str, Any], findings: list[Finding]) -> None:
    from gateway.clock import Clock
    from gateway.redis import Redis, RedisAway, RedisUrlError

    try:
        redis = Redis(msgspec.structs.replace(config.redis, timeout_ms=REDIS_MS), Clock())
    except RedisUrlError as error:
        findings.append({"severity": "fatal", "text": f"{error}."})
        return
    try:
        await redis.call("PING")
        facts["redis"] = "answers"
    except RedisAway as error:
        facts["redis"] = "does not answer"
        how = "PENSTOCK_REDIS__URL=redis://USER:PASSWORD@HOST:PORT names it with its password (and no user: redis://:…)"
        findings.append({"severity": "fatal", "text": f"the Redis of redis.url does not answer: {error}; {how}."})
    finally:
        await redis.close()


def _engine() -> dict[str, Any]:
    """What ``worker.doctor`` says, or that it cannot say anything."""
    command = [*COMMAND[:-1], "worker.doctor", "--json"]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=ENGINE_S, check=False)
        report: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        why = f"it has not ended after {ENGINE_S:.3g} s" if late else str(error).splitlines()[0]
        text = f"the engine's own examination failed: {why}."
        return {"facts": {}, "findings": [{"severity": "fatal", "text": text}]}
    return report


def _tell(title: str, facts: dict[str, Any]) -> None:
    click.secho(title, bold=True)
    for name, value in facts.items():
        click.echo(f"  {name:24} {_shown(value)}")
    sys.stdout.flush()


def _shown(value: object) -> str:
    match value:
        case dict():
            return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
        case list():
            return ", ".join(map(_shown, value)) or "none"
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case _:
            return str(value)
