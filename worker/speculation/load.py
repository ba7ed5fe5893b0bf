"""What ``engine.speculation.draft_model`` names, as a drafter: a small model, or heads that belong to the large one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from demo import DRAFT_DIR
from policies import settings
from worker.loading import load_model
from worker.means import kernels_of
from worker.models import ModelError, path_of
from worker.models.foreign.load import is_native
from worker.models.weights import read_json
from worker.parallel.runner import ParallelRunner
from worker.room import room
from worker.runner import Runner
from worker.speculation.drafter import Drafter
from worker.speculation.eagle import EagleDrafter, is_eagle, load_eagle
from worker.speculation.medusa import MedusaDrafter, is_medusa, load_heads
from worker.speculation.model import ModelDrafter

SHARE = 0.25
"""Of the blocks that the small model could have if it were alone."""


def draft_model(
    source: str,
    engine: settings.Engine,
    target: Runner | ParallelRunner,
    now: Callable[[], float],
) -> Drafter | None:
    """The configured one, model or heads, or the one that belongs to the demo model; None: there is none. Raises
    ModelError."""
    asked = engine.speculation
    if not asked.enabled or "model" not in asked.drafters:
        return None
    path = asked.draft_model or (str(DRAFT_DIR) if source == "demo" else "")
    if not path:
        return None
    if not isinstance(target, Runner):
        if asked.draft_model:
            raise ModelError("engine.speculation.draft_model works beside a model in one process only")
        return None
    directory = path_of(path)
    if is_eagle(directory):
        if not is_native(path_of(source)):
            raise ModelError(f"the EAGLE head {path} needs a model that is not served by way of transformers")
        return EagleDrafter(load_eagle(directory, target.keep_hidden(), source, target.max_model_tokens), now)
    if is_medusa(directory):
        if not is_native(path_of(source)):
            raise ModelError(f"the Medusa heads {path} need a model that is not served by way of transformers")
        return MedusaDrafter(target, load_heads(directory, target.keep_hidden(), source), now)
    if not is_native(directory):
        raise ModelError(f"the draft model {path} is of an architecture that cannot draft")
    # In as many tokens as the large one, and as many threads. In int8 the demo's is right as often, in half the time;
    # and whatever it guesses, what comes of it is repeatable.
    kernels = kernels_of(engine, torch.device(target.device))
    quantize: settings.Quantization = "int8" if kernels is not None and kernels.has_int8 else "none"
    plain = msgspec.structs.replace(engine, quantize=quantize, deterministic=False, kv_dtype="auto", max_model_tokens=0)
    model = load_model(path, plain, turn=None)
    vocab_size = model.architecture.vocab_size
    if vocab_size != target.vocab_size:
        raise ModelError(
            f"the draft model {path} has a vocabulary of {vocab_size} tokens, but {source} one of {target.vocab_size}"
        )
    if not _same_words(directory, path_of(source)):
        raise ModelError(f"the draft model {path} has another vocabulary than {source}")
    size = max(1, int(SHARE * room(model, plain)))
    drafter = ModelDrafter(Runner.of(model, plain, min(size, target.num_blocks)), now)
    drafter.rehearse()
    return drafter


def _same_words(draft: Path, target: Path) -> bool:
    """Whether both have the same tokens, as far as their tokenizers lie beside them. Raises ModelError."""
    files = [directory / "tokenizer.json" for directory in (draft, target)]
    if not all(file.is_file() for file in files):
        return True
    mine, theirs = (_words(file) for file in files)
    return bool(mine == theirs)


def _words(file: Path) -> object:
    model = read_json(file).get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ModelError(f"{file} has no vocabulary")
    return model["vocab"]
