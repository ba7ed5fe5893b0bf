"""Checkpoints that others quantised, in Hugging Face layout: each published method into our own stored forms.

An importer knows one method's names, shapes and packing; which tensors there are and what is wrong with them is the
checkpoint's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from worker.models.errors import ModelError
from worker.models.fields import Fields
from worker.models.fitting import Fit
from worker.models.forms import Form
from worker.models.importers.awq import Awq
from worker.models.importers.compressed_tensors import CompressedTensors
from worker.models.importers.finegrained_fp8 import FinegrainedFp8
from worker.models.importers.gptq import Gptq
from worker.models.importers.modelopt import ModelOpt
from worker.models.importers.mxfp4 import Mxfp4
from worker.models.weights import Checkpoint, read_json

__all__ = ["NOT_NEEDED", "Importer", "Mxfp4", "importer_of", "method_of"]

NOT_NEEDED = tuple(
    f".{which}_{what}"
    for which in ("input", "activation", "output", "k", "v", "q", "kv")
    for what in ("scale", "zero_point", "global_scale")
)
"""Endings of what was measured about activations and keys and values: both are quantised here, if they are, by their
own measure at run time."""


class Importer(Protocol):
    """One method, as one checkpoint's configuration has it."""

    def matrix(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], fit: Fit) -> Form | None:
        """The module's matrix, ``shape`` [out, in]; None where the configuration leaves this one as it was. ``fit``:
        what makes a form of one that there is none for. Raises ModelError."""
        ...


def importer_of(directory: Path) -> Importer | None:
    """From config.json, or what is written beside it by modelopt and by what AutoGPTQ and AutoAWQ were; None where the
    checkpoint is not quantised. Raises ModelError."""
    config = read_json(directory / "config.json")
    raw, place = _said(directory, config)
    if raw is None:
        return None
    names = config.get("architectures") or ["model"]
    architecture = str(names[0])
    if not isinstance(raw, dict):
        raise ModelError(f"config.json of this {architecture} has an impossible quantization_config: {str(raw)[:80]}")
    fields = Fields(raw, architecture, f"{place} of this {architecture}")
    method = fields.text("quant_method")
    if method not in _METHODS:
        supported = ", ".join(_METHODS)
        raise ModelError(
            f"this {architecture} is quantised by {method[:80]}, which is not supported; supported are {supported}"
        )
    return _METHODS[method](fields)


def method_of(directory: Path) -> str:
    """By which it is quantised, in its own words; empty: by none. Raises ModelError."""
    raw, _ = _said(directory, read_json(directory / "config.json"))
    return str(raw.get("quant_method", ""))[:80] if isinstance(raw, dict) else ""


def _said(directory: Path, config: dict[str, Any]) -> tuple[Any, str]:
    """And where it is said."""
    raw = config.get("quantization_config") or config.get("compression_config")
    return _beside(directory) if raw is None else (raw, "quantization_config")


def _beside(directory: Path) -> tuple[dict[str, Any] | None, str]:
    """What a file of its own says, in the words of ``quantization_config``, and the file's name. Raises ModelError."""
    if (path := directory / "hf_quant_config.json").is_file():
        said = read_json(path).get("quantization")
        if isinstance(said, dict) and said.get("quant_algo"):
            return {**said, "quant_method": _MODELOPT}, path.name
    if (path := directory / "quantize_config.json").is_file():
        return {"quant_method": _GPTQ, **read_json(path)}, path.name
    if (path := directory / "quant_config.json").is_file() and "w_bit" in (said := read_json(path)):
        renamed = {"bits": said["w_bit"], "group_size": said.get("q_group_size", 128)}
        return {"quant_method": _AWQ, **said, **renamed}, path.name
    return None, ""


_AWQ, _GPTQ, _MODELOPT = "awq", "gptq", "modelopt"
_METHODS: dict[str, Callable[[Fields], Importer]] = {
    "compressed-tensors": CompressedTensors,
    _AWQ: Awq,
    _GPTQ: Gptq,
    "fp8": FinegrainedFp8,
    _MODELOPT: ModelOpt,
    "mxfp4": Mxfp4,
}
