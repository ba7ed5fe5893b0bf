"""Where the clients are installed: PENSTOCK_CLIENTS, as ``.ci/run`` makes it, holds an environment of Python for each
list of packages beside this file, and ``node``. Where it is not set these tests are skipped, except in CI."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 120


class Clients:
    """Runs programs as their users would: another process, which knows a URL and a key."""

    def __init__(self, place: Path, house, directory: Path) -> None:
        self._place, self._directory = place, directory
        self._environment = {
            **os.environ,
            "OPENAI_BASE_URL": f"{house.url}/v1",
            "OPENAI_API_KEY": house.key,
            "ANTHROPIC_BASE_URL": house.url,
            "ANTHROPIC_API_KEY": house.key,
            "OLLAMA_HOST": house.url,
            "OLLAMA_API_KEY": house.key,
        }

    def python(self, program: str, environment: str = "main"):
        """What it prints, which is JSON."""
        interpreter = self._place / environment / "bin" / "python"
        return json.loads(self._run(interpreter, "-P", PROGRAMS / program).splitlines()[-1])

    def node(self, program: str):
        """As ``python``."""
        copied = self._place / "node" / program
        copied.write_bytes((PROGRAMS / program).read_bytes())  # beside its packages, where it looks for them
        return json.loads(self._run("node", copied))

    def describes(self, url: str, key: str, paths: str) -> str:
        """What schemathesis finds when it asks what /openapi.json says can be asked of these addresses, an expression;
        empty where the answers are all as described."""
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        environment = {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(PROGRAMS)}
        command = [self._place / "schemathesis" / "bin" / "schemathesis", "run", f"{url}/openapi.json"]
        command += ["-H", f"Authorization: Bearer {key}", "--include-path-regex", paths, "--checks", checks]
        command += ["--max-examples", "12", "--seed", "7", "--phases", "fuzzing,coverage", "--request-timeout", "30"]
        done = subprocess.run(
            [*map(str, command), "--no-color", "--max-failures", "10"],
            env={**self._environment, **environment},
            cwd=self._directory,
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE_S,
        )
        assert "Test cases:" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.partition("= FAILURES =")[2][:5000] if done.returncode else ""

    def shell(self, program: str) -> str:
        """What it prints."""
        self._environment["PATH"] = f"{self._place / 'main' / 'bin'}:{self._environment['PATH']}"
        return self._run("bash", PROGRAMS / program, self._directory)

    def _run(self, *command) -> str:
        done = subprocess.run(
            list(map(str, command)),
            env=self._environment,
            cwd=self._directory,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()


@pytest.fixture
def clients(house, tmp_path):
    place = os.environ.get("PENSTOCK_CLIENTS")
    if place is None:
        assert not os.environ.get("CI"), ".ci/run installs the clients"
        pytest.skip("PENSTOCK_CLIENTS names no directory where the clients are installed")
    return Clients(Path(place), house, tmp_path)
