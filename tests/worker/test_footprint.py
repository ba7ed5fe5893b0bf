"""What a model is said to take in memory is what it takes, in whatever form it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from policies.settings import Engine
from tests.worker.tiny import checkpoint
from worker import loading
from worker.models import ModelError, load

SIZES = {
    "vocab_size": 24_000,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 6,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
NUM_LAYER_PARAMETERS = 6 * (2 * 640 * 640 + 2 * 640 * 128 + 3 * 640 * 1792)
TABLE = 24_000 * 640
SLACK_BYTES = 8 << 20
"""Norms, angles, and what is left of the last huge page."""

LOAD = """
import ctypes, gc, json, sys
from policies.settings import Engine
from worker import loading
from worker.models import load

load.LEAST_PARAMETERS = 1 << 60  # nothing is left on disk

def resident(what):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(what))

asked = []
loading.refuse_too_large = lambda source, needed, form, device: asked.append(needed)
small, large, engine = json.loads(sys.argv[1])
kept = loading.load_model(small, Engine(**engine))
before = resident("RssAnon")
kept = [kept, loading.load_model(large, Engine(**engine))]
print(json.dumps({"asked": asked[1], "grown": resident("RssAnon") - before}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A small one, and a larger one whose head is its embedding or is not."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("small", "tied", "untied")}
    checkpoint(places["small"], "LlamaForCausalLM", torch_dtype="bfloat16")
    for name in ("tied", "untied"):
        model = checkpoint(places[name], "LlamaForCausalLM", **SIZES, tie_word_embeddings=name == "tied")
        model.to(torch.bfloat16).save_pretrained(places[name])
    return places


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize(
    ("dtype", "quantize"), [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("float32", "int4")]
)
def test_a_model_takes_what_it_is_said_to_take(models, name, dtype, quantize):
    engine = {"device": "cpu", "dtype": dtype, "quantize": quantize}
    arguments = json.dumps([str(models["small"]), str(models[name]), engine])
    child = subprocess.run(
        [sys.executable, "-c", LOAD, arguments], capture_output=True, text=True, check=True, timeout=300
    )
    told = json.loads(child.stdout)
    # The embedding, of which rows are looked up, is the file's own pages, where it is of its type.
    own = told["asked"] - (2 * TABLE if dtype == "bfloat16" else 0)
    assert 0.97 * own < told["grown"] < 1.03 * own + SLACK_BYTES, told


def test_weights_that_fit_once_they_are_rounded_are_not_refused(models, monkeypatch):
    monkeypatch.setattr(load, "LEAST_PARAMETERS", 1 << 60)
    room = int(0.8 * NUM_LAYER_PARAMETERS + TABLE * 2.8)
    monkeypatch.setattr(loading, "free_bytes", lambda device: room)
    with pytest.raises(ModelError, match=r"the weights of .* take .* MiB in float32, but .* MiB of memory are free"):
        loading.load_model(str(models["untied"]), Engine(device="cpu", dtype="float32"))
    with pytest.raises(ModelError, match=r"the weights of .* take .* MiB in int8, but"):
        loading.load_model(str(models["untied"]), Engine(device="cpu", dtype="float32", quantize="int8"))
    loading.load_model(str(models["untied"]), Engine(device="cpu", dtype="bfloat16", quantize="int4"))
