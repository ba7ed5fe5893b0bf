"""From files to a Decoder: read the architecture, take the tensors, fuse and convert them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from policies.engine import Quantization
from sources import is_gguf
from worker.models.architecture import Architecture, Latent, Mixture
from worker.models.decoder import Decoder, Layer
from worker.models.errors import ModelError
from worker.models.experts import Experts, goes_together, together_of
from worker.models.facts import token_ids
from worker.models.families import architecture_of
from worker.models.fitting import together
from worker.models.forms import Form, Plain
from worker.models.gguf import GgufFile, GgufSource, architecture_of_gguf
from worker.models.importers import NOT_NEEDED, importer_of
from worker.models.latent import LatentAttention
from worker.models.linear import ALONE, Linear, Means, linear_by_head, linear_of
from worker.models.quantize import quantized
from worker.models.quantized_cache import LEAST_PARAMETERS, QuantizingSource, name_of
from worker.models.read_ahead import ReadAhead
from worker.models.shard import Shard
from worker.models.sources import HEAD, CheckpointSource, FileSource, ShardSource, Source
from worker.models.stacks import Stack, Stacking
from worker.models.weights import Checkpoint, read_json


def read_architecture(path: Path) -> Architecture:
    """What config.json and generation_config.json say, or the metadata of a GGUF. Raises ModelError."""
    if is_gguf(path):
        return _with_ends(architecture_of_gguf(GgufFile(path)), path)
    return _of_directory(path)


def _of_directory(directory: Path) -> Architecture:
    config = read_json(directory / "config.json")
    architecture = architecture_of(config)
    importer_of(directory)  # what cannot be read is refused before anything is
    generation = directory / "generation_config.json"
    if generation.exists():
        eos_token_ids = token_ids(read_json(generation).get("eos_token_id"), generation)
        if eos_token_ids:
            return _with_ends(replace(architecture, eos_token_ids=eos_token_ids), generation)
    return _with_ends(architecture, directory / "config.json")


def _with_ends(architecture: Architecture, place: Path) -> Architecture:
    """The same, whose answers can end. ``place``: where its end tokens are said. Raises ModelError."""
    vocab_size = architecture.vocab_size
    for token_id in architecture.eos_token_ids:
        if not 0 <= token_id < vocab_size:
            raise ModelError(f"{place} has answers end with token {token_id}, but the vocabulary has {vocab_size}")
    return architecture


def load_decoder(
    path: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    max_model_tokens: int,
    means: Means = ALONE,
    quantization: Quantization = "none",
    shard: Shard | None = None,
    room_bytes: int = 0,
) -> Decoder:
    """``shard``: what of the model is wanted, None: all; ``room_bytes``: of memory, for what is read ahead of its
    files. Raises ModelError.
    """
    shard = shard or Shard.of(architecture)
    is_small = architecture.num_parameters < LEAST_PARAMETERS
    before = "" if is_small else name_of(path, quantization, dtype, shard)

    def build(source: FileSource, paths: list[Path], is_rounded: bool, finish: Callable[[], None]) -> Decoder:
        """``paths``: of the files; ``is_rounded``: so some matrices may be, here or where they are read."""
        if not is_rounded or is_small:
            with ReadAhead(paths, room_bytes):
                decoder = build_decoder(shard, source, dtype, device, max_model_tokens, means, quantization)
            finish()
            return decoder
        # Where somebody puts others in the files' place while they are opened, nobody knows which these are.
        name = name_of(path, quantization, dtype, shard)
        with QuantizingSource(source, name if name == before else "", quantization) as kept:
            with ReadAhead(kept.paths(paths), room_bytes):
                decoder = build_decoder(shard, kept, dtype, device, max_model_tokens, means, quantization)
            finish()
            kept.finish()
        return decoder

    if is_gguf(path):
        file = GgufFile(path)
        weights = GgufSource(file, architecture, dtype, device)
        return build(weights, file.paths, True, lambda: weights.finish(shard.misses))
    with Checkpoint(path) as checkpoint:
        roots = architecture.tensor_roots
        root = next((root for root in roots if f"{root}embed_tokens.weight" in checkpoint), roots[0])
        if roots != ("model.",):
            checkpoint.keep(root, HEAD)
        if architecture.tied:
            if HEAD in checkpoint and "" not in roots:
                _refuse_another_head(checkpoint, f"{root}embed_tokens.weight", architecture, path)
            checkpoint.drop(HEAD)
        checkpoint.drop_where(lambda name: shard.misses(name.removeprefix(root)))
        importer = importer_of(path)
        if importer is not None:
            checkpoint.drop_where(lambda name: name.endswith(NOT_NEEDED))
        source = CheckpointSource(checkpoint, root, dtype, device, importer)
        is_rounded = quantization != "none" or importer is not None
        return build(source, checkpoint.paths, is_rounded, checkpoint.finish)


def _refuse_another_head(checkpoint: Checkpoint, table: str, architecture: Architecture, path: Path) -> None:
    """Some checkpoints save the embedding twice; in others the head went on by itself. Raises ModelError."""
    shape = architecture.vocab_size, architecture.hidden_size
    embedding, head = checkpoint.peek(table, shape), checkpoint.peek(HEAD, shape)
    if not torch.equal(embedding, head.to(embedding.dtype)):
        raise ModelError(
            f"{path} has an {HEAD} that is not {table}, which its config.json ties it to; tie_word_embeddings is to be"
            " false there if the head is meant, or the tensor is to go"
        )


def build_decoder(
    shard: Shard,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    max_model_tokens: int,
    means: Means = ALONE,
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
    builder = _Builder(own, source, means, quantization, dtype, device)
    layers = [builder.layer(index) for index in range(own.num_layers)]
    norm = head = None
    if shard.is_last:
        norm = builder.norm("norm.weight", own.hidden_size) * own.head_scale
        if own.tied and embedding is not None:
            head = builder.head(source.tied("embed_tokens", size, embedding))
        else:
            head = builder.head(source.matrix("lm_head", size))
    return Decoder(shard, dtype, device, embedding, layers, norm, head, max_model_tokens)


GATE_UP = "mlp.gate_up_proj"
_OfExperts = tuple[list[Linear], Stack | None]
"""One product's matrices, and all in one where there are kernels for that."""


class _Builder:
    """From a source to layers: fused, quantised where that is asked for, and packed."""

    def __init__(
        self,
        architecture: Architecture,
        source: Source,
        means: Means,
        quantization: Quantization,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._architecture, self._source, self._means = architecture, source, means
        self._quantization, self._dtype, self._device = quantization, dtype, device

    def head(self, form: Form) -> Linear:
        return self._linear(form, None)

    def norm(self, name: str, size: int) -> Tensor:
        return self._source.tensor(name, (size,)).float() + self._architecture.norm_offset

    def layer(self, layer: int) -> Layer:
        prefix = f"layers.{layer}."
        architecture = self._architecture
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        queries = architecture.num_heads * architecture.head_dim
        keys = architecture.num_kv_heads * architecture.head_dim

        def form(parts: dict[str, int], num_inputs: int) -> Form:
            """One matrix of the parts below each other."""
            names = {prefix + name: size for name, size in parts.items()}
            forms = {name: self._source.matrix(name, (size, num_inputs)) for name, size in names.items()}
            return together(forms, self._dtype, self._source.eight)

        def linear(fused: str, parts: dict[str, int], num_inputs: int, bias: bool) -> Linear:
            """Whether the checkpoint has the parts apart or as ``fused``."""
            if architecture.fused and len(parts) > 1:
                parts = {fused: sum(parts.values())}
            biases = [self._source.tensor(f"{prefix}{name}.bias", (size,)) for name, size in parts.items() if bias]
            return self._linear(form(parts, num_inputs), torch.cat(biases) if biases else None, fused == GATE_UP)

        def norm(name: str, size: int) -> Tensor | None:
            return self.norm(f"{prefix}{name}.weight", size) if name else None

        def mlp(at: str, size: int, bias: bool) -> tuple[Linear, Linear]:
            gate_up = linear(GATE_UP, {f"{at}.gate_proj": size, f"{at}.up_proj": size}, hidden, bias)
            return gate_up, linear("", {f"{at}.down_proj": hidden}, size, bias)

        has_qk_norm = architecture.qk_norm != "none"
        over_width = architecture.qk_norm == "width"
        experts = gate_up = down = qkv = attention = None
        mixture, latent = architecture.mixture, architecture.latent
        if mixture is None or layer < mixture.num_dense:
            gate_up, down = mlp("mlp", inner if mixture is None else mixture.dense_size, architecture.mlp_bias)
        elif mixture.is_stacked:
            experts = self._stacked(prefix, mixture)
        else:
            # Before anything is made for each of the experts: by its rows it says that they are so many.
            router = self._router(prefix, mixture, None)
            below = [f"{mixture.experts}.{expert}." for expert in range(mixture.num_experts)]
            name = f"{prefix}{mixture.router}.e_score_correction_bias"
            experts = self._experts(
                mixture,
                router,
                self._matrices(
                    (form({at + mixture.gate: inner, at + mixture.up: inner}, hidden) for at in below), True
                ),
                self._matrices((form({at + mixture.down: hidden}, inner) for at in below), False),
                self._source.tensor(name, (mixture.num_experts,), dtype=torch.float32)
                if mixture.scores == "sigmoid"
                else None,
                (
                    *mlp("mlp.shared_experts", mixture.shared_size, False),
                    self._shared_router(prefix) if mixture.is_shared_weighed else None,
                )
                if mixture.shared_size
                else (None, None, None),
            )
        if latent is None:
            parts = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
            qkv = linear("self_attn.qkv_proj", parts, hidden, architecture.qkv_bias)
        else:
            attention = self._latent(f"{prefix}self_attn.", latent)
            queries = architecture.num_heads * latent.value_dim
        return Layer(
            qkv=qkv,
            latent=attention,
            output=linear("", {"self_attn.o_proj": hidden}, queries, architecture.output_bias),
            gate_up=gate_up,
            down=down,
            experts=experts,
            attention_pre_norm=norm(architecture.attention_pre_norm, hidden),
            attention_post_norm=norm(architecture.attention_post_norm, hidden),
            mlp_pre_norm=norm(architecture.mlp_pre_norm, hidden),
            mlp_post_norm=norm(architecture.mlp_post_norm, hidden),
            query_norm=norm(
                "self_attn.q_norm" if has_qk_norm else "", queries if over_width else architecture.head_dim
            ),
            key_norm=norm("self_attn.k_norm" if has_qk_norm else "", keys if over_width else architecture.head_dim),
            sinks=self._source.tensor(f"{prefix}self_attn.sinks", (architecture.num_heads,)).float()
            if architecture.sinks
            else None,
        )

    def _latent(self, prefix: str, latent: Latent) -> LatentAttention:
        architecture, source = self._architecture, self._source
        hidden, num_heads = architecture.hidden_size, architecture.num_heads

        def linear(name: str, num_outputs: int, num_inputs: int, bias: bool = False) -> Linear:
            form = source.matrix(prefix + name, (num_outputs, num_inputs))
            return self._linear(form, source.tensor(f"{prefix}{name}.bias", (num_outputs,)) if bias else None)

        num_queries = num_heads * (latent.key_dim + latent.rope_dim)
        compressed_queries = query_norm = None
        if latent.query_rank:
            compressed_queries = linear("q_a_proj", latent.query_rank, hidden, architecture.qkv_bias)
            query_norm = self.norm(f"{prefix}q_a_layernorm.weight", latent.query_rank)
        of_heads = source.matrix(f"{prefix}kv_b_proj", (num_heads * (latent.key_dim + latent.value_dim), latent.rank))
        by_head = of_heads.dense(self._dtype).view(num_heads, -1, latent.rank)
        keys, values = torch.split(by_head, [latent.key_dim, latent.value_dim], 1)
        return LatentAttention(
            latent,
            linear("q_b_proj", num_queries, latent.query_rank)
            if latent.query_rank
            else linear("q_proj", num_queries, hidden),
            linear("kv_a_proj_with_mqa", latent.rank + latent.rope_dim, hidden, architecture.qkv_bias),
            self.norm(f"{prefix}kv_a_layernorm.weight", latent.rank),
            linear_by_head(keys.contiguous(), self._means),
            linear_by_head(values.mT.contiguous(), self._means),
            compressed_queries,
            query_norm,
        )

    def _stacked(self, prefix: str, mixture: Mixture) -> Experts:
        num_experts, source = mixture.num_experts, self._source
        hidden, inner = self._architecture.hidden_size, self._architecture.intermediate_size

        def matrices(name: str, num_inputs: int, outputs: Tensor, gated: bool) -> _OfExperts:
            name = f"{prefix}{mixture.experts}.{name}"
            forms = source.experts(name, (num_experts, num_inputs, len(outputs)), outputs)
            biases = source.tensor(f"{name}_bias", (num_experts, len(outputs)))
            return self._matrices(forms, gated, biases[:, outputs].contiguous())

        bias = source.tensor(f"{prefix}{mixture.router}.bias", (num_experts,))
        gates_first = torch.arange(2 * inner).view(inner, 2).T.flatten()
        return self._experts(
            mixture,
            self._router(prefix, mixture, bias),
            matrices("gate_up_proj", hidden, gates_first, True),
            matrices("down_proj", inner, torch.arange(hidden), False),
        )

    def _matrices(self, forms: Iterable[Form], gated: bool, bias: Tensor | None = None) -> _OfExperts:
        """One product's of all experts; bias [num_experts, out]."""
        linears: list[Linear] = []
        mixture = self._architecture.mixture
        assert mixture is not None
        stacking = Stacking(mixture.num_experts) if goes_together(self._device) else None
        for expert, form in enumerate(forms):
            form = self._stored(form)
            if stacking is not None:
                form = stacking.put(form)
            linears.append(linear_of(form, None if bias is None else bias[expert], self._means, gated))
        return linears, None if stacking is None else stacking.finish(bias)

    def _experts(
        self,
        mixture: Mixture,
        router: Linear,
        gate_up: _OfExperts,
        down: _OfExperts,
        correction: Tensor | None = None,
        shared: tuple[Linear | None, Linear | None, Linear | None] = (None, None, None),
    ) -> Experts:
        at_once = together_of(mixture, gate_up[1], down[1], correction, self._means.is_repeatable)
        return Experts(mixture, router, gate_up[0], down[0], correction, *shared, at_once)

    def _router(self, prefix: str, mixture: Mixture, bias: Tensor | None) -> Linear:
        """It is small, and what it chooses is worth exactness: none is quantised, here or by others."""
        shape = mixture.num_experts, self._architecture.hidden_size
        return linear_of(Plain(self._source.tensor(f"{prefix}{mixture.router}.weight", shape)), bias, self._means)

    def _shared_router(self, prefix: str) -> Linear:
        weight = self._source.tensor(f"{prefix}mlp.shared_expert_gate.weight", (self._architecture.hidden_size,))
        return linear_of(Plain(weight[None]), None, self._means)

    def _linear(self, form: Form, bias: Tensor | None, gated: bool = False) -> Linear:
        return linear_of(self._stored(form), bias, self._means, gated)

    def _stored(self, form: Form) -> Form:
        return form if self._quantization == "none" else quantized(form, self._quantization)
