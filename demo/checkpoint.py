"""A trained network as a Hugging Face directory: config, generation config, tokenizer, chat template, bf16 weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo import tokenizer as chat
from demo.network import Decoder


def save(decoder: Decoder, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    eos, pad = chat.token_id(tokenizer, chat.END), chat.token_id(tokenizer, chat.END_OF_TEXT)
    generation = {"eos_token_id": [eos, pad], "pad_token_id": pad, "do_sample": False}
    for name, content in (("config.json", decoder.shape.config(eos, pad)), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    chat.save(tokenizer, directory, decoder.shape.max_positions)
    weights = {f"model.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in decoder.state_dict().items()}
    partial = directory / "model.safetensors.partial"
    save_file(weights, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.rename(directory / "model.safetensors")
