"""What is meant by a model's name, and what is said where nothing is."""

from __future__ import annotations

import pytest

from policies.model_source import HubModel, SourceError, gguf_in, hub_model, pulled_gguf, refusal, refuse_later_part

MODEL = HubModel("org/model", "v2")


class RepositoryNotFoundError(OSError):
    pass


class RevisionNotFoundError(OSError):
    pass


def test_a_hub_id_may_name_a_revision_that_has_slashes():
    assert hub_model("org/model", False) == HubModel("org/model", "")
    assert hub_model("org/model@refs/pr/1", False) == HubModel("org/model", "refs/pr/1")


@pytest.mark.parametrize("source", ["model", "./org/model", "/org/model", "~/model", "a/b/c", "", "@v1"])
def test_what_is_neither_a_directory_nor_a_hub_id_is_named(source):
    with pytest.raises(SourceError, match="no hub id"):
        hub_model(source, False)


def test_what_is_called_like_a_gguf_is_missed_as_a_file():
    with pytest.raises(SourceError, match=r"there is no file ./models/a\.gguf, and"):
        hub_model("./models/a.gguf", False)
    assert "there is no file models/a.gguf, and the hub" in str(refusal(HubModel("models/a.gguf", ""), TimeoutError()))


def test_a_file_that_is_no_model_is_called_a_file():
    with pytest.raises(SourceError, match=r"notes\.txt is a file"):
        hub_model("notes.txt", True)


def test_a_directory_is_itself_unless_it_holds_one_gguf_file_alone():
    assert gguf_in("d", ["config.json", "a.gguf", "b.gguf"]) is None
    assert gguf_in("d", []) is None
    assert gguf_in("d", ["README.md", "a.gguf"]) == "a.gguf"
    assert gguf_in("d", ["mmproj-a.gguf", "a.gguf"]) == "a.gguf"
    with pytest.raises(SourceError, match=r"d holds 2 GGUF files; name one of them, such as a\.gguf"):
        gguf_in("d", ["b.gguf", "a.gguf"])


def test_a_gguf_in_parts_is_one_model_and_its_first_part_stands_for_it():
    parts = [f"a-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert gguf_in("d", parts) == pulled_gguf(MODEL, parts) == parts[0]
    with pytest.raises(SourceError, match=r"d holds 2 GGUF files; name one of them, such as a-00001-of-00003\.gguf"):
        gguf_in("d", [*parts, "b.gguf"])
    with pytest.raises(SourceError, match="without the first, a-00001-of-00003"):
        gguf_in("d", parts[1:])
    refuse_later_part(f"models/{parts[0]}")
    with pytest.raises(
        SourceError, match=r"models/a-00003-of-00003\.gguf is part 3 of 3 of a model; name the first, a-0"
    ):
        refuse_later_part(f"models/{parts[2]}")
    for whole in ("a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-1-of-3.gguf", "a.gguf"):
        refuse_later_part(whole)
        assert gguf_in("d", [whole]) == whole


def test_of_pulled_files_one_is_the_model_and_two_are_a_question():
    assert pulled_gguf(MODEL, ["config.json"]) is None
    assert pulled_gguf(MODEL, ["config.json", "a.gguf"]) == "a.gguf"
    assert (
        pulled_gguf(MODEL, ["Q8_0/a-00002-of-00002.gguf", "Q8_0/a-00001-of-00002.gguf"]) == "Q8_0/a-00001-of-00002.gguf"
    )
    with pytest.raises(SourceError, match=r"\(a\.gguf, b\.gguf\)"):
        pulled_gguf(MODEL, ["b.gguf", "a.gguf"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RevisionNotFoundError(), "has no revision v2"),
        (RepositoryNotFoundError(), "no model org/model that is open"),
        (ConnectionError("refused\nmore"), "cannot be reached: refused$"),
        (TimeoutError(), "cannot be reached: TimeoutError$"),
    ],
)
def test_an_error_of_the_hub_s_is_one_sentence(error, said):
    with pytest.raises(SourceError, match=said):
        raise refusal(MODEL, error)
