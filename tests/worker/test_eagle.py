"""An EAGLE-3 head: what it says, what is refused, and that no answer changes."""

import json
import random

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from policies import wire
from policies.settings import Speculation as SpeculationSettings
from policies.terms import Sampling
from tests.worker.test_draft_model import clock
from tests.worker.test_engine_models import STEMS, Families, run
from tests.worker.test_medusa import drafter_of
from tests.worker.test_speculation import everything
from tests.worker.tiny import SIZES, VOCAB_SIZE
from worker.models import ModelError
from worker.speculation import Speculation, eagle
from worker.speculation.eagle import EagleDrafter

SIZE, INNER, HEADS, KV_HEADS = 32, 40, 4, 2
HEAD_DIM = SIZE // HEADS
DRAFT_VOCAB_SIZE = 50
EPS = 1e-5


def random_head(seed=0, size=SIZE, num_tokens=DRAFT_VOCAB_SIZE, biased=()):
    """``biased``: parts of the names of the matrices that have biases."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)

    kept = torch.randperm(VOCAB_SIZE, generator=generator)[:num_tokens].sort().values
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[kept] = True
    attention = "midlayer.self_attn"
    head = {
        "fc.weight": weight(size, 3 * size),
        "lm_head.weight": weight(num_tokens, size),
        "norm.weight": weight(size),
        "d2t": kept - torch.arange(num_tokens),
        "t2d": t2d,
        f"{attention}.q_proj.weight": weight(HEADS * HEAD_DIM, 2 * size),
        f"{attention}.k_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * size),
        f"{attention}.v_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * size),
        f"{attention}.o_proj.weight": weight(size, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": weight(INNER, size),
        "midlayer.mlp.up_proj.weight": weight(INNER, size),
        "midlayer.mlp.down_proj.weight": weight(size, INNER),
        "midlayer.hidden_norm.weight": weight(size),
        "midlayer.input_layernorm.weight": weight(size),
        "midlayer.post_attention_layernorm.weight": weight(size),
    }
    for name in [name for name in head if any(part in name for part in biased)]:
        head[name.replace("weight", "bias")] = 10 * weight(len(head[name]))
    return head


def saved(tensors, directory, suffix="safetensors", **changes):
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": EPS},
        **{"hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE},
        **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "draft_vocab_size": DRAFT_VOCAB_SIZE},
        **{"max_position_embeddings": SIZES["max_position_embeddings"], "rope_theta": 10000.0},
    }
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    if suffix == "bin":
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


@torch.inference_mode()
def reference(oracle, head, token_ids, num_tokens):
    """The published forward over the whole text, without a cache: what it writes after these tokens."""

    def normed(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * head[f"{name}.weight"]

    def linear(x, name):
        return F.linear(x, head[f"{name}.weight"], head.get(f"{name}.bias"))

    def turned(x):
        positions = torch.arange(x.shape[1]).float()[:, None]
        angles = positions / 10000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def layer(hidden, followed_by):
        x = torch.cat(
            (
                normed(oracle.model.embed_tokens(torch.tensor(followed_by)), "midlayer.input_layernorm"),
                normed(hidden, "midlayer.hidden_norm"),
            ),
            -1,
        )
        query, key, value = (
            linear(x, f"midlayer.self_attn.{name}_proj").view(len(x), -1, HEAD_DIM).transpose(0, 1) for name in "qkv"
        )
        query, key = turned(query), turned(key)
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (key, value))
        scores = query @ key.transpose(1, 2) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(x), -1)
        hidden = hidden + linear(mixed, "midlayer.self_attn.o_proj")
        x = normed(hidden, "midlayer.post_attention_layernorm")
        gated = F.silu(linear(x, "midlayer.mlp.gate_proj")) * linear(x, "midlayer.mlp.up_proj")
        return hidden + linear(gated, "midlayer.mlp.down_proj")

    states = oracle.model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
    hidden = linear(torch.cat([states[index][0] for index in (0, 1, 2)], -1), "fc")
    followed_by, draft = list(token_ids[1:]), []
    for _ in range(num_tokens):
        out = layer(hidden, followed_by)[-1:]
        chosen = int(linear(normed(out, "norm"), "lm_head").argmax())
        draft.append(chosen + int(head["d2t"][chosen]))
        hidden, followed_by = torch.cat((hidden, out)), [*followed_by, draft[-1]]
    return draft


class Recorded(EagleDrafter):
    """Keeps what it was asked, and what it said."""

    said = ()

    def propose(self, sequences, num_tokens):
        drafts = super().propose(sequences, num_tokens)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self.said = (*self.said, (list(sequence.token_ids), draft.token_ids))
        return drafts


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_it_says_what_the_published_forward_says_and_answers_stay(
    families, tmp_path, suffix, temperature, prefix_cache
):
    head = random_head()
    target, drafter = drafter_of(families, saved(head, tmp_path, suffix))
    arrivals = [
        (number, wire.Submit(str(number), stem[: 8 + number], Sampling(13, seed=number, temperature=temperature)))
        for number, stem in enumerate(STEMS * 2)
    ]
    plain = families.engine("llama", speculation=SpeculationSettings(enabled=False))
    expected, _ = run(plain, arrivals)
    guessing = families.engine("llama", num_blocks=13, prefix_cache=prefix_cache)
    guessing._runner = target
    drafter = Recorded(drafter._eagle, clock())
    guessing._speculation = Speculation([drafter], 3, everything, clock())
    guessing.speculates = True
    answers, _ = run(guessing, arrivals)
    assert answers == expected
    drafts = [(token_ids, draft) for token_ids, draft in drafter.said if draft]
    assert len(drafts) > 20
    if not prefix_cache:  # else some rows of a prompt are never seen
        for token_ids, draft in drafts:
            assert draft == reference(families.oracle("llama"), head, token_ids, len(draft))
    assert not guessing._speculation.num_faults
    assert not drafter._texts


def test_a_text_longer_than_those_it_was_trained_on_is_followed_to_its_end(families, tmp_path):
    head = random_head()
    target, drafter = drafter_of(families, saved(head, tmp_path, max_position_embeddings=16))
    drafter = Recorded(drafter._eagle, clock())
    drafter._eagle.rotary.look_up()  # as on a device, where a position that is in no table is the end of the process
    guessing = families.engine("llama")
    guessing._runner = target
    guessing._speculation = Speculation([drafter], 3, everything, clock())
    guessing.speculates = True
    prompt = [*STEMS[0], *STEMS[1]][: target.max_model_tokens - 20]
    run(guessing, [(0, wire.Submit("long", prompt, Sampling(20, temperature=0.0, ignore_eos=True)))])
    assert not guessing._speculation.num_faults
    drafts = [(token_ids, draft) for token_ids, draft in drafter.said if draft]
    assert len(drafts) > 5
    for token_ids, draft in drafts:
        assert draft == reference(families.oracle("llama"), head, token_ids, len(draft))


def test_memory_that_is_short_behind_a_step_costs_no_drafts_but_those_of_that_step(families, tmp_path, monkeypatch):
    head, num_steps = random_head(), 0
    target, drafter = drafter_of(families, saved(head, tmp_path))
    fused = eagle.Eagle.fused

    def fused_in_most_steps(own, tapped):
        nonlocal num_steps
        num_steps += 1
        if num_steps in (1, 9):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return fused(own, tapped)

    monkeypatch.setattr(eagle.Eagle, "fused", fused_in_most_steps)
    arrivals = [(0, wire.Submit("long", STEMS[0][:20], Sampling(30, temperature=0.0, ignore_eos=True)))]
    expected, _ = run(families.engine("llama", speculation=SpeculationSettings(enabled=False)), arrivals)
    guessing = families.engine("llama")
    guessing._runner, drafter = target, Recorded(drafter._eagle, clock())
    guessing._speculation = Speculation([drafter], 3, everything, clock())
    guessing.speculates = True
    answers, _ = run(guessing, arrivals)
    assert answers == expected
    drafts = [len(token_ids) for token_ids, draft in drafter.said if draft]
    assert max(drafts) > 35  # behind the prompt's 20, and the steps without
    assert num_steps > 9


class Computed:
    """As far as a drafter looks at a sequence when a step is over."""

    def __init__(self):
        self.num_computed = 0
        self.draft_token_ids = []


def test_a_step_leaves_rows_behind_those_before_it_and_moves_none_of_them(families, tmp_path, monkeypatch):
    monkeypatch.setattr(eagle, "MAX_CONTEXT", 16)
    target, drafter = drafter_of(families, saved(random_head(), tmp_path))
    model, rng, sequence = target.keep_hidden(), random.Random(5), Computed()
    seen = torch.empty((0, SIZE))
    for _ in range(200):
        num_tokens, num_drafted = rng.choice([1, 1, 1, 5, 16, 40]), rng.choice([0, 0, 3])
        sequence.draft_token_ids = [0] * num_drafted
        model.tapped = list(torch.randn(3, num_tokens + num_drafted, SIZE))
        text = drafter._texts.get(sequence)
        before = {} if text is None else {rows.data_ptr(): len(rows) for rows in text.rows}
        drafter.computed([(sequence, num_tokens)])
        seen = torch.cat((seen[: sequence.num_computed], drafter._eagle.fused(model.tapped)))
        text = drafter._texts[sequence]
        assert torch.equal(torch.cat(text.rows), seen[text.start :])
        assert text.num_rows == len(seen) - text.start <= 16
        # The first piece, and the last one of a draft that was wrong, may be shorter now.
        assert all(rows.data_ptr() in before for rows in text.rows[1:-1])
        sequence.num_computed += num_tokens + rng.randint(0, num_drafted)


@pytest.mark.parametrize("biased", ["self_attn", ("q_proj", "k_proj", "v_proj"), ("mlp", "fc", "lm_head")])
def test_biases_are_those_of_the_file(families, tmp_path, biased):
    head = random_head(biased=(biased,) if isinstance(biased, str) else biased)
    target, drafter = drafter_of(families, saved(head, tmp_path, attention_bias=biased == "self_attn"))
    drafter = Recorded(drafter._eagle, clock())
    guessing = families.engine("llama")
    guessing._runner = target
    guessing._speculation = Speculation([drafter], 3, everything, clock())
    guessing.speculates = True
    run(guessing, [(0, wire.Submit("biased", STEMS[0], Sampling(20, temperature=0.0, ignore_eos=True)))])
    drafts = [(token_ids, draft) for token_ids, draft in drafter.said if draft]
    assert len(drafts) > 5
    for token_ids, draft in drafts:
        assert draft == reference(families.oracle("llama"), head, token_ids, len(draft))


@pytest.mark.parametrize(
    ("changes", "more", "named"),
    [
        ({"attention_bias": True}, {}, r"self_attn\.q_proj\.bias is not there"),
        ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(HEAD_DIM)}, r"not known: midlayer\.self_attn\.q_norm"),
        ({"hidden_act": "gelu"}, {}, "the activation gelu of the EAGLE head .* is not supported, but silu"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}},
            {},
            "reads other layers than",
        ),
    ],
)
def test_a_head_that_would_compute_something_else_is_refused_by_name(families, tmp_path, changes, more, named):
    with pytest.raises(ModelError, match=named):
        drafter_of(families, saved({**random_head(), **more}, tmp_path, **changes))


@pytest.mark.parametrize(
    ("head", "changes", "named"),
    [
        ({"size": 24}, {}, r"another model than .*llama: fc\.weight is \[24, 72\]"),
        ({"num_tokens": 40}, {}, r"another model than .*llama: lm_head\.weight is \[40, 32\]"),
        ({}, {"vocab_size": 50}, "another vocabulary than that of .*llama"),
    ],
)
def test_a_head_of_another_width_or_vocabulary_is_refused_by_name(families, tmp_path, head, changes, named):
    with pytest.raises(ModelError, match=named):
        drafter_of(families, saved(random_head(**head), tmp_path, **changes))
