"""A trained network as a Hugging Face directory: config, generation config, tokenizer, chat template, bf16 weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from demo import tokenizer as chat
from demo.network import Decoder, Shape


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


def load(directory: Path) -> tuple[Decoder, Tokenizer]:
    """What `save` wrote, in float32."""
    config = json.loads((directory / "config.json").read_text())
    names = {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "rope_theta": "rope_theta",
        "norm_eps": "rms_norm_eps",
    }
    decoder = Decoder(Shape(**{field: config[name] for field, name in names.items()}))
    weights = load_file(str(directory / "model.safetensors"))
    decoder.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
    return decoder, Tokenizer.from_file(str(directory / "tokenizer.json"))
