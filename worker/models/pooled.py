"""How a model's vectors are made, by the files that sentence-transformers keeps beside its weights: modules.json, and a
config.json in the directory of each module."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from policies.wire import Pooling
from sources import content, is_gguf

KINDS = {"cls": "first", "cls_token": "first", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
"""Their names for what is pooled, and ours."""

log = logging.getLogger("penstock.worker")


def pooling_of(path: Path, default: Pooling) -> Pooling | None:
    """``default`` where the files say nothing; None, and a line in the log, where they ask for what is not done
    here."""
    if is_gguf(path) or not (path / "modules.json").exists():
        return default
    try:
        return _of_modules(path, default)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("no vectors are given: %s asks for what is not done here (%s)", path / "modules.json", error)
        return None


def _of_modules(path: Path, default: Pooling) -> Pooling:
    kind, is_normalized = default.kind, False
    for module in json.loads(content(path / "modules.json")):
        match module["type"].rpartition(".")[2]:
            case "Transformer":
                if module["path"]:
                    raise ValueError(f"the model itself is in {module['path']}")
            case "Pooling":
                kind = _kind(json.loads(content(path / module["path"] / "config.json")))
            case "Normalize":
                is_normalized = True
            case other:
                raise ValueError(f"a module {other}")
    return Pooling(kind, is_normalized)


def _kind(config: dict[str, Any]) -> Any:
    named = config.get("pooling_mode")
    if named is None:
        named = [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True]
        named = [name for name in named if name != "include_prompt"]
    elif isinstance(named, str):
        named = [named]
    if len(named) != 1 or named[0] not in KINDS:
        raise ValueError(f"pooling by {', '.join(named) or 'nothing'}")
    return KINDS[named[0]]
