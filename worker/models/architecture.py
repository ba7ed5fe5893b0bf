"""What a decoder is made of: the one set of facts that every served family is described by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of the clamped one, as gpt-oss has them."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and how it is stretched; the fields that a kind does not use stay at
    their defaults.
    """

    kind: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"] = "default"
    theta: float = 10_000.0
    rotary_dim: int = 0
    """Leading dimensions of a head that are rotated; the others pass."""
    max_positions: int = 0
    """The model's own context, before any stretching that the dynamic kind adds."""
    factor: float = 1.0
    original_max_positions: int = 0
    """The context of pretraining."""
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial_factor: float = 1.0
    """Of the proportional kind: the share of the angles that turn; the rest of the head is paired as if it did."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in place of each layer's MLP. Tensor names are those under ``model.layers.N.``."""

    num_experts: int
    num_chosen: int
    """For each token."""
    is_normed: bool
    """The weights of those chosen sum to 1."""
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    """Expert E is below ``experts.E.``."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_stacked: bool = field(default=False, kw_only=True)
    """All experts are in one tensor, [num_experts, in, out]: ``gate_up_proj``, gates and what they open in turns, and
    ``down_proj``; they and the router have biases."""
    num_dense: int = field(default=0, kw_only=True)
    """Layers before the first with experts; theirs is an MLP ``dense_size`` wide inside."""
    dense_size: int = field(default=0, kw_only=True)
    shared_size: int = field(default=0, kw_only=True)
    """Inner width of ``mlp.shared_experts``, an MLP that every token goes through besides; 0: there is none."""
    is_shared_weighed: bool = field(default=False, kw_only=True)
    """What it says is multiplied by the sigmoid of one number, of which ``mlp.shared_expert_gate`` is the matrix."""
    scores: Literal["softmax", "sigmoid"] = field(default="softmax", kw_only=True)
    """Sigmoids have a bias beside the router that is for choosing alone."""
    num_groups: int = field(default=1, kw_only=True)
    """Of experts; a token's are of ``num_chosen_groups`` of them."""
    num_chosen_groups: int = field(default=1, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    """Of the weights."""

    @property
    def other_sizes(self) -> tuple[int, int]:
        """Inner widths of what is no expert, 0 where there is none."""
        return self.dense_size, self.shared_size


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention to one KV head, ``rope_dim`` that turn and a latent of ``rank``, of which ``worker.models.latent``
    makes the keys and values of all heads.
    """

    rank: int
    rope_dim: int
    key_dim: int
    """Of each head, what does not turn."""
    value_dim: int
    query_rank: int
    """Of the vector that queries are made of; 0: they are made of the activations."""
    is_interleaved: bool
    """The two that turn together are neighbours in the checkpoint."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer: embedding, layers of attention and gated MLP, or a mixture of such, with RMSNorm
    around them, norm, head.

    Each norm place is a tensor name under ``model.layers.N.`` or empty where the family has none.
    """

    name: str
    """As config.json says: "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Prompt and completion together, as trained or as stretched by its rope."""
    norm_eps: float
    attention_scale: float
    ropes: tuple[Rope, ...]
    """Distinct ropes; ``layer_ropes`` says which layer uses which."""
    layer_ropes: tuple[int, ...]
    windows: tuple[int, ...]
    """A layer: a token sees itself and the ``window - 1`` tokens before it; 0: all of them."""
    activation: Activation = "silu"
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    """The checkpoint holds qkv_proj and gate_up_proj already fused."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys: over each head, or over all heads together."""
    norm_offset: float = 0.0
    """Added to every norm weight: Gemma stores weight - 1."""
    attention_pre_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_pre_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    embedding_scale: float = 1.0
    head_scale: float = 1.0
    """Of what the head is given."""
    sinks: bool = False
    """Attention has a score beside the keys' for each head, see Scores."""
    attention_softcap: float = 0.0
    """Scores become cap * tanh(scores / cap); 0: off."""
    logits_softcap: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The checkpoint's own, as config.json says."""
    mixture: Mixture | None = None
    """``intermediate_size`` is then that of one expert."""
    latent: Latent | None = None
    """``head_dim`` and ``num_kv_heads`` are then those of what is kept."""
    num_extra_layers: int = 0
    """Of the checkpoint, behind the last: they guess tokens ahead, and are not needed."""
    tensor_roots: tuple[str, ...] = ("model.",)
    """What tensor names may begin with, one of them in any one checkpoint; not "model." for a language model that is
    part of something larger, whose other tensors do not matter."""

    def num_layer_parameters(self, layer: int) -> int:
        """Of its matrices; norms and biases are too small to count."""
        return self._num_attention_parameters + self.hidden_size * self._num_inner(layer)

    @property
    def _num_attention_parameters(self) -> int:
        latent, hidden = self.latent, self.hidden_size
        if latent is None:
            return 2 * hidden * (self.num_heads + self.num_kv_heads) * self.head_dim
        queries = self.num_heads * (latent.key_dim + latent.rope_dim)
        of_queries = latent.query_rank * (hidden + queries) if latent.query_rank else hidden * queries
        of_latent = self.num_heads * latent.rank * (latent.key_dim + latent.value_dim)
        return of_queries + of_latent + hidden * (self.head_dim + self.num_heads * latent.value_dim)

    def _num_inner(self, layer: int) -> int:
        """Rows of ``hidden_size`` parameters in a layer's MLP, or in its router and experts."""
        mixture = self.mixture
        if mixture is None:
            return 3 * self.intermediate_size
        if layer < mixture.num_dense:
            return 3 * mixture.dense_size
        num_experts = mixture.num_experts
        return num_experts + 3 * (num_experts * self.intermediate_size + mixture.shared_size)

    @property
    def num_parameters(self) -> int:
        """Of all matrices."""
        tables = 1 if self.tied else 2
        layers = sum(self.num_layer_parameters(layer) for layer in range(self.num_layers))
        return layers + tables * self.vocab_size * self.hidden_size
