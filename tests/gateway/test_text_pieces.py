"""A conversation read piece by piece is the conversation read at once, and each tenant's memory is its own."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from demo import MODEL_DIR
from gateway.text import pieces
from gateway.text.pieces import Pieces, _marks, _parts
from gateway.text.together import Together

DEMO = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>")
remembering = Pieces(DEMO)


@given(st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=20), st.sampled_from(("user\n", " hello", "\n\n")))))
def test_piece_by_piece_is_the_same_as_at_once(parts):
    prompt = "".join(parts)
    at_once = DEMO.encode(prompt, add_special_tokens=False).ids
    assert remembering.encode(prompt, "tenant") == at_once
    assert remembering.encode(prompt, "tenant") == at_once, "also when all of it is remembered"


texts = st.one_of(st.sampled_from(MARKS), st.sampled_from((" hello", "\n", "<|im", "_end|>")), st.text(max_size=8))


@given(st.lists(texts, max_size=6), st.lists(st.lists(texts, max_size=4), max_size=6), st.lists(texts, max_size=6))
def test_a_new_turn_between_what_stood_there_before_is_the_same_as_at_once(before, turns, behind):
    memory = Pieces(DEMO)
    for turn in ([], ["a question long enough to be asked anew each time"], *turns):
        prompt = "".join((*before, MARKS[0], *turn, MARKS[1], *behind))
        for _ in range(2):
            assert memory.encode(prompt, "tenant") == DEMO.encode(prompt, add_special_tokens=False).ids


def test_what_stands_around_the_newest_turn_is_not_cut_again():
    memory = Pieces(DEMO)
    for number in range(3):
        question = f"user\nHow far is it to the mill with the number {number}?"
        found = memory.find(f"<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>{question}<|im_end|>\n", "tenant")
        memory.join(found, memory.read(found.missing))
        assert question in found.missing
    assert [found.known[0], len(found.known)] == [
        memory.encode("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>", "a"),
        3,
    ]
    mark = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n"
    assert len(memory.find(mark, "tenant").known) > 3, "with a special token in it, it is more than a turn"
    assert len(memory.find(f"<|im_start|>{question}<|im_end|>\n", "tenant").known) == 4


def test_a_conversation_of_many_turns_is_read_in_portions(monkeypatch):
    class Noted(Pieces):
        def read(self, texts, *others):
            portions.append(len(texts))
            return super().read(texts, *others)

    portions: list[int] = []
    memory = Noted(DEMO)
    portions.clear()
    monkeypatch.setattr(pieces, "MAX_READ_AT_ONCE", 4)
    prompt = "".join(f"<|im_start|>user\nturn number {number}<|im_end|>" for number in range(10))
    assert memory.encode(prompt, "tenant") == DEMO.encode(prompt, add_special_tokens=False).ids
    assert portions == [4, 4, 2]


def test_a_tokenizer_that_treats_the_first_word_apart_is_read_at_once():
    words = {"<s>": 0, "▁": 1, "a": 2, "▁a": 3, "[UNK]": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    prompt = "a<s>a a"
    assert Pieces(tokenizer).encode(prompt, "") == tokenizer.encode(prompt, add_special_tokens=False).ids


def test_a_tenant_finds_only_what_it_brought(monkeypatch):
    memory = Pieces(DEMO)
    read = []
    by_tokenizer = memory.read
    monkeypatch.setattr(memory, "read", lambda texts, *_: read.append(texts) or by_tokenizer(texts))
    first, second = "user\n" + "a long question " * 4, "user\n" + "and a longer one " * 4
    memory.encode(f"<|im_start|>{first}<|im_end|>\n", "one")
    memory.encode(f"<|im_start|>{first}<|im_end|>\n<|im_start|>{second}<|im_end|>\n", "one")
    memory.encode(f"<|im_start|>{first}<|im_end|>\n<|im_start|>{second}<|im_end|>\n", "one")
    memory.encode(f"<|im_start|>{first}<|im_end|>\n", "two")
    assert read == [[first, "\n"], [first, second], [second], [first, "\n"]], "the newest turn is read once more"


def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(pieces, "MAX_REMEMBERED_CHARS", 1000)
    memory = Pieces(DEMO)
    for number in range(200):
        memory.encode(f"<|im_start|>a question with the number {number}<|im_end|>", "tenant")
        held = [*memory._young, *memory._old]
        assert sum(len(tenant) + len(piece) for tenant, piece in held) <= 2000
    assert memory.encode("x" * 70_000, "tenant") == DEMO.encode("x" * 70_000, add_special_tokens=False).ids
    assert sum(len(frame.before) + len(frame.behind) for frame in memory._frames.values()) <= 1000
    assert all(len(piece) < 70_000 for _, piece in memory._young)


async def test_requests_of_one_turn_are_read_in_one_call_and_none_hears_of_anothers_failure():
    calls = []

    def read(texts):
        calls.append(texts)
        if "bad" in texts:
            raise ValueError("bad")
        return [[len(text)] for text in texts]

    together = Together(read)
    assert await asyncio.gather(together.read(["a", "bb"]), together.read(["ccc"])) == [[[1], [2]], [[3]]]
    assert calls == [["a", "bb", "ccc"]]
    one, two, three = await asyncio.gather(
        together.read(["a"]), together.read(["bad"]), together.read(["bb"]), return_exceptions=True
    )
    assert (one, three) == ([[1]], [[2]])
    assert isinstance(two, ValueError)


async def test_a_request_that_hangs_up_while_it_waits_to_be_read_leaves_the_others_alone():
    together = Together(lambda texts: [[len(text)] for text in texts])
    gone, stays = asyncio.create_task(together.read(["a"])), asyncio.create_task(together.read(["bb"]))
    await asyncio.sleep(0)  # both wait for the end of this turn
    gone.cancel()
    assert await stays == [[2]]
    assert gone.cancelled()


@given(st.lists(st.text("<ab>", max_size=6), max_size=12))
def test_what_is_a_part_of_another_special_token_is_found_as_by_holding_each_against_each(contents):
    assert _parts(contents) == {each for each in contents if sum(each in other for other in contents) > 1}


def test_tens_of_thousands_of_special_tokens_are_held_against_each_other_in_no_time():
    """As models of speech have them; a start took minutes."""
    tokenizer = Tokenizer.from_str(DEMO.to_str())
    names = [f"<custom_token_{number}>" for number in range(30_000)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (*names, "<custom", "ken_77>")])
    marks = _marks(tokenizer).keys()
    assert marks >= set(names)
    assert marks.isdisjoint(("<custom", "ken_77>"))
