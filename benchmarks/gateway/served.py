"""A gateway in a process of its own, its ledger where it is told, and the scripted worker that answers it from here."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.gateway import peer, processes
from benchmarks.gateway.processes import Server
from benchmarks.gateway.rounds import KEY, MODEL_NAME
from policies.wire import Ready

MODEL = Path(__file__).parents[2] / "demo" / "model"
TEXT = " The river begins at the foot of the hill, and a little old man lives beside the mill."
"""What every answer says."""

CONFIG = """
[server]
host = "127.0.0.1"
port = 0
coalesce_ms = 0.0
[store]
data_dir = {data_dir}
[models.demo]
source = "demo"
replicas = 0
addresses = ["unix:{socket}"]
"""


@asynccontextmanager
async def served(
    folder: Path,
    data: Path,
    core: int | None,
    name: str = "gateway",
    module: str = "gateway",
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[Server, peer.Worker]]:
    """A gateway on one core (None: on all) whose worker is connected, and that worker. Its ledger is in ``data``, its
    settings, log and socket are in ``folder`` under ``name``, and ``module`` is what runs it. Raises BenchmarkError,
    and TimeoutError where it does not connect.
    """
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ready = Ready(MODEL_NAME, 8192, tokenizer.get_vocab_size(), [0, 2], 32, 4096, 256, "none", "none", os.getpid())
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    socket, config = folder / f"{name}.socket", folder / f"{name}.toml"
    listening, connected = await peer.listen_as_worker(socket, ready, token_ids)
    try:
        config.write_text(CONFIG.format(data_dir=json.dumps(str(data)), socket=socket))
        arguments = [sys.executable, "-m", module, "serve", "--config", str(config)]
        environ = {"PENSTOCK_API_KEY": KEY, "PENSTOCK_ADMIN_KEY": f"{KEY}-admin", **(variables or {})}
        async with processes.server(arguments, core, folder / f"{name}.log", environ) as server:
            async with asyncio.timeout(20.0):
                worker = await connected
            yield server, worker
    finally:
        listening.close()


def in_memory() -> Path | None:
    """Where files lie in memory, if anywhere: how long a disk takes to keep a row is no cost of the gateway's."""
    place = Path("/dev/shm")
    return place if place.is_dir() and os.access(place, os.W_OK) else None
