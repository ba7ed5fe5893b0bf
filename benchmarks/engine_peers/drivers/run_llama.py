"""llama.cpp through llama-cpp-python's plain C interface: sequences side by side in one context, without a server.

The form is that of the weights (bf16, q8_0, q4_0), with "-fa" behind it for its flash attention.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import talk

MAX_BATCH_TOKENS = 2048
"""Its own default: what one call may take."""


class Llama:
    def prepare(self, checkpoint: Path, made: Path, form: str) -> None:
        import llama_cpp

        weights = form.removesuffix("-fa")
        target = made / f"{weights}.gguf"
        if target.exists():
            return
        plain = made / "bf16.gguf"
        if not plain.exists():
            write_gguf(checkpoint, plain)
        if weights != "bf16":
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[
                weights
            ]
            failed = llama_cpp.llama_model_quantize(str(plain).encode(), str(target).encode(), ctypes.byref(options))
            if failed:
                raise RuntimeError(f"llama_model_quantize returned {failed}")

    def load(self, checkpoint: Path, made: Path, form: str, facts: dict[str, Any]) -> dict[str, Any]:
        import llama_cpp

        self._llama = llama_cpp
        llama_cpp.llama_backend_init()
        path = made / f"{form.removesuffix('-fa')}.gguf"
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = facts["max_sequences"] * (facts["input_tokens"] + facts["output_tokens"])
        options.n_batch = MAX_BATCH_TOKENS
        options.n_seq_max = facts["max_sequences"]
        options.n_threads = options.n_threads_batch = facts["num_threads"]
        options.flash_attn_type = 1 if form.endswith("-fa") else 0
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context of this size")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        return {"version": llama_cpp.__version__, "weight_bytes": llama_cpp.llama_model_size(self._model)}

    def run(self, prompts: talk.Prompts, num_output_tokens: int) -> list[list[int]]:
        self._llama.llama_memory_clear(self._memory, True)
        written: list[list[int]] = [[] for _ in prompts]
        entries = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        for first in range(0, len(entries), MAX_BATCH_TOKENS):
            self._step(entries[first : first + MAX_BATCH_TOKENS], written)
        for number in range(num_output_tokens - 1):
            self._step(
                [(ids[-1], len(prompts[each]) + number, each, True) for each, ids in enumerate(written)], written
            )
        return written

    def _step(self, entries: list[tuple[int, int, int, bool]], written: list[list[int]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (token_id, position, sequence, wanted) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.logits[place] = token_id, position, wanted
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        failed = self._llama.llama_decode(self._context, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        for place, (_, _, sequence, wanted) in enumerate(entries):
            if wanted:
                logits = self._llama.llama_get_logits_ith(self._context, place)
                # Its own sampler makes an object of every token of the vocabulary; this is kinder to it.
                written[sequence].append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))


def write_gguf(checkpoint: Path, target: Path) -> None:
    """A checkpoint of the Llama or Qwen2 family in bfloat16, without a tokenizer."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    family = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}[config["architectures"][0]]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    parts = {"q": num_heads, "k": num_kv_heads}
    for name, values in tensors_of(checkpoint / "model.safetensors"):
        short = shortened(name)
        part = short.partition(".attn_")[2].partition(".")[0]
        if family == "llama" and part in parts:
            # Its Llama turns neighbours where the checkpoint turns halves.
            shape = values.shape
            values = values.reshape(parts[part], 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if values.ndim == 1:
            writer.add_tensor(short, (values.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(values).view(np.uint8)
            writer.add_tensor(short, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(path: Path) -> list[tuple[str, np.ndarray]]:
    """Names and bfloat16 bits [.., ..] u16 of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(length))
    body = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    found = []
    for name, entry in head.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", name
            start, stop = entry["data_offsets"]
            found.append((name, np.array(body[start:stop]).view(np.uint16).reshape(entry["shape"])))
    return found


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def shortened(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, inner = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[inner]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


if __name__ == "__main__":
    talk.serve(Llama())
