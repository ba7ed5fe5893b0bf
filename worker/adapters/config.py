"""adapter_config.json, as PEFT writes it: how far each matrix's addition is scaled, and what cannot be served.

A field that would change what is computed, and that we do not compute, is refused by its name, whether we know it or
not; a field that is absent, null or false asks for nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.adapters.errors import AdapterError
from worker.expressions import Expressions, SlowExpression

OF_TRAINING = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config"),
        *("lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size"),
        *("revision", "runtime_config", "target_modules", "task_type", "velora_config"),
    )
)
"""How the adapter was made or which matrices it was made for: its tensors say what is left of it."""
READ = frozenset(
    (
        *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern"),
        *("target_parameters", "use_rslora"),
    )
)
KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the base's own weights as they are; the others are an addition to another matrix."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How much of each product is added."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """By pattern, for modules that have another."""
    alphas: Mapping[str, float]
    by_root: bool
    """alpha / sqrt(rank) (Kalajdzievski 2023, "rsLoRA") rather than alpha / rank (Hu et al. 2021)."""
    parameters: tuple[str, ...]
    """Ends of names of what is changed as a parameter of a module, rather than as a module."""
    expressions: Expressions
    """Of the patterns."""
    path: Path

    def rank_of(self, module: str) -> int:
        """``module``: its name in the base, "model.layers.0.self_attn.q_proj". Raises AdapterError, as ``factor``."""
        return self.ranks.get(self._pattern_for(self.ranks, module), self.rank)

    def factor(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = self.alphas.get(self._pattern_for(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def _pattern_for(self, patterns: Mapping[str, float], module: str) -> str:
        try:
            return next((each for each in patterns if self.expressions.match(_of_end(each), module)), "")
        except SlowExpression as slow:
            raise AdapterError(f"{self.path}: its patterns take too long to match, as {slow}") from None


def scaling_of(config: Mapping[str, Any], path: Path) -> Scaling:
    """What an adapter_config.json says. Raises AdapterError."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {kind!r}; only LORA is served")
    for name, value in sorted(config.items()):
        if value and name not in READ and name not in OF_TRAINING:
            raise AdapterError(f"{path}: {name} is set, which is not served")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias is {config['bias']!r}; trained biases are not served")
    if (begun := config.get("init_lora_weights", True)) not in KEEPS_BASE:
        raise AdapterError(
            f"{path}: init_lora_weights is {begun!r}, which changes the base too; save the adapter as one for the"
            " unchanged base (PEFT's path_initial_model_for_weight_conversion)"
        )
    expressions = Expressions()
    ranks, alphas = (_patterns(config, name, path, expressions) for name in ("rank_pattern", "alpha_pattern"))
    return Scaling(
        rank=_rank(config, "r", path),
        alpha=_number(config, "lora_alpha", path),
        ranks={pattern: _rank(ranks, pattern, path) for pattern in ranks},
        alphas={pattern: _number(alphas, pattern, path) for pattern in alphas},
        by_root=_flag(config, "use_rslora", path),
        parameters=_names(config, "target_parameters", path),
        expressions=expressions,
        path=path,
    )


def _of_end(pattern: str) -> str:
    """As PEFT matches (``get_pattern_key``): a pattern is the end of a module's name, from a dot on."""
    return rf"(.*\.)?({pattern})\Z"


def _names(config: Mapping[str, Any], name: str, path: Path) -> tuple[str, ...]:
    names = config.get(name) or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise AdapterError(f"{path}: {name} is no list of names")
    return tuple(names)


def _number(config: Mapping[str, Any], name: str, path: Path) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise AdapterError(f"{path}: {name} is {repr(value)[:80]}, not a positive number")
    return float(value)


def _rank(config: Mapping[str, Any], name: str, path: Path) -> int:
    value = _number(config, name, path)
    if value % 1:
        raise AdapterError(f"{path}: {name} is {value!r}, and a rank is a whole number")
    return int(value)


def _flag(config: Mapping[str, Any], name: str, path: Path) -> bool:
    value = config.get(name) or False
    if not isinstance(value, bool):
        raise AdapterError(f"{path}: {name} is {repr(value)[:80]}, neither true nor false")
    return value


def _patterns(config: Mapping[str, Any], name: str, path: Path, expressions: Expressions) -> dict[str, Any]:
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{path}: {name} is no object")
    for pattern in patterns:
        try:
            expressions.add(_of_end(pattern))
        except ValueError:
            raise AdapterError(f"{path}: {name} has {pattern[:200]!r}, which is no regular expression") from None
    return patterns
