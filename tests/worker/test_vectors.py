"""Vectors are what transformers makes of the same tokens: of decoders in chunks, in company and after preemptions, of
encoders in padded batches."""

import itertools
import json
import random

import pytest
import torch
import transformers

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.tiny import SIZES, VOCAB_SIZE, checkpoint
from worker.engine import Engine
from worker.models import ModelError
from worker.runner import Runner
from worker.sampler import Sampler
from worker.vectors import _finished

ENCODERS = {
    "bert": ("BertModel", {"type_vocab_size": 2}),
    "roberta": ("RobertaModel", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"type_vocab_size": 1}),
    "distilbert": ("DistilBertModel", {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4}),
    "modernbert": ("ModernBertModel", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
}
SETTINGS = {"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 8, "max_kv_bytes": 1 << 20}


def engine_of(runner, **changes):
    settings = EngineSettings(**{**SETTINGS, **changes})
    ticks = itertools.count()
    return Engine(runner, Sampler(runner.vocab_size, runner.eos_token_ids), settings, now=lambda: 0.01 * next(ticks))


def loaded(directory, **changes):
    return Runner.load(str(directory), EngineSettings(**{**SETTINGS, **changes}))


def asked(request_id, token_ids, kind, **pooling):
    pooling = wire.Pooling(kind, **{"is_normalized": False, **pooling})
    return wire.Submit(request_id, token_ids, Sampling(1), pooling=pooling)


def vectors(engine, *submits):
    """Of each request that was not refused; the reasons of the others."""
    found = {}
    for submit in submits:
        refused = engine.add(submit)
        if refused is not None:
            found[submit.request_id] = refused.reason
    for _ in range(10_000):
        if not engine.has_work:
            engine.audit()
            return found
        deltas, failed = engine.step()
        engine.audit()
        found |= {each.request_id: each.reason for each in failed}
        for delta in deltas:
            if delta.vector:
                assert delta.finish.reason == "stop"
                assert not delta.token_ids
                found[delta.request_id] = torch.frombuffer(bytearray(delta.vector), dtype=torch.float32)
    raise AssertionError("the engine does not come to an end")


@torch.inference_mode()
def hidden(model, token_ids, **others):
    """[num_tokens, hidden_size]"""
    return model.base_model(torch.tensor([token_ids]), **others).last_hidden_state[0]


def pooled(states, kind):
    return {"last": states[-1], "first": states[0], "mean": states.mean(0)}[kind]


def some_texts(seed, lengths=(1, 2, 9, 40, 100, 63)):
    chance = random.Random(seed)
    return [[chance.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def test_vectors_of_a_decoder_beside_answers_are_those_of_transformers(tmp_path):
    model = checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=16)
    engine = engine_of(loaded(tmp_path), max_step_tokens=32, max_sequences=8)
    for number in range(3):
        engine.add(wire.Submit(f"answer-{number}", [3 + number] * 20, Sampling(12, ignore_eos=True)))
    texts = some_texts(1)
    submits = [asked(f"{kind}-{n}", text, kind) for n, text in enumerate(texts) for kind in ("last", "mean", "first")]
    random.Random(2).shuffle(submits)
    found = vectors(engine, *submits)
    for number, text in enumerate(texts):
        states = hidden(model, text)
        for kind in ("last", "mean", "first"):
            torch.testing.assert_close(found[f"{kind}-{number}"], pooled(states, kind), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_vectors_outlast_a_pool_that_is_too_small(tmp_path, kind):
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    bytes_a_block = 2 * 3 * 2 * 8 * 8 * 4
    runner = loaded(tmp_path, max_kv_bytes=18 * bytes_a_block)
    engine = engine_of(runner, max_step_tokens=16, max_sequences=6)
    texts = some_texts(3, (60, 70, 33, 80, 12, 95))
    for number, text in enumerate(texts):  # these come first, and grow in the way of the others
        assert engine.add(wire.Submit(f"answer-{number}", text[:9], Sampling(30, ignore_eos=True))) is None
    engine.step()
    submits = [asked(str(number), text, kind) for number, text in enumerate(texts)]
    # The later ones are more important, and put others aside.
    submits = [wire.Submit(s.request_id, s.prompt_token_ids, s.sampling, 1, -n, pooling=s.pooling)
               for n, s in enumerate(submits)]  # fmt: skip
    found = vectors(engine, *submits)
    assert engine.stats().num_preemptions
    for number, text in enumerate(texts):
        torch.testing.assert_close(found[str(number)], pooled(hidden(model, text), kind), rtol=1e-4, atol=1e-4)


def test_vectors_outlast_memory_that_runs_out_while_they_are_made(tmp_path, monkeypatch):
    """A step whose vectors cannot be made is computed again; what there is so far of other prompts counts once."""
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    engine = engine_of(loaded(tmp_path), max_step_tokens=16, max_sequences=6)
    finished, times = _finished, itertools.count()

    def short(*args):
        if next(times) % 3 == 0:
            raise torch.OutOfMemoryError("no memory")
        return finished(*args)

    monkeypatch.setattr("worker.vectors._finished", short)
    texts = some_texts(3, (60, 70, 33, 80, 12, 95))
    found = vectors(engine, *[asked(str(number), text, "mean") for number, text in enumerate(texts)])
    for number, text in enumerate(texts):
        torch.testing.assert_close(found[str(number)], hidden(model, text).mean(0), rtol=1e-4, atol=1e-4)


def test_a_prompt_that_was_read_before_is_found_and_its_vector_is_the_same(tmp_path):
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    engine = engine_of(loaded(tmp_path))
    text = some_texts(4, (50,))[0]
    found = [vectors(engine, asked("a", text, kind))["a"] for kind in ("last", "last", "mean")]
    assert engine.stats().num_cached_tokens == 48  # by the second alone: a mean wants every state
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[2], hidden(model, text).mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_in_deterministic_mode_a_vector_does_not_show_how_its_prompt_was_cut(tmp_path, kind):
    checkpoint(tmp_path, "LlamaForCausalLM")
    (text,) = some_texts(5, [120])
    runner = loaded(tmp_path, deterministic=True)
    whole, *others = (
        vectors(engine_of(runner, max_step_tokens=most, max_sequences=4), asked("a", text, kind))["a"]
        for most in (128, 16, 37, 50)
    )
    assert all(torch.equal(other, whole) for other in others)


def test_a_vector_is_cut_and_then_normalised(tmp_path):
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    engine = engine_of(loaded(tmp_path))
    text = some_texts(5, (20,))[0]
    found = vectors(engine, asked("a", text, "last", is_normalized=True, num_dimensions=10))["a"]
    first = hidden(model, text)[-1][:10]
    torch.testing.assert_close(found, first / first.norm(), rtol=1e-4, atol=1e-4)


def test_a_vector_may_take_the_whole_context_and_no_more(tmp_path):
    checkpoint(tmp_path, "LlamaForCausalLM")
    engine = engine_of(loaded(tmp_path))
    found = vectors(engine, asked("all", [3] * 128, "last"), asked("more", [3] * 129, "last"))
    assert found["all"].shape == (32,)
    assert found["more"] == "129 prompt tokens exceed 128"


@pytest.mark.parametrize(
    ("submit", "reason"),
    [
        (asked("a", [3], "score"), "this model has no head that scores"),
        (asked("a", [3], "last", num_dimensions=33), "its vectors have 32 dimensions, and 33 were asked for"),
        (
            wire.Submit("a", [3], Sampling(1), 2, pooling=wire.Pooling("last")),
            "a vector is of one sequence that writes nothing",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(tmp_path, submit, reason):
    checkpoint(tmp_path, "LlamaForCausalLM")
    assert engine_of(loaded(tmp_path)).add(submit).reason == reason


def test_a_model_saved_without_a_head_gives_vectors(tmp_path):
    config = transformers.Qwen2Config(**{**SIZES, "tie_word_embeddings": False})
    torch.manual_seed(0)
    model = transformers.Qwen2Model(config).eval().float()
    model.save_pretrained(tmp_path)
    text = some_texts(6, (30,))[0]
    found = vectors(engine_of(loaded(tmp_path)), asked("a", text, "last"))["a"]
    torch.testing.assert_close(found, hidden(model, text)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_of_an_encoder_are_those_of_transformers(tmp_path, family):
    architecture, changes = ENCODERS[family]
    changes = {**changes, "max_position_embeddings": 130 if "roberta" in family else 128, "pad_token_id": 1}
    model = checkpoint(tmp_path, architecture, **changes)
    runner = loaded(tmp_path)
    assert (runner.writes, runner.max_model_tokens, runner.num_dimensions) == (False, 128, 32)
    engine = engine_of(runner, max_step_tokens=64)
    texts = some_texts(7, (1, 2, 9, 40, 100, 63, 128, 5, 5))
    submits = [asked(f"{kind}-{n}", text, kind) for n, text in enumerate(texts) for kind in ("last", "mean", "first")]
    found = vectors(engine, *submits)
    for number, text in enumerate(texts):
        states = hidden(model, text)
        for kind in ("last", "mean", "first"):
            torch.testing.assert_close(found[f"{kind}-{number}"], pooled(states, kind), rtol=1e-3, atol=1e-3)
    assert engine.add(wire.Submit("answer", [3], Sampling(4))).reason.startswith("this model writes nothing")


@pytest.mark.parametrize("family", ["ConvBert", "MobileBert", "Nystromformer"])
def test_no_encoder_reads_what_a_batch_is_padded_with(tmp_path, family):
    """Some look at the tokens beside each one, whatever the mask says."""
    sizes = {**SIZES, "embedding_size": 16, "pad_token_id": 1}
    if family == "MobileBert":
        sizes |= {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(tmp_path)
    texts = some_texts(11, (20, 14, 14, 12))
    found = vectors(engine_of(loaded(tmp_path)), *(asked(str(n), text, "last") for n, text in enumerate(texts)))
    for number, text in enumerate(texts):
        torch.testing.assert_close(found[str(number)], hidden(model, text)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("leaves", [False, True], ids=["sigmoid", "as it stands"])
def test_a_cross_encoder_scores_pairs_as_transformers_does(tmp_path, leaves):
    changes = {"type_vocab_size": 2, "num_labels": 1}
    if leaves:
        changes["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    model = checkpoint(tmp_path, "BertForSequenceClassification", **changes)
    engine = engine_of(loaded(tmp_path))
    pairs = [(text, 1 + len(text) // 3) for text in some_texts(8, (9, 30, 12, 100))]
    found = vectors(engine, *(asked(str(n), text, "score", second_at=at) for n, (text, at) in enumerate(pairs)))
    for number, (text, at) in enumerate(pairs):
        types = torch.tensor([[0] * at + [1] * (len(text) - at)])
        with torch.inference_mode():
            score = model(torch.tensor([text]), token_type_ids=types).logits[0]
        score = score if leaves else score.sigmoid()
        torch.testing.assert_close(found[str(number)], score, rtol=1e-4, atol=1e-4)
    state = vectors(engine, asked("a", pairs[0][0], "first", second_at=pairs[0][1]))["a"]
    types = torch.tensor([[0] * pairs[0][1] + [1] * (len(pairs[0][0]) - pairs[0][1])])
    torch.testing.assert_close(state, hidden(model, pairs[0][0], token_type_ids=types)[0], rtol=1e-4, atol=1e-4)


def test_how_vectors_are_made_is_read_from_the_files(tmp_path, caplog):
    checkpoint(tmp_path, "BertModel", type_vocab_size=2)
    assert loaded(tmp_path).pooling == wire.Pooling("mean")
    kinds = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    kinds.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})

    def write(modules, **pooling):
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
        (tmp_path / "modules.json").write_text(json.dumps(modules))

    write(kinds, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    assert loaded(tmp_path).pooling == wire.Pooling("first", is_normalized=False)
    write([*kinds, {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}], pooling_mode="lasttoken")
    assert loaded(tmp_path).pooling == wire.Pooling("last", is_normalized=True)
    for unknown in ({"type": "sentence_transformers.models.Dense", "path": "2_Dense"}, {"type": 7}, {}):
        write([*kinds, unknown], pooling_mode="mean")
        assert loaded(tmp_path).pooling is None
    write(kinds, pooling_mode_max_tokens=True)
    assert loaded(tmp_path).pooling is None
    assert "asks for what is not done here" in caplog.text


@pytest.mark.parametrize("setting", [{"quantize": "int8"}, {"deterministic": True}])
def test_what_does_not_reach_an_encoder_is_refused_by_name(tmp_path, setting):
    checkpoint(tmp_path, "BertModel", type_vocab_size=2)
    with pytest.raises(ModelError, match=f"is an encoder, which engine.{next(iter(setting))} does not reach"):
        loaded(tmp_path, **setting)


def test_an_encoder_with_a_tensor_missing_is_refused_by_name(tmp_path):
    model = checkpoint(tmp_path, "BertModel", type_vocab_size=2)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layer.1.output.dense.weight" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"has no tensor encoder.layer.1.output.dense.weight"):
        loaded(tmp_path)
