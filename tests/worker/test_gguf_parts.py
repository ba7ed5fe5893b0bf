"""A model whose GGUF is in several files, as llama.cpp's gguf-split and the hub have large ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker import gguf_files
from tests.worker.gguf_models import MODELS
from tests.worker.peer import WorkerProcess
from tests.worker.test_gguf import ENGINE, TOKEN_IDS, logits_of
from tests.worker.tiny import oracle_logits
from worker.models import ModelError, not_finite
from worker.runner import Runner


def a_model_in_parts(directory: Path, name: str = "llama", seed: int = 0, **options: Any) -> tuple[list[Path], Any]:
    """Of ten tensors each, the first of which has all the metadata; and the model."""
    architecture, changes = MODELS[name]
    model = gguf_files.a_model(architecture, seed, **changes)
    gguf_files.write(directory / "model.gguf", architecture, model, max_tensors=10, **options)
    return sorted(directory.glob("model-*.gguf")), model


@pytest.mark.parametrize(("name", "kinds"), [("llama", "Q4_0"), ("qwen3moe", {"": "F32", "experts": "Q4_0"})])
def test_what_is_in_parts_computes_what_transformers_does(tmp_path, name, kinds):
    parts, model = a_model_in_parts(tmp_path, name, kinds=kinds)
    assert len(parts) > 2
    for source in (parts[0], tmp_path):
        torch.testing.assert_close(logits_of(source), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


def test_ranks_share_a_model_in_parts(tmp_path):
    (first, *_), _ = a_model_in_parts(tmp_path, "mixtral", kinds="Q4_0")
    told = []
    for ranks in ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        with WorkerProcess(first, **ranks) as worker, worker.connect() as gateway:
            gateway.submit("a", TOKEN_IDS, 12)
            told.append(gateway.finish("a"))
    assert told[0] == told[1] == told[2]


REFUSED: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "a part that is missing": (
        lambda parts: parts[2].unlink(),
        "model-00003-of-0000.*.gguf cannot be read: .*No such file",
    ),
    "a part that is a pipe": (
        lambda parts: (parts[1].unlink(), os.mkfifo(parts[1])),
        "model-00002-of-0000.*.gguf cannot be read: it is no regular file",
    ),
    "a part that is cut short": (
        lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-500]),
        "model-00002-of-0000.*.gguf cannot be read as GGUF: it is cut short: its tensor",
    ),
    "a part that is another one": (
        lambda parts: shutil.copy(parts[2], parts[1]),
        "it says that it is part 3 of ., and by its name it is part 2 of .",
    ),
    "a part of another model": (
        lambda parts: shutil.copy(a_model_in_parts(parts[0].parent / "other", "qwen3moe")[0][1], parts[1]),
        "it says that it is part 2 of .*, and by its name it is part 2 of",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_parts_that_do_not_belong_together_are_refused_in_one_sentence(tmp_path, what):
    spoil, sentence = REFUSED[what]
    (tmp_path / "other").mkdir()
    parts, _ = a_model_in_parts(tmp_path)
    spoil(parts)
    with pytest.raises(ModelError, match=sentence) as refusal:
        Runner.load(str(parts[0]), ENGINE)
    assert "\n" not in str(refusal.value)


def test_another_part_than_the_first_is_not_taken_for_the_model(tmp_path):
    parts, _ = a_model_in_parts(tmp_path)
    with pytest.raises(ModelError, match=f"is part 2 of {len(parts)} of a model; name the first, {parts[0].name}$"):
        Runner.load(str(parts[1]), ENGINE)
    parts[0].unlink()
    with pytest.raises(ModelError, match=f"holds parts of a GGUF file without the first, {parts[0].name}$"):
        Runner.load(str(tmp_path), ENGINE)


def test_the_part_is_named_in_which_something_is_no_number(tmp_path):
    extra = {"blk.9.attn_q.weight": np.full((96, 256), np.nan, np.float32)}
    parts, _ = a_model_in_parts(tmp_path, extra=extra)
    assert not_finite(parts[0]) == f"tensor blk.9.attn_q.weight of {parts[-1]} holds values that are no numbers"
