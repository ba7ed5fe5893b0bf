"""What `penstock doctor` finds, and how long it looks."""

from __future__ import annotations

import json
import socket
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway import doctor
from policies import settings
from tests.gateway.test_cli import penstock
from tests.gateway.test_transport import certified


def test_doctor_tells_facts_and_findings(tmp_path):
    done = penstock("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gateway"]["event_loop"] == "uvloop"
    assert report["engine"]["torch"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_what_must_be_mended(tmp_path):
    (tmp_path / "data").write_text("a file")
    done = penstock("doctor", cwd=tmp_path)
    assert done.returncode == 1
    assert "fatal: the data directory data cannot be written" in done.stdout


def test_doctor_finds_what_a_start_would_refuse(tmp_path):
    with sqlite3.connect(tmp_path / "penstock.db") as newer:
        newer.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        newer.execute("INSERT INTO alembic_version VALUES ('9999')")
    done = penstock("doctor", "--data-dir", tmp_path, cwd=tmp_path, **certificate(tmp_path / "none.pem"))
    assert done.returncode == 1
    assert "fatal: the store was written by a newer Penstock (revision 9999)" in done.stdout
    assert f"fatal: server.tls_cert {tmp_path / 'none.pem'} with" in done.stdout


def certificate(path: Path) -> dict[str, str]:
    return {"PENSTOCK_SERVER__TLS_CERT": str(path), "PENSTOCK_SERVER__TLS_KEY": str(path)}


@pytest.mark.parametrize(("num_days", "said"), [(-1, ["certificate has expired"]), (1, [])])
def test_doctor_finds_a_certificate_whose_time_is_over(tmp_path, num_days, said):
    cert, key = certified(tmp_path, "old", num_days)
    server = settings.Server(port=0, tls_cert=str(cert), tls_key=str(key))
    _, findings = doctor.examine(settings.Settings(server=server, store=settings.Store(data_dir=str(tmp_path))))
    texts = [each["text"] for each in findings if each["severity"] == "fatal"]
    assert texts == [f"server.tls_cert {cert}: {each}. Renew it, or set the system's clock." for each in said]


@pytest.mark.parametrize("who", [":wrong", "somebody:any"])
def test_doctor_finds_a_redis_that_lets_nobody_in(tmp_path, fragile_redis, who):
    with socket.create_connection(("127.0.0.1", fragile_redis.port)) as connection:  # who may do nothing
        connection.sendall(b"ACL SETUSER somebody on nopass\r\n")
        assert connection.recv(5) == b"+OK\r\n"
    url = fragile_redis.url.replace("redis://", f"redis://{who}@")
    redis, store = settings.Redis(url=url), settings.Store(data_dir=str(tmp_path))
    _, findings = doctor.examine(settings.Settings(redis=redis, store=store))
    (text,) = [each["text"] for each in findings if each["severity"] == "fatal"]
    assert text.startswith("the Redis of redis.url does not answer: ")
    assert "PENSTOCK_REDIS__URL" in text
    redis = settings.Redis(url=fragile_redis.url)
    facts, _ = doctor.examine(settings.Settings(redis=redis, store=store))
    assert facts["redis"] == "answers"


def test_doctor_looks_no_further_than_it_may(tmp_path):
    done = penstock("doctor", "--data-dir", tmp_path / ("a" * 300), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"fatal: the data directory {tmp_path / ('a' * 300)} cannot be written: File name too long." in done.stdout


def test_doctor_waits_so_long_and_no_longer_for_a_database_that_says_nothing(tmp_path, fragile_postgres, monkeypatch):
    monkeypatch.setattr(doctor, "DATABASE_S", 1.5)
    url = f"{fragile_postgres.url}/postgres"
    fragile_postgres.stall()
    _, findings = doctor.examine(settings.Settings(store=settings.Store(data_dir=str(tmp_path), url=url)))
    text = f"the database {url} of store.url (PENSTOCK_STORE__URL) has not answered for 1.5 s."
    assert {"severity": "fatal", "text": text} in findings


def test_doctor_names_the_setting_of_a_database_that_cannot_be_opened_and_no_password(tmp_path, postgres_server):
    url = f"{postgres_server}/nowhere?password=s3cret"
    facts, findings = doctor.examine(settings.Settings(store=settings.Store(data_dir=str(tmp_path), url=url)))
    (text,) = [each["text"] for each in findings if each["severity"] == "fatal"]
    assert text.endswith('of store.url (PENSTOCK_STORE__URL) cannot be opened: database "nowhere" does not exist.')
    assert facts["store"] == f"{postgres_server}/nowhere?password=***"
    assert "s3cret" not in text


def test_doctor_says_how_long_an_engine_has_said_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "ENGINE_S", 0.01)  # no python starts in that time
    done = CliRunner().invoke(doctor.doctor, [])
    assert (done.exit_code, "has not ended after 0.01 s." in done.stdout) == (1, True), done.stdout
    assert done.stdout.index("Gateway") < done.stdout.index("Engine")
