"""Adapters as PEFT writes them, over the tiny models, and what PEFT says with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import torch

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def adapter_files(directory: Path, model: Any, seed: int, **config: Any) -> Any:
    """A random adapter for this model, saved to ``directory``; the model as PEFT changes it."""
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 8, "target_modules": EVERY, **config}
    changed = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    changed.save_pretrained(str(directory))
    return changed.eval()
