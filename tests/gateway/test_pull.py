"""``penstock pull`` against a hub on this machine, by huggingface_hub's own client, each time in its own process."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import demo
from gateway.pull import File, PullError, chosen
from tests.builders import PATIENCE_S, ROOT
from tests.gateway.hub import COMMIT, Hub, serving

Run = Callable[..., subprocess.CompletedProcess[str]]
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
"""A whole file without a tensor."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """The demo model, with what no model needs."""
    files = {path.name: path.read_bytes() for path in demo.MODEL_DIR.iterdir() if path.is_file()}
    with serving({**files, "README.md": b"# A model", "pytorch_model.bin": b"pickled"}) as served:
        yield served


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """``run("pull", "org/model")``: the command, with a cache of its own."""

    def run_it(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return subprocess.run(
            [sys.executable, "-m", "gateway", *arguments],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "0", **settings, **environ},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )

    return run_it


PLACE = "import sys; from sources import place_of; print(place_of(sys.argv[1]))"


def test_a_model_is_pulled_verified_and_found_by_its_hub_id(hub, run, tmp_path):
    done = run("pull", "org/model", "--json")
    assert done.returncode == 0, done.stderr
    pulled = json.loads(done.stdout)
    root = Path(pulled["path"])
    assert (pulled["commit"], root.name) == (COMMIT, COMMIT)
    there = {path.name for path in root.iterdir()}
    assert {"config.json", "tokenizer.json"} <= there
    assert any(name.endswith(".safetensors") for name in there)
    assert not {"README.md", "pytorch_model.bin"} & there
    for name in there:
        assert (root / name).read_bytes() == hub.files[name]
    hub.status = 503  # from here on nobody answers
    environ = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", PLACE, "org/model"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == str(root), found.stderr


def test_what_is_there_already_is_not_fetched_again(hub, run):
    assert run("pull", "org/model").returncode == 0
    hub.downloads.clear()
    done = run("pull", "org/model")
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
    assert hub.downloads == []


def a_large_file(hub: Hub) -> bytes:
    num_bytes = 24 << 20
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    hub.files["model.safetensors"] = len(header).to_bytes(8, "little") + header + os.urandom(num_bytes)
    hub.break_at = 15 << 20
    return hub.files["model.safetensors"]


def test_a_connection_that_breaks_goes_on_where_it_was(hub, run):
    content = a_large_file(hub)
    done = run("pull", "org/model", "--json")
    assert done.returncode == 0, done.stderr
    (wanted,) = hub.ranges
    assert 0 < int(wanted.removeprefix("bytes=").rstrip("-")) <= 15 << 20
    assert (Path(json.loads(done.stdout)["path"]) / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize("where", [(), ("--to", "here")])
def test_a_pull_that_was_interrupted_goes_on_where_it_was(hub, run, tmp_path, where):
    content = a_large_file(hub)
    hub.stays_away = True
    where = where and (where[0], str(tmp_path / where[1]))
    done = run("pull", "org/model", *where)
    assert done.returncode == 2, done.stderr
    hub.status, hub.ranges = 0, []
    done = run("pull", "org/model", "--json", *where)
    assert done.returncode == 0, done.stderr
    (wanted,) = hub.ranges
    assert 0 < int(wanted.removeprefix("bytes=").rstrip("-")) <= 15 << 20
    root = Path(json.loads(done.stdout)["path"])
    assert (root / "model.safetensors").read_bytes() == content
    assert not list(tmp_path.rglob("*.penstock-part"))


def test_a_file_that_is_not_what_the_hub_says_is_removed_and_fetched_again(hub, run):
    (weights,) = (name for name in hub.files if name.endswith(".safetensors"))
    hub.corrupt.add(weights)
    done = run("pull", "org/model")
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == (
        f"penstock: {weights} is not what it should be: its hash is another one than on the hub; "
        "it was removed, so pull it again"
    )
    hub.corrupt.clear()
    assert run("pull", "org/model").returncode == 0


def test_a_file_that_is_what_the_hub_says_but_no_model_is_told(hub, run):
    (weights,) = (name for name in hub.files if name.endswith(".safetensors"))
    hub.files[weights] = b"<html>not found</html>" * 10
    done = run("pull", "org/model")
    assert done.returncode == 2
    assert "it does not begin as a safetensors file does" in done.stderr


def test_it_goes_to_a_directory_that_is_named(hub, run, tmp_path):
    done = run("pull", "org/model", "--to", str(tmp_path / "here"), "--revision", "v1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "config.json").read_bytes() == hub.files["config.json"]


def test_a_revision_is_found_by_its_name_behind_the_hub_id(hub, run, tmp_path):
    done = run("pull", "org/model", "--revision", "v1", "--json")
    assert json.loads(done.stdout)["source"] == "org/model@v1"
    environ = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    for source, is_there in (("org/model@v1", True), ("org/model", False)):
        command = [sys.executable, "-c", PLACE, source]
        found = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        assert (found.stdout.strip() == json.loads(done.stdout)["path"]) is is_there, found.stderr


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (404, "RepoNotFound", "the hub has no model org/model, or none that is open to this machine"),
        (401, "RepoNotFound", "the hub has no model org/model, or none that is open to this machine"),
        (403, "GatedRepo", "org/model is gated: accept its terms on the hub"),
        (403, "", "the hub does not let this machine have org/model (403)"),
        (503, "", "the hub answered with 503"),
    ],
)
def test_a_hub_that_refuses_is_understood(hub, run, status, code, sentence):
    hub.status, hub.error_code = status, code
    done = run("pull", "org/model")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"penstock: {sentence}"), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "environ", "sentence"),
    [
        (("org/model", "--revision", "v9"), {}, "org/model has no revision v9"),
        (("no-slash",), {}, "no-slash is no hub id (OWNER/NAME)"),
        (("org/what is this",), {}, "org/what is this is no hub id (OWNER/NAME)"),
        (("org/model",), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached: "),
        (("org/model",), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, so the hub is not asked"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(run, arguments, environ, sentence):
    done = run("pull", *arguments, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"penstock: {sentence}"), done.stderr


def test_one_gguf_is_pulled_by_its_quantisation_and_found_by_the_hub_id(hub, run, tmp_path):
    hub.files = {"m-Q4_K_M.gguf": GGUF, "m-Q8_0.gguf": GGUF + b"", "config.json": b"{}"}
    assert "choose one with --quant: m-Q4_K_M.gguf, m-Q8_0.gguf" in run("pull", "org/model").stderr
    done = run("pull", "org/model", "--quant", "q4_k_m", "--json")
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    environ = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    for module, function in (("sources", "place_of"), ("worker.models.place", "path_of")):
        code = PLACE.replace("sources", module).replace("place_of", function)
        found = subprocess.run(
            [sys.executable, "-c", code, "org/model"],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.stdout.strip() == str(path / "m-Q4_K_M.gguf"), found.stderr


def test_a_gguf_in_a_folder_is_pulled_with_its_parts_and_found_by_the_hub_id(hub, run, tmp_path):
    parts = [f"Q8_0/m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.files = {**dict.fromkeys(parts, GGUF), "m-Q4_K_M.gguf": GGUF, "BF16/m-00001-of-00001.gguf": GGUF}
    done = run("pull", "org/model", "--quant", "Q8_0", "--json")
    assert done.returncode == 0, done.stderr
    root = Path(json.loads(done.stdout)["path"])
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*.gguf")) == parts
    environ = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", PLACE, "org/model"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == str(root / parts[0]), found.stderr
    done = run("pull", "org/model", "--quant", "bf16", "--to", str(tmp_path / "here"))
    assert f"Serve it: penstock serve --model {tmp_path / 'here' / 'BF16' / 'm-00001-of-00001.gguf'}" in done.stdout


def files(*names: str) -> list[File]:
    return [File(name, 1, "", "") for name in names]


def test_a_quantisation_is_a_whole_word_of_a_name():
    there = files("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_K_M.gguf")
    assert [file.name for file in chosen("o/m", there, "Q4_K_M")] == ["m-Q4_K_M.gguf"]
    with pytest.raises(PullError, match="no GGUF file of the quantisation Q4_K; it has m-IQ4_K_M"):
        chosen("o/m", there, "Q4_K")


def test_a_folder_may_say_the_quantisation_and_several_files_of_it_are_a_question():
    parts = [f"Q8_0/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    there = files(*parts, "m-Q4_K_M.gguf", "new/m-Q4_K_M.gguf", "mmproj-Q8_0.gguf")
    assert [file.name for file in chosen("o/m", there, "q8_0")] == parts
    with pytest.raises(
        PullError,
        match=r"2 GGUF files of the quantisation Q4_K_M; choose one with --quant by its name: m-Q4_K_M\.gguf, new/m-Q4",
    ):
        chosen("o/m", there, "Q4_K_M")
    assert [file.name for file in chosen("o/m", there, "new/m-Q4_K_M.gguf")] == ["new/m-Q4_K_M.gguf"]
    assert [file.name for file in chosen("o/m", there, parts[0])] == parts


def test_what_makes_tokens_of_pictures_is_no_model_to_choose():
    assert [file.name for file in chosen("o/m", files("m-F16.gguf", "mmproj-m-F16.gguf"), None)] == ["m-F16.gguf"]
    assert [file.name for file in chosen("o/m", files("m-F16.gguf", "m-mmproj-F16.gguf"), "F16")] == ["m-F16.gguf"]


def test_a_gguf_in_parts_is_pulled_with_all_of_them():
    parts = [f"m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    there = files(parts[1], "m-Q4_K_M.gguf", parts[0], "README.md")
    assert [file.name for file in chosen("o/m", there, "Q8_0")] == parts
    assert [file.name for file in chosen("o/m", files(*reversed(parts)), None)] == parts
    with pytest.raises(PullError, match=f"has 2 GGUF files; choose one with --quant: m-Q4_K_M.gguf, {parts[0]}$"):
        chosen("o/m", there, None)
    with pytest.raises(PullError, match=f"o/m has no {parts[0]}, which is a part of {parts[0]}"):
        chosen("o/m", files(parts[1]), "Q8_0")


def test_what_cannot_be_served_is_refused_before_anything_is_fetched():
    with pytest.raises(PullError, match="neither safetensors nor GGUF"):
        chosen("o/m", files("pytorch_model.bin", "config.json"), None)
    with pytest.raises(PullError, match=r"no GGUF file of the quantisation Q8_0; it has none at all"):
        chosen("o/m", files("model.safetensors"), "Q8_0")


def test_what_the_disk_has_no_room_for_is_not_begun(hub, run):
    as_it_is = hub.sibling
    hub.sibling = lambda name: {**as_it_is(name), "size": 1 << 60}
    done = run("pull", "org/model")
    assert done.returncode == 2
    assert "GiB free" in done.stderr
    assert hub.downloads == []


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/../../outside.safetensors"])
def test_a_name_that_leads_elsewhere_is_refused(hub, run, tmp_path, name):
    hub.files[name] = b"anything"
    done = run("pull", "org/model", "--to", str(tmp_path / "here"))
    assert done.returncode == 2
    assert done.stderr == f"penstock: the hub names a file that cannot be: {name}\n"
    assert not list(tmp_path.rglob("outside*"))
