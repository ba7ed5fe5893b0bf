"""Medusa heads: what they say, for whom, what is refused, and that no answer changes."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.settings import Speculation as SpeculationSettings
from policies.terms import Sampling
from tests.worker.test_draft_model import TINY, clock
from tests.worker.test_engine_models import STEMS, Families, run
from tests.worker.test_speculation import everything
from tests.worker.tiny import SIZES, VOCAB_SIZE
from worker.models import ModelError
from worker.runner import Runner
from worker.speculation import Speculation
from worker.speculation.load import draft_model
from worker.speculation.medusa import MedusaDrafter

NUM_HEADS = 4
HIDDEN_SIZE = SIZES["hidden_size"]


class Block(nn.Module):
    """As published."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, hidden):
        return hidden + nn.functional.silu(self.linear(hidden))


def random_heads(seed=0, size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, num_layers=2):
    torch.manual_seed(seed)
    return nn.ModuleList(
        nn.Sequential(*(Block(size) for _ in range(num_layers)), nn.Linear(size, vocab_size, bias=False))
        for _ in range(NUM_HEADS)
    ).eval()


def saved(heads, directory, suffix="safetensors", **changes):
    directory.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 2, "base_model_name_or_path": "tiny", **changes}
    (directory / "config.json").write_text(json.dumps(config))
    if suffix == "pt":
        torch.save(heads.state_dict(), directory / "medusa_lm_head.pt")
    else:
        save_file(heads.state_dict(), directory / "medusa_lm_head.safetensors")
    return directory


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


def settings_with(directory):
    return EngineSettings(device="cpu", speculation=SpeculationSettings(draft_model=str(directory)))


def drafter_of(families, directory):
    families.oracle("llama")
    target = Runner.load(str(families.directory / "llama"), TINY)
    return target, draft_model(str(families.directory / "llama"), settings_with(directory), target, clock())


class Recorded(MedusaDrafter):
    """Keeps what it was asked, and what it said."""

    said = ()

    def propose(self, sequences, num_tokens):
        drafts = super().propose(sequences, num_tokens)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self.said = (*self.said, (list(sequence.token_ids), draft.token_ids))
        return drafts


@torch.inference_mode()
def reference(oracle, heads, token_ids):
    """What the published forward says after these tokens, the last of which the model has written itself."""
    hidden = oracle.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0, -1]
    return [int(head(hidden).argmax()) for head in heads]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_heads_say_what_the_published_forward_says_and_answers_stay(families, tmp_path, suffix, temperature):
    heads = random_heads()
    target, drafter = drafter_of(families, saved(heads, tmp_path, suffix))
    arrivals = [
        (number, wire.Submit(str(number), stem[: 8 + number], Sampling(13, seed=number, temperature=temperature)))
        for number, stem in enumerate(STEMS * 2)
    ]
    plain = families.engine("llama")
    plain.speculates = False
    expected, _ = run(plain, arrivals)
    families.runner("llama")
    guessing = families.engine("llama", num_blocks=13)
    guessing._runner = target
    drafter = Recorded(target, drafter._heads, clock())
    guessing._speculation = Speculation([drafter], 3, everything, clock())
    guessing.speculates = True
    answers, _ = run(guessing, arrivals)
    assert answers == expected
    drafts = [(token_ids, draft) for token_ids, draft in drafter.said if draft]
    assert len(drafts) > 20
    for token_ids, draft in drafts:
        assert draft == reference(families.oracle("llama"), heads, token_ids)[: len(draft)]
    assert not drafter._seen


def test_heads_that_are_right_save_steps(families, tmp_path):
    # With a vocabulary matrix that says the same token whatever the hidden row, on a model that is biased towards it.
    heads = random_heads()
    with torch.no_grad():
        for head in heads:
            head[0].linear.bias[0] = 1e4
            head[-1].weight[:, 0] = 0.0
            head[-1].weight[7, 0] = 1.0
    target, drafter = drafter_of(families, saved(heads, tmp_path))
    engine = families.engine("llama")
    engine._runner = target
    engine._speculation = Speculation([drafter], NUM_HEADS, everything, clock())
    engine.speculates = True
    sampling = Sampling(21, temperature=0.0, logit_bias={7: 100.0}, ignore_eos=True)
    engine.add(wire.Submit("one", STEMS[0][:9], sampling))
    token_ids, num_steps = [], 0
    while engine.has_work:
        num_steps += 1
        for delta in engine.step()[0]:
            token_ids += delta.token_ids
    assert token_ids == [7] * 21
    assert num_steps < 12


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"size": 24}, r"0\.0\.linear\.weight is \[24, 24\]"), ({"vocab_size": 50}, r"0\.2\.weight is \[50, 32\]")],
)
def test_heads_of_another_width_or_vocabulary_are_refused_by_name(families, tmp_path, changes, named):
    with pytest.raises(ModelError, match=f"for another model than .*llama: {named}"):
        drafter_of(families, saved(random_heads(**changes), tmp_path))


def test_files_that_are_not_there_or_broken_are_refused(families, tmp_path):
    directory = saved(random_heads(), tmp_path)
    (directory / "medusa_lm_head.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="cannot be read"):
        drafter_of(families, directory)
    (directory / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ModelError, match="have neither"):
        drafter_of(families, directory)
    (directory / "medusa_lm_head.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="cannot be read"):
        drafter_of(families, directory)
