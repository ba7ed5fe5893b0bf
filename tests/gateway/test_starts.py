"""A start that ends before anybody was served: what is wrong with the settings, and signals that come early."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.test_cli import penstock

WRONG = {
    "server.tls_cert": "[server]\ntls_cert = 'none.pem'\ntls_key = 'none.pem'",
    "sinks.far.url": "[sinks.far]\nkind = 'cloudevents'\nurl = 'nowhere'\nmeters = {request = 'requests'}",
    "billing.webhook_url": "[billing]\nwebhook_url = 'nowhere'",
    "OTEL_TRACES_EXPORTER": "[tracing]\nendpoint = 'nowhere'",
}


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
