"""What cannot draft for a model is refused by the worker that is told to use it, in one sentence and with status 2."""

import pytest

from tests.worker import test_eagle, test_medusa
from tests.worker.test_parallel_worker import refusal
from tests.worker.tiny import checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    checkpoint(directory, "LlamaForCausalLM")
    return directory


def other_words(directory):
    checkpoint(directory, "LlamaForCausalLM", vocab_size=64)


def narrow_medusa(directory):
    test_medusa.saved(test_medusa.random_heads(size=24), directory)


def narrow_eagle(directory):
    test_eagle.saved(test_eagle.random_head(size=24), directory)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (other_words, "has a vocabulary of 64 tokens, but"),
        (narrow_medusa, "are for another model than"),
        (narrow_eagle, "is for another model than"),
    ],
)
def test_a_drafter_for_another_model_is_refused_by_name(tmp_path, source, make, named):
    draft = tmp_path / "draft"
    draft.mkdir()
    make(draft)
    sentence = refusal(tmp_path, source, speculation={"draft_model": str(draft)})
    assert str(draft) in sentence
    assert named in sentence
    assert str(source) in sentence


def test_a_draft_model_beside_several_ranks_is_refused_by_name(tmp_path, source):
    sentence = refusal(tmp_path, source, tensor_parallel=2, speculation={"draft_model": str(source)})
    assert "engine.speculation.draft_model works beside a model in one process only" in sentence
