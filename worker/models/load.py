"""From a source to a Decoder: find the directory, read config.json, take the tensors, fuse and convert them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from worker.models.architecture import Architecture
from worker.models.decoder import Decoder, Layer
from worker.models.errors import ModelError
from worker.models.families import architecture_of, token_ids
from worker.models.forms import Form, Plain, joined
from worker.models.linear import Linear, linear_of
from worker.models.quantize import quantized
from worker.models.shard import Part, Shard
from worker.models.weights import Checkpoint, read_json
from worker.native import Library

Quantization = Literal["none", "int8", "int4", "fp8"]
HEAD = "lm_head.weight"


class Source(Protocol):
    """Where a decoder's weights come from, by their names in a checkpoint without the leading "model."."""

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """In the engine's type, on its device; ``shape`` is that of the whole, of which only the part is wanted. Raises
        ModelError."""
        ...

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:
        """``name`` is that of the module, without ".weight"; a plain one is in the engine's type, and all are on its
        device. Raises ModelError."""
        ...


class PlainSource:
    """A Source that has nothing but floats, which cost nothing to make."""

    def __init__(self, take: Callable[[str, tuple[int, ...]], Tensor]) -> None:
        """``take``: name and shape to a tensor in the engine's type, on its device."""
        self._take = take

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """See Source."""
        tensor = self._take(name, shape)
        return tensor if part is None else part.of(tensor)

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Plain:
        """See Source."""
        return Plain(self.tensor(f"{name}.weight", shape, part))


class CheckpointSource:
    """The Source that a directory of plain safetensors is."""

    def __init__(self, checkpoint: Checkpoint, root: str, dtype: torch.dtype, device: torch.device) -> None:
        """``root``: what the names of all tensors but the head's begin with."""
        self._checkpoint, self._root, self._dtype, self._device = checkpoint, root, dtype, device

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """See Source."""
        whole_name = name if name == HEAD else self._root + name
        return self._checkpoint.take(whole_name, shape, part).to(self._device, self._dtype)

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Plain:
        """See Source."""
        return Plain(self.tensor(f"{name}.weight", shape, part))


class ShardSource:
    """What one rank takes from the Source of the whole model, by its own names and shapes."""

    def __init__(self, source: Source, shard: Shard) -> None:
        self._source, self._shard = source, shard

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """See Source."""
        assert part is None
        name = self._shard.whole_name(name)
        tensor = self._source.tensor(name, *self._shard.part(name, shape))
        return tensor if not name.endswith(".bias") or self._shard.adds_bias(name) else torch.zeros_like(tensor)

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:
        """See Source."""
        assert part is None
        name = self._shard.whole_name(name)
        (num_rows, num_columns), own = self._shard.part(name, shape)
        try:
            return self._source.matrix(name, (num_rows, num_columns), own)
        except ValueError as error:
            raise ModelError(
                f"matrix {name} cannot be shared among {self._shard.layout.tensor} ranks: {error}"
            ) from None


def directory_of(source: str) -> Path:
    """Where the model's files are: a directory as it stands, the bundled model for "demo", a hub id's snapshot. Raises
    ModelError.
    """
    if source == "demo":
        import demo

        return Path(demo.MODEL_DIR)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{source} is a file; a model is a directory in Hugging Face layout")
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ModelError(f"there is no directory {source}, and it is no hub id (OWNER/NAME) either")
    return _snapshot(source)


def _snapshot(hub_id: str) -> Path:
    # Slow to import, and not needed for a directory.
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
            )
        )
    except RepositoryNotFoundError:
        raise ModelError(f"the hub has no model {hub_id} that is open to this machine") from None
    except HFValidationError:
        raise ModelError(f"there is no directory {hub_id}, and it is no hub id (OWNER/NAME) either") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"there is no directory {hub_id}, and the hub cannot be reached to download it: {reason}"
        ) from None


def read_architecture(directory: Path) -> Architecture:
    """What config.json and generation_config.json say. Raises ModelError."""
    architecture = architecture_of(read_json(directory / "config.json"))
    if (directory / "generation_config.json").exists():
        eos_token_ids = token_ids(read_json(directory / "generation_config.json").get("eos_token_id"))
        if eos_token_ids:
            return replace(architecture, eos_token_ids=eos_token_ids)
    return architecture


def load_decoder(
    directory: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    max_model_tokens: int,
    kernels: Library | None = None,
    quantization: Quantization = "none",
    shard: Shard | None = None,
) -> Decoder:
    """``kernels``: what the matrices may be packed for; ``shard``: what of the model is wanted, None: all. Raises
    ModelError.
    """
    shard = shard or Shard.of(architecture)
    with Checkpoint(directory) as checkpoint:
        roots = architecture.tensor_roots
        root = next((root for root in roots if f"{root}embed_tokens.weight" in checkpoint), roots[0])
        if roots != ("model.",):
            checkpoint.keep(root, HEAD)
        if architecture.tied:
            # Some checkpoints save the embedding twice.
            checkpoint.drop(HEAD)
        checkpoint.drop_where(lambda name: shard.misses(name.removeprefix(root)))
        source = CheckpointSource(checkpoint, root, dtype, device)
        decoder = build_decoder(shard, source, dtype, device, max_model_tokens, kernels, quantization)
        checkpoint.finish()
    return decoder


def build_decoder(
    shard: Shard,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    max_model_tokens: int,
    kernels: Library | None = None,
    quantization: Quantization = "none",
) -> Decoder:
    """``source`` is that of the whole model, and ``quantization`` what plain matrices become; the embedding is looked
    up, not multiplied, and stays plain.
    """
    own = shard.own
    source = ShardSource(source, shard)
    size = (len(shard.vocabulary), own.hidden_size)
    needs_embedding = shard.is_first or (shard.is_last and own.tied)
    embedding = source.tensor("embed_tokens.weight", size) if needs_embedding else None
    builder = _Builder(own, source, kernels, quantization, dtype)
    layers = [builder.layer(f"layers.{index}.") for index in range(own.num_layers)]
    norm = head = None
    if shard.is_last:
        norm = builder.norm("norm.weight", own.hidden_size)
        head = builder.head(Plain(embedding) if own.tied and embedding is not None else source.matrix("lm_head", size))
    return Decoder(shard, dtype, device, embedding, layers, norm, head, max_model_tokens)


class _Builder:
    """From a source to layers: fused, quantised where that is asked for, and packed."""

    def __init__(
        self,
        architecture: Architecture,
        source: Source,
        kernels: Library | None,
        quantization: Quantization,
        dtype: torch.dtype,
    ) -> None:
        self._architecture, self._source, self._kernels = architecture, source, kernels
        self._quantization, self._dtype = quantization, dtype

    def head(self, form: Form) -> Linear:
        return self._linear(form, None)

    def norm(self, name: str, size: int) -> Tensor:
        return self._source.tensor(name, (size,)).float() + self._architecture.norm_offset

    def layer(self, prefix: str) -> Layer:
        architecture = self._architecture
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        queries = architecture.num_heads * architecture.head_dim
        keys = architecture.num_kv_heads * architecture.head_dim

        def linear(fused: str, parts: dict[str, int], num_inputs: int, bias: bool) -> Linear:
            """One matrix of the parts below each other, whether the checkpoint has them apart or as ``fused``."""
            if architecture.fused and len(parts) > 1:
                parts = {fused: sum(parts.values())}
            forms = [self._source.matrix(prefix + name, (size, num_inputs)) for name, size in parts.items()]
            biases = [self._source.tensor(f"{prefix}{name}.bias", (size,)) for name, size in parts.items() if bias]
            # Parts that a checkpoint quantised unlike each other go together as floats only.
            form = joined(forms) or Plain(torch.cat([form.dense(self._dtype) for form in forms]))
            return self._linear(form, torch.cat(biases) if biases else None)

        def norm(name: str, size: int) -> Tensor | None:
            return self.norm(f"{prefix}{name}.weight", size) if name else None

        has_qk_norm = architecture.qk_norm != "none"
        over_width = architecture.qk_norm == "width"
        attention = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        return Layer(
            qkv=linear("self_attn.qkv_proj", attention, hidden, architecture.qkv_bias),
            output=linear("", {"self_attn.o_proj": hidden}, queries, architecture.output_bias),
            gate_up=linear(
                "mlp.gate_up_proj", {"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, architecture.mlp_bias
            ),
            down=linear("", {"mlp.down_proj": hidden}, inner, architecture.mlp_bias),
            attention_pre_norm=norm(architecture.attention_pre_norm, hidden),
            attention_post_norm=norm(architecture.attention_post_norm, hidden),
            mlp_pre_norm=norm(architecture.mlp_pre_norm, hidden),
            mlp_post_norm=norm(architecture.mlp_post_norm, hidden),
            query_norm=norm(
                "self_attn.q_norm" if has_qk_norm else "", queries if over_width else architecture.head_dim
            ),
            key_norm=norm("self_attn.k_norm" if has_qk_norm else "", keys if over_width else architecture.head_dim),
        )

    def _linear(self, form: Form, bias: Tensor | None) -> Linear:
        if self._quantization != "none":
            form = quantized(form, self._quantization)
        return linear_of(form, bias, self._kernels)
