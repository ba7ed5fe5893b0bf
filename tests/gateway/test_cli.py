"""The command as an operator meets it: a real process, its exit status, and what it says on which stream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

import demo
from tests.builders import PATIENCE_S, ROOT
from tests.ports import free_port

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")} | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "PENSTOCK_ENGINE__MAX_KV_BYTES": "67108864",
}

OPTIONAL = (
    *("aiohttp", "alembic", "brotli", "huggingface_hub", "jinja2", "llguidance", "numpy"),
    *("opentelemetry", "prometheus_client", "pyarrow", "redis", "rich", "sqlalchemy"),
    *("sqlalchemy.dialects.postgresql", "tokenizers", "torch", "uvloop", "policies.simulation"),
)
"""What takes long to be loaded, and is for some commands or settings alone."""


def penstock(*arguments: object, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *map(str, arguments)],
        cwd=cwd,
        env={**ENVIRON, **environ},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


class Serving:
    """A ``penstock serve`` that has said it is ready."""

    def __init__(self, process: asyncio.subprocess.Process, lines: list[str]) -> None:
        self.process = process
        self.lines = lines
        self.url = lines[-1].rpartition(" ")[2]

    async def end(self, number: signal.Signals) -> tuple[int | None, str]:
        """Its exit status, and what it has said on standard error."""
        self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            _, told = await self.process.communicate()
        return self.process.returncode, told.decode()


@contextlib.asynccontextmanager
async def serving(*arguments: object, cwd: Path, by: tuple[str, ...] = (), **environ: str) -> AsyncIterator[Serving]:
    """``by``: what starts it, if not this process itself."""
    process = await asyncio.create_subprocess_exec(
        *(*by, sys.executable, "-m", "gateway", "serve", "--port", "0", *map(str, arguments)),
        cwd=cwd,
        env={**ENVIRON, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        lines: list[str] = []
        async with asyncio.timeout(2 * PATIENCE_S):
            while not lines or "ready on" not in lines[-1]:
                line = await process.stdout.readline()
                assert line, (await process.stderr.read()).decode()
                lines.append(line.decode().rstrip("\n"))
        yield Serving(process, lines)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_the_first_start_shows_its_keys_and_the_second_does_not(tmp_path):
    async with serving(cwd=tmp_path) as house:
        kept = (tmp_path / "data" / "bootstrap.env").read_text().splitlines()
        assert house.lines[1:-1] == kept
        assert house.lines[-1].startswith("Penstock ready on http://127.0.0.1:")
        key = kept[0].removeprefix("PENSTOCK_API_KEY=")
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session:
            async with session.get(f"{house.url}/v1/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["demo"]
            async with session.post(f"{house.url}/v1/completions", json={"model": "demo", "prompt": "A"}) as response:
                assert response.status == 200
        status, told = await house.end(signal.SIGTERM)
    assert status == 0
    assert "Traceback" not in told
    assert key not in told
    assert stat.S_IMODE((tmp_path / "data" / "bootstrap.env").stat().st_mode) == 0o600
    async with serving(cwd=tmp_path) as house:
        assert len(house.lines) == 1
        status, _ = await house.end(signal.SIGINT)
    assert status == 0


async def test_it_serves_where_other_standard_streams_than_its_output_are_closed(tmp_path):
    closing = ("bash", "-c", 'exec "$@" <&- 2>&-', "bash")
    async with serving(cwd=tmp_path, by=closing) as house:
        async with aiohttp.ClientSession() as session, session.get(f"{house.url}/readyz") as response:
            assert response.status == 200
        assert (await house.end(signal.SIGTERM))[0] == 0


@pytest.mark.parametrize("is_stalled", [False, True])
async def test_it_serves_where_nobody_reads_what_it_shows(tmp_path, is_stalled):
    reads, writes = os.pipe()
    if is_stalled:
        os.set_blocking(writes, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writes, b"." * 512)
        os.set_blocking(writes, True)
    else:
        os.close(reads)
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--port", str(port)),
        cwd=tmp_path,
        env=ENVIRON,
        stdout=writes,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(2 * PATIENCE_S):
            status = 0
            while status != 200:
                assert process.returncode is None
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get(f"http://127.0.0.1:{port}/readyz") as response:
                        status = response.status
                await asyncio.sleep(0.05)
            async with session.get(f"http://127.0.0.1:{port}/healthz") as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for descriptor in (writes, reads)[: 2 if is_stalled else 1]:
            os.close(descriptor)


async def test_a_stopped_gateway_leaves_no_worker_and_no_socket(tmp_path):
    (tmp_path / "tmp").mkdir()
    async with serving(cwd=tmp_path, TMPDIR=str(tmp_path / "tmp")) as house:
        workers = proc(house.process.pid, f"task/{house.process.pid}/children")
        assert (await house.end(signal.SIGTERM))[0] == 0
    assert workers
    for pid in workers.split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert list((tmp_path / "tmp").glob("penstock-*")) == []


async def test_a_stop_while_the_model_loads_is_a_stop(tmp_path):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--port", "0"),
        cwd=tmp_path,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    await process.stdout.readline()  # the keys are shown, so signals are heard
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        shown, told = await process.communicate()
    assert process.returncode == 0
    assert b"ready on" not in shown
    assert b"Traceback" not in told


async def test_a_model_is_quantised_on_request(tmp_path):
    async with serving("--quantize", "int8", cwd=tmp_path) as house:
        keys = dict(line.split("=", 1) for line in (tmp_path / "data" / "bootstrap.env").read_text().splitlines())
        headers = {"authorization": f"Bearer {keys['PENSTOCK_ADMIN_KEY']}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{house.url}/admin/v1/workers") as response,
        ):
            (worker,) = (await response.json())["data"]
    assert worker["facts"]["dtype"].endswith("/int8")


async def test_a_worker_started_by_itself_serves_a_gateway_that_names_it(tmp_path):
    address = f"unix:{tmp_path / 'worker'}"
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "worker", "--model", "demo", "--listen", address), cwd=tmp_path, env=ENVIRON
    )
    try:
        (tmp_path / "config.toml").write_text(f'[models.demo]\nreplicas = 0\naddresses = ["{address}"]\n')
        async with serving(cwd=tmp_path) as house:
            assert (await house.end(signal.SIGTERM))[0] == 0
        assert worker.returncode is None  # it is not the gateway's to end
        worker.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await worker.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


def test_a_worker_is_told_its_devices(tmp_path):
    address = f"unix:{tmp_path / 'worker'}"
    told = ("worker", "--model", "demo", "--listen", address, "--device", 1, "--device", 0)
    done = penstock(*told, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (
        2,
        "penstock worker: engine.devices names some, but torch finds no CUDA device here\n",
    )


async def test_a_second_gateway_on_the_same_data_is_refused(tmp_path):
    async with serving(cwd=tmp_path):
        done = await asyncio.to_thread(penstock, "serve", "--port", 0, cwd=tmp_path)
    refused(done, "the data directory data is in use by another Penstock")


async def test_the_gateway_is_small_and_imports_no_tensors(tmp_path):
    async with serving(cwd=tmp_path) as house:
        async with aiohttp.ClientSession() as session, session.get(f"{house.url}/readyz") as response:
            assert response.status == 200
        status = proc(house.process.pid, "status")
        mapped = proc(house.process.pid, "maps")
    (rss_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")]
    assert rss_kib < 120 * 1024
    assert not any(name in mapped for name in ("torch", "numpy", "safetensors"))


def test_all_that_serve_imports_is_free_of_tensors(tmp_path):
    script = (
        "import sys, gateway.app, gateway.cli, gateway.doctor, gateway.telemetry;"
        "print([name for name in ('torch', 'transformers', 'numpy', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRON, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def loaded(script: str, cwd: Path) -> set[str]:
    """Of OPTIONAL, what a process has loaded that ran this."""
    asked = f"import atexit, sys; atexit.register(lambda: print(*{set(OPTIONAL)} & {{*sys.modules}}, file=sys.stderr))"
    command = [sys.executable, "-c", f"{asked}\n{script}"]
    done = subprocess.run(command, cwd=cwd, env=ENVIRON, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["tenants", "--help"], ["serve", "--help"]], ids=" ".join)
def test_help_waits_for_nothing_that_the_work_needs(tmp_path, arguments):
    """All commands are imported to be listed."""
    assert loaded(f"from gateway.cli import main; main({arguments})", tmp_path) == set()


def test_a_start_loads_what_its_settings_and_its_store_ask_for(tmp_path):
    apart = {"alembic", "huggingface_hub", "opentelemetry", "redis", "rich", "sqlalchemy.dialects.postgresql"}
    assert not loaded("import gateway.app, gateway.processes, gateway.starting", tmp_path) & apart
    migrate = "from gateway.cli import main; main(['migrate'])"
    assert "alembic" in loaded(migrate, tmp_path)
    assert "alembic" not in loaded(migrate, tmp_path)  # there was nothing to do


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(
            penstock("serve", "--port", port, cwd=tmp_path), f"port {port} of 127.0.0.1 is taken by another program"
        )
    assert not (tmp_path / "data").exists()  # and no keys were shown for a start that was none


def test_a_host_that_is_not_here(tmp_path):
    refused(penstock("serve", "--host", "203.0.113.7", cwd=tmp_path), "server.host 203.0.113.7 is no address of this")


def test_a_data_directory_that_is_a_file(tmp_path):
    (tmp_path / "data").write_text("a file")
    told = "store.data_dir (--data-dir) data is no directory, but a file"
    refused(penstock("serve", "--port", 0, cwd=tmp_path), told)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[server\n", "config.toml is not valid TOML"),
        ("[server]\nprot = 1\n", "config.toml: unknown key server.prot; did you mean server.port?"),
        ("[server]\nport = 'x'\n", "config.toml: server.port: expected `int`, got `str`"),
        ("[server]\nport = 70000\n", "config.toml: server.port: expected `int` <= 65535"),
        (
            "[server]\nprocesses = 3\n",
            "server.processes: 3 of them have nothing to share limits and keys in, because",
        ),
        ("[server]\nport = 0\n[redis]\nurl = 'http://here'\n", "redis.url (PENSTOCK_REDIS__URL) cannot be used"),
        ("[server]\nport = 0\n[billing]\nwebhook_url = 'https://here/'\n", "PENSTOCK_WEBHOOK_SECRET is not"),
    ],
)
def test_a_config_that_is_wrong(tmp_path, text, sentence):
    (tmp_path / "config.toml").write_text(text)
    refused(penstock("serve", cwd=tmp_path), sentence)


def test_a_config_is_utf8_whatever_the_locale_has(tmp_path):
    (tmp_path / "config.toml").write_text('# café\n[models."modèle"]\nsource = "demo"\n', "utf-8")
    done = penstock("migrate", cwd=tmp_path, LC_ALL="C", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_config_of_another_name_is_called_by_it(tmp_path):
    (tmp_path / "other.toml").write_text("[server]\nprot = 1\n")
    refused(penstock("serve", "--config", "other.toml", cwd=tmp_path), "other.toml: unknown key server.prot")


def test_a_config_that_is_not_there(tmp_path):
    refused(penstock("serve", "--config", "other.toml", cwd=tmp_path), "there is no file other.toml")


def test_a_variable_that_is_wrong(tmp_path):
    refused(
        penstock("serve", cwd=tmp_path, PENSTOCK_SERVER__PORT="many"),
        "PENSTOCK_SERVER__PORT: server.port: expected `int`",
    )


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("./nowhere", "model nowhere: there is no directory ./nowhere"),
        ("./empty", "model empty: empty has no tokenizer.json"),
        ("./no-weights", "no-weights"),
        ("./cut-short", "cut-short"),
    ],
)
def test_a_checkpoint_that_is_broken(tmp_path, model, sentence):
    (tmp_path / "empty").mkdir()
    for name in ("no-weights", "cut-short"):
        shutil.copytree(demo.MODEL_DIR, tmp_path / name)
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    os.truncate(tmp_path / "cut-short" / "model.safetensors", 1000)
    done = penstock("serve", "--port", 0, "--model", model, cwd=tmp_path)
    assert "ready" not in done.stdout
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_broken_model_beside_a_good_one_does_not_keep_it_from_serving(tmp_path):
    (tmp_path / "config.toml").write_text('[models.demo]\n[models.broken]\nsource = "./nowhere"\n')
    async with serving(cwd=tmp_path) as house:
        async with aiohttp.ClientSession() as session, session.get(f"{house.url}/readyz") as response:
            assert (await response.json())["models"] == {"demo": "ready"}
        async with aiohttp.ClientSession() as session, session.get(f"{house.url}/metrics") as response:
            assert 'penstock_workers{model="broken",state="given_up"} 1' in await response.text()
        status, told = await house.end(signal.SIGTERM)
    assert status == 0
    assert "penstock: model broken: there is no directory ./nowhere" in told


def test_settings_as_editors_on_windows_write_them(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbf[server]\r\nport\t=\t70000\r\n")
    refused(penstock("serve", cwd=tmp_path), "config.toml: server.port: expected `int` <= 65535")


def test_migrate_says_what_it_did(tmp_path):
    revisions = sorted(path.name[:4] for path in (ROOT / "migrations").glob("[0-9]*.py"))
    assert len(revisions) > 7
    assert penstock("migrate", cwd=tmp_path).stdout == f"Applied {', '.join(revisions)}.\n"
    assert penstock("migrate", cwd=tmp_path).stdout == "Nothing to do: the store is up to date.\n"


@pytest.mark.parametrize("command", ["bench", "chat", "doctor", "migrate", "pull", "serve", "worker"])
def test_every_command_has_help(tmp_path, command):
    done = penstock(command, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: penstock {command} ")


def test_the_list_of_commands_says_whole_sentences_of_them(tmp_path):
    done = penstock("-h", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    listed = done.stdout.partition("Commands:\n")[2].splitlines()
    assert len(listed) > 10
    assert [line for line in listed if line.endswith("...") or "``" in line] == []


def proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    """Exit status 2, one line on standard error, nothing on standard output."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: ")
    assert sentence in line
