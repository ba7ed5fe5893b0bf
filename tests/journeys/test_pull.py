"""From the hub to an answer: a model is pulled, the network goes away, and it is served by its hub id."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import demo
from tests.builders import ROOT
from tests.gateway.hub import serving as serving_hub
from tests.journeys.test_process import serving


def test_a_pulled_model_is_served_without_a_network(tmp_path):
    files = {path.name: path.read_bytes() for path in demo.MODEL_DIR.iterdir() if path.is_file()}
    home = {"HF_HOME": str(tmp_path / "hf")}
    with serving_hub(files) as hub:
        subprocess.run(
            [sys.executable, "-m", "gateway", "pull", "org/model"],
            cwd=ROOT,
            env={**os.environ, **home, "HF_ENDPOINT": hub.url},
            check=True,
        )
    said = []
    for source in ("demo", "org/model"):
        directory = tmp_path / str(len(said))
        directory.mkdir()
        # Nobody listens there, as where there is no network; nothing says that it need not be tried.
        environ = {**home, "HF_ENDPOINT": hub.url, "PENSTOCK_MODELS__DEMO__SOURCE": source}
        with serving(directory, **environ) as running:
            body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
            with running.open("/v1/chat/completions", **body, max_tokens=20) as response:
                said.append(json.load(response)["choices"])
    assert said[0] == said[1]
