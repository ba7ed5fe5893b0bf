"""A GGUF in the place of a directory: the demo model, written as llama.cpp's converter would, says what it says."""

from __future__ import annotations

import json
from pathlib import Path

import transformers

import demo
from tests.journeys.test_process import serving
from tests.worker import gguf_files


def the_demo_as_gguf(path: Path) -> Path:
    model = transformers.LlamaForCausalLM.from_pretrained(demo.MODEL_DIR).float()
    description = json.loads((demo.MODEL_DIR / "tokenizer.json").read_text())
    added = {token["content"]: token for token in description["added_tokens"]}
    ids = {**description["model"]["vocab"], **{name: token["id"] for name, token in added.items()}}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    kinds = [1 if token not in added else 3 if added[token]["special"] else 4 for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-r1-qwen",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in description["model"]["merges"]],
        "tokenizer.chat_template": (demo.MODEL_DIR / "chat_template.jinja").read_text(),
    }
    gguf_files.write(path, "llama", model, "BF16", metadata)
    return path


def test_a_gguf_answers_as_the_directory_that_it_was_made_from(tmp_path):
    path = the_demo_as_gguf(tmp_path / "demo.gguf")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    said = []
    for source in ("demo", str(path)):
        directory = tmp_path / str(len(said))
        directory.mkdir()
        with serving(directory, PENSTOCK_MODELS__DEMO__SOURCE=source) as running:
            body = {"model": "demo", "messages": asked, "temperature": 0, "max_tokens": 40}
            with running.open("/v1/chat/completions", **body) as response:
                answer = json.load(response)
        # How many tokens are guessed depends on how long steps took.
        guessed = {"drafted_tokens", "accepted_tokens"}
        details = answer["usage"]["completion_tokens_details"]
        answer["usage"]["completion_tokens_details"] = {name: details[name] for name in details.keys() - guessed}
        said.append((answer["choices"], answer["usage"]))
    assert said[0] == said[1]
    assert said[0][0][0]["finish_reason"] == "stop"
