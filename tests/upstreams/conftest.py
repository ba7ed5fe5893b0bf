"""Where the servers are installed: PENSTOCK_UPSTREAMS, as ``.ci/run`` makes it, holds an environment of Python for each
list of packages beside this file. Where it is not set these tests are skipped, except in CI. All of them serve the demo
model, the two of llama.cpp as a GGUF that is written for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import demo
from policies.upstreams.terms import Upstream
from tests import house as houses
from tests.builders import scripted
from tests.journeys.test_gguf import the_demo_as_gguf
from tests.ports import free_port

PROGRAMS = Path(__file__).parent / "programs"
KINDS = ("xllamacpp", "llama_cpp", "transformers")
VECTORS, RANKS = "xllamacpp-vectors", "xllamacpp-ranks"
PATIENCE_S = 120


class RealServer:
    """One of them, in a process of its own on a port that stays its own when it is started again."""

    def __init__(self, place: Path, kind: str, gguf: Path, log: Path) -> None:
        self.port = free_port()
        self.kind = kind
        self._place, self._gguf, self._log = place, gguf, log
        python, port = place / kind.partition("-")[0] / "bin" / "python", str(self.port)
        self._command = {
            "xllamacpp": [python, PROGRAMS / "xllamacpp_server.py", gguf, port],
            VECTORS: [python, PROGRAMS / "xllamacpp_server.py", gguf, port, "vectors"],
            RANKS: [python, PROGRAMS / "xllamacpp_server.py", gguf, port, "ranks"],
            "llama_cpp": [
                *(python, "-m", "llama_cpp.server", "--model", gguf, "--model_alias", "demo", "--port", port),
                *("--n_ctx", "4096", "--n_threads", "1", "--verbose", "false"),
            ],
            "transformers": [
                *(python, "-c", "from transformers.cli.transformers import main; main()", "serve"),
                *(demo.MODEL_DIR, "--port", port, "--device", "cpu"),
            ],
        }[kind]
        self.start()

    def start(self) -> None:
        hub = self._log.parent / "hub"  # transformers lists it
        hub.mkdir(exist_ok=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(list(map(str, self._command)), stdout=log, stderr=log, env=environment)

    def another(self, log: Path) -> RealServer:
        """Of the same kind, on a port of its own."""
        return RealServer(self._place, self.kind, self._gguf, log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def until_there(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=5).close()
                return
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.1)

    def upstream(self, name: str, **terms: object) -> Upstream:
        model = str(demo.MODEL_DIR) if self.kind == "transformers" else "demo"
        url = f"http://127.0.0.1:{self.port}/v1"
        return Upstream(name=name, model=self.kind, url=url, upstream_model=model, **terms)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealServer]]:
    """One of each kind, all started at once."""
    named = os.environ.get("PENSTOCK_UPSTREAMS")
    if named is None:
        assert not os.environ.get("CI"), ".ci/run installs the upstreams"
        pytest.skip("PENSTOCK_UPSTREAMS names no directory where the upstreams are installed")
    directory = tmp_path_factory.mktemp("upstreams")
    gguf = the_demo_as_gguf(directory / "demo.gguf")
    started = {
        kind: RealServer(Path(named), kind, gguf, directory / f"{kind}.log") for kind in (*KINDS, VECTORS, RANKS)
    }
    try:
        for server in started.values():
            server.until_there()
        yield started
    finally:
        for server in started.values():
            server.kill()


@pytest.fixture
def mortal(servers: dict[str, RealServer], tmp_path: Path) -> Iterator[RealServer]:
    """One that a test may end and start again."""
    server = servers["xllamacpp"].another(tmp_path / "log")
    try:
        server.until_there()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def front(servers: dict[str, RealServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[houses.House]:
    """A gateway that has them all, and a scripted worker of a model that they are not asked for."""
    upstreams = (
        *[
            server.upstream(
                kind, tokenizer=str(demo.MODEL_DIR), probe_s=0.0, **({"kinds": ("rerank",)} if kind == RANKS else {})
            )
            for kind, server in servers.items()
        ],
        Upstream(
            name="estimated",
            model="estimated",
            url=f"http://127.0.0.1:{servers['llama_cpp'].port}/v1",
            upstream_model="demo",
            probe_s=0.0,
        ),
    )
    command = scripted("--num-tokens", 3)
    with houses.running(tmp_path_factory.mktemp("house"), command, upstreams=upstreams) as house:
        yield house
