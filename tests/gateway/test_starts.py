"""A start that ends before anybody was served: what is wrong with the settings, and signals that come early."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.builders import PATIENCE_S
from tests.conftest import command
from tests.gateway.test_cli import ENVIRON, penstock

WRONG = {
    "server.tls_cert": "[server]\ntls_cert = 'none.pem'\ntls_key = 'none.pem'",
    "sinks.far.url": "[sinks.far]\nkind = 'cloudevents'\nurl = 'nowhere'\nmeters = {request = 'requests'}",
    "billing.webhook_url": "[billing]\nwebhook_url = 'nowhere'",
    "OTEL_TRACES_EXPORTER": "[tracing]\nendpoint = 'nowhere'",
}

NOWHERE = "import sys, tempfile; tempfile.tempdir = sys.argv.pop(1); from gateway.cli import main; main()"


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_start_that_its_settings_keep_from_beginning_makes_no_keys(tmp_path: Path, said: str, num_processes: int):
    environ = {"OTEL_TRACES_EXPORTER": "pigeons"}
    if num_processes > 1:  # nobody is there, and nobody is asked
        environ |= {
            "PENSTOCK_SERVER__PROCESSES": str(num_processes),
            "PENSTOCK_STORE__URL": "postgresql://127.0.0.1:1/none",
            "PENSTOCK_REDIS__URL": "redis://127.0.0.1:1",
        }
    (tmp_path / "config.toml").write_text(WRONG[said])
    done = penstock("serve", "--port", 0, cwd=tmp_path, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("num_processes", [1, 2])
async def test_a_start_beside_a_database_that_takes_no_writes_says_so(tmp_path, migrated_postgres, num_processes):
    server, _, name = migrated_postgres.rpartition("/")
    await command(server, f"ALTER DATABASE {name} SET default_transaction_read_only = on")  # as a standby has it
    environ = {
        "PENSTOCK_SERVER__PROCESSES": str(num_processes),
        "PENSTOCK_STORE__URL": migrated_postgres,
        "PENSTOCK_REDIS__URL": "redis://127.0.0.1:1",
    }
    done = await asyncio.to_thread(penstock, "serve", "--port", 0, cwd=tmp_path, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    told = f"penstock: the database {migrated_postgres} of store.url (PENSTOCK_STORE__URL) cannot be used: "
    assert done.stderr.startswith(told)
    assert "read-only" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_start_that_has_nowhere_to_meet_its_workers_says_so(tmp_path: Path):
    nowhere = tmp_path / "none"
    done = subprocess.run(
        # As where the root file system is read-only, and nothing else is mounted at /tmp.
        [sys.executable, "-c", NOWHERE, str(nowhere), "serve", "--port", "0"],
        cwd=tmp_path,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no directory for the sockets of workers" in done.stderr
    assert str(nowhere) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_modules_are_loaded_is_a_stop_without_a_word(tmp_path: Path, number: signal.Signals):
    process = subprocess.Popen(
        # Whoever runs the tests may heed no SIGHUP (nohup), nor would what they start.
        ["env", "--default-signal=HUP", sys.executable, "-m", "gateway", "serve", "--port", "0"],
        cwd=tmp_path,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (workers := children.read_text().split()):  # the first is begun before most modules are loaded
            assert process.poll() is None
        os.killpg(process.pid, number)  # as a terminal does
        assert process.communicate(timeout=PATIENCE_S) == ("", "")
        assert process.returncode == 0
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    finally:
        process.kill()
        process.communicate()


def test_nohup_is_heeded(tmp_path: Path):
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "gateway", "serve", "--port", "0"],
        cwd=tmp_path,
        env=ENVIRON,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("Penstock ready")).split()[-1]
        process.send_signal(signal.SIGHUP)
        with urllib.request.urlopen(f"{url}/healthz", timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
