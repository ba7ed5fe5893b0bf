"""DeepSeek-V2 and V3 (2024): latent attention, and experts beside an MLP that all tokens go through."""

from __future__ import annotations

from dataclasses import replace

from worker.models.architecture import Architecture, Latent
from worker.models.facts import common, mixture_of, one_rope, scaling_of
from worker.models.fields import Fields
from worker.models.rope import temperature


def deepseek(fields: Fields) -> Architecture:
    """They choose experts in two ways."""
    is_third = fields.architecture == "DeepseekV3ForCausalLM"
    rope_dim, rank = fields.positive("qk_rope_head_dim", 64), fields.positive("kv_lora_rank", 512)
    fields = Fields({**fields.raw, "head_dim": rope_dim}, fields.architecture, fields.place)
    facts, rope = common(fields), one_rope(fields)
    scaling = scaling_of(fields)
    growth = temperature(scaling.number("factor", 1.0), scaling.number("mscale_all_dim", 0.0)) if scaling else 1.0
    key_dim, bias = fields.positive("qk_nope_head_dim", 128), fields.flag("attention_bias", False)
    mixture = replace(
        mixture_of(fields, "n_routed_experts", is_third and fields.flag("norm_topk_prob", True)),
        num_dense=fields.integer("first_k_dense_replace", 3 if is_third else 0),
        dense_size=facts["intermediate_size"],
        shared_size=fields.positive("moe_intermediate_size") * fields.integer("n_shared_experts", 1 if is_third else 2),
        scores="sigmoid" if is_third else "softmax",
        scale=fields.number("routed_scaling_factor", 2.5 if is_third else 1.0),
    )
    if is_third or fields.text("topk_method", "greedy") == "group_limited_greedy":
        num_groups, num_chosen = fields.positive("n_group", 8), fields.positive("topk_group", 4)
        num_each = mixture.num_experts // num_groups
        # V3 ranks groups by the best two of each.
        is_too_small = is_third and num_groups > 1 and num_each < 2
        if mixture.num_experts % num_groups or num_chosen > num_groups or is_too_small:
            raise fields.wrong("n_group", num_groups)
        if mixture.num_chosen > num_chosen * num_each:
            raise fields.wrong("topk_group", num_chosen)
        mixture = replace(mixture, num_groups=num_groups, num_chosen_groups=num_chosen)
    changes = {
        "intermediate_size": fields.positive("moe_intermediate_size"),
        "num_kv_heads": 1,
        "head_dim": rank + rope_dim,
        "attention_scale": (key_dim + rope_dim) ** -0.5 * growth**2,
    }
    return Architecture(
        **{**facts, **changes},
        **rope,
        qkv_bias=bias,
        output_bias=bias,
        mixture=mixture,
        num_extra_layers=fields.integer("num_nextn_predict_layers", 0),
        latent=Latent(
            rank,
            rope_dim,
            key_dim,
            fields.positive("v_head_dim", 128),
            fields.integer("q_lora_rank", 0),
            not is_third or fields.flag("rope_interleave", True),
        ),
    )
