"""``python -m benchmarks.families``: every causal language model that transformers knows, as a tiny random one, through
our engine, and whether it says what ``generate`` says. Writes benchmarks/families.md, which a test keeps true.

Each answers several requests at once: prompts in chunks, one that begins like another, one with two answers, one that
puts others aside for want of blocks, and one again that the prefix cache knows; all greedily, in float32.
"""

from __future__ import annotations

import inspect
import itertools
import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import click
import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from worker.engine import Engine
from worker.foreign import ForeignRunner
from worker.models import ModelError
from worker.runner import Runner
from worker.sampler import Sampler

PAGE = Path(__file__).with_suffix(".md")
VOCAB_SIZE = 97
BLOCK_SIZE, NUM_BLOCKS = 8, 12
MAX_TOKENS = 10
MAX_PARAMETERS = 15_000_000

Way = Literal["native", "transformers", "in turn", "refused", "not built"]
"""native: our own decoder. transformers: its model, on our attention. in turn: its model and its own attention,
sequence after sequence, on our pool. refused: at start, by name. not built: no tiny configuration."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "d_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 128),
    "num_key_value_heads": 2,
    "attention_heads": 4,
    "head_dim": 8,
    "rotary_dim": 8,
    "sliding_window": 9,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
"""What families call their sizes; each takes those that it knows."""

_DECODES = {"is_decoder": True}
_LATENT = {"num_key_value_heads": 4}
_UNPADDED = {"unpadded_vocab_size": VOCAB_SIZE}
_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
ODD: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"), _DECODES
    ),
    **dict.fromkeys(("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"), _DECODES),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), _DECODES),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear"), _LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "sarvam_mla", "youtu"), _LATENT),
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "gemma3n_text": {**_SHARED, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**_SHARED, "global_head_dim": 16},
    "gemma4_unified_text": {**_SHARED, "num_kv_shared_layers": 0, "global_head_dim": 16},
    **dict.fromkeys(("inkling2_loop_text", "inkling2_text"), _UNPADDED),
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 9},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_text": {
        "attention_chunk_size": 8,
        "floor_scale": 16,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 1, 0],
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "reformer": _DECODES,
    "xmod": {"is_decoder": True, "default_language": "en_XX", "languages": ["en_XX"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides, to be small or to be a decoder."""
INSIDE = {
    "emu3": "its text model is not among transformers' causal language models",
    "llama4": "the same class as llama4_text",
    "qwen3_5": "the same class as qwen3_5_text",
    "qwen3_5_moe": "the same class as qwen3_5_moe_text",
    "qwen4_exp": "the same class as qwen4_exp_text",
    "dots3_note": "the same class as dots3_note_text",
    "musicgen": "its decoder writes sounds",
    "musicgen_melody": "its decoder writes sounds",
    "moshi": "it writes sounds beside text",
}
"""Types whose models are no language models by themselves."""


@dataclass(frozen=True, slots=True)
class Outcome:
    way: Way
    detail: str = ""
    """Why not; or, of one that is served, where it differs."""


def families() -> dict[str, str]:
    """Model types, each with its architecture."""
    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def outcome_of(model_type: str) -> Outcome:
    """Of one family; a minute at most, mostly under a second."""
    if model_type in INSIDE:
        return Outcome("not built", INSIDE[model_type])
    with tempfile.TemporaryDirectory() as directory:
        try:
            oracle = _checkpoint(Path(directory), model_type)
        except Exception as error:
            return Outcome("not built", _line(error))
        engine = EngineSettings(
            device="cpu",
            dtype="float32",
            num_threads=1,
            block_size=BLOCK_SIZE,
            max_kv_bytes=4 << 20,
            max_step_tokens=20,
        )
        try:
            runner = Runner.load(directory, engine)
        except ModelError as error:
            return Outcome("refused", str(error))
        way: Way = "native"
        if isinstance(runner, ForeignRunner):
            way = "in turn" if runner.attends_itself else "transformers"
        return Outcome(way, _difference(oracle, runner, engine))


def _checkpoint(directory: Path, model_type: str) -> Any:
    """A random float32 model, saved. Weights are larger than an untrained model's, so that attention is far from
    uniform and greedy tokens are far from ties. Raises whatever transformers raises, and ValueError for a large one.
    """
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[model_type]
    known = {*getattr(kind, "__dataclass_fields__", ()), *inspect.signature(kind.__init__).parameters}
    aliases = dict(getattr(kind, "attribute_map", {}))
    sizes = {key: value for key, value in SIZES.items() if key in known | set(aliases)}
    for alias, name in aliases.items():
        if name in sizes:
            sizes.pop(alias, None)
    config = kind(**{**sizes, **ODD.get(model_type, {})})
    model_class = getattr(transformers, families()[model_type])
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters / 1e6:.0f} million parameters are left")
    config._attn_implementation = "eager"
    model = model_class(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
    model.save_pretrained(directory)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0)
    return model


def _difference(oracle: Any, runner: Runner, engine: EngineSettings) -> str:
    """Of our greedy tokens from those of generate; empty where there is none."""
    chance = random.Random(3)
    first, second, urgent = ([chance.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in (23, 33, 30))
    prompts = {"first": first, "second": second, "like": first[:16] + second[:9], "urgent": urgent, "again": first}
    arrivals = {"first": 0, "second": 0, "like": 3, "urgent": 6, "again": 40}
    submits = [
        (
            arrivals[name],
            wire.Submit(
                request_id=name,
                prompt_token_ids=prompt,
                sampling=Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
                num_sequences=2 if name == "like" else 1,
                priority=0 if name == "urgent" else 1,
            ),
        )
        for name, prompt in prompts.items()
    ]
    runner.num_blocks = min(runner.num_blocks, NUM_BLOCKS)
    answers = _answers(runner, engine, submits)
    for (name, index), tokens in answers.items():
        prompt = torch.tensor([prompts[name]])
        whole = oracle.generate(prompt, attention_mask=torch.ones_like(prompt))
        expected = whole[0, prompt.shape[1] :].tolist()
        if tokens != expected:
            return f"{name}, answer {index}: {tokens} where generate says {expected}"
    return "" if len(answers) == len(prompts) + 1 else "an answer is missing"


def _answers(
    runner: Runner, engine: EngineSettings, submits: list[tuple[int, wire.Submit]]
) -> dict[tuple[str, int], list[int]]:
    ticks = itertools.count()
    ours = Engine(runner, Sampler(runner.vocab_size, ()), engine, lambda: float(next(ticks)))
    answers: dict[tuple[str, int], list[int]] = {}
    for step in range(1000):
        while submits and (submits[0][0] <= step or not ours.has_work):
            refused = ours.add(submits.pop(0)[1])
            assert refused is None, refused
        if not submits and not ours.has_work:
            return answers
        deltas, failed = ours.step()
        ours.audit()
        assert not failed, failed
        for delta in deltas:
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    raise AssertionError("1000 steps are not enough")


def _line(error: BaseException) -> str:
    """What an error says, on one line and not too long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {lines[-1] if lines else ''}")[:160]


def read_page() -> dict[str, Outcome]:
    """What the page says of each model type."""
    rows = re.findall(r"^\| `([^`]+)` \| `[^`]+` \| ([^|]+) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {model_type: Outcome(cast("Way", way.strip()), detail.strip()) for model_type, way, detail in rows}


def page_of(outcomes: dict[str, Outcome]) -> str:
    counts = Counter(
        "disagrees" if outcome.detail and outcome.way in SERVED else outcome.way for outcome in outcomes.values()
    )
    agreeing = sum(counts[way] for way in SERVED)
    rows = [
        f"| `{model_type}` | `{families()[model_type]}` | {outcome.way} | {outcome.detail.replace('|', '/')} |"
        for model_type, outcome in sorted(outcomes.items())
    ]
    return "\n".join(
        (
            "# Families",
            "",
            f"Of {len(outcomes)} types of causal language models {agreeing} say what transformers' own `generate` says:"
            f" {counts['native']} by our decoder",
            f"(*native*), {counts['transformers']} by transformers' model on our attention, {counts['in turn']} by its"
            f" model alone (*in turn*); {counts['disagrees']} disagree,",
            f"{counts['refused']} are refused at start by name, {counts['not built']} were not built. Not measured: how"
            " fast they are, and any model that is not tiny.",
            "",
            "    python -m benchmarks.families           # all of them, and this page",
            "    python -m benchmarks.families mamba2    # one, to the terminal",
            "",
            "Every causal language model that transformers knows, as a tiny random model in float32, through the",
            "engine: prompts in chunks, one that begins like another, one with two answers, one that puts others aside",
            "for want of blocks, one again from the prefix cache. *native*: by our own decoder. *transformers*: by its",
            "own model, on our attention and paged KV, all sequences of a step at once. *in turn*: by its model, with",
            "its own attention, one sequence after another, on our paged KV. Tokens are those of greedy `generate`,",
            "but where the last column says otherwise. *refused*: at start, in these words. *not built*: no small",
            "configuration.",
            "",
            f"Written with transformers {transformers.__version__}; `tests/worker/test_families.py` keeps it true.",
            "",
            "| model type | architecture | served | |",
            "|---|---|---|---|",
            *rows,
            "",
        )
    )


SERVED: tuple[Way, ...] = ("native", "transformers", "in turn")


@click.command()
@click.argument("model_types", nargs=-1)
def main(model_types: tuple[str, ...]) -> None:
    """All of them, into benchmarks/families.md; or those named, to the terminal alone."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    outcomes = {}
    for model_type in model_types or families():
        outcomes[model_type] = outcome_of(model_type)
        click.echo(f"{model_type}: {outcomes[model_type].way} {outcomes[model_type].detail}")
    if not model_types:
        PAGE.write_text(page_of(outcomes))


if __name__ == "__main__":
    main()
