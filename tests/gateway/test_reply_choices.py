"""A choice's text does not depend on how its tokens arrive, whole or piece by piece, with or without
log-probabilities."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.reply.choices import ChatLogprobs, Choice
from gateway.text.detokenize import Vocabulary
from policies import wire
from tests.gateway.test_text_stops import obvious
from tests.gateway.texts import byte_level

VOCABULARY = Vocabulary(byte_level())
END = byte_level().token_to_id("</s>")
words = st.lists(st.sampled_from(["the ", "river", " END", "🙂", "\n\n", "naïve", "EN", "D"]), max_size=12)
stops = st.lists(st.sampled_from(["END", "\n\n", "🙂", "river"]), max_size=3, unique=True)
ends = st.sampled_from([[], [END], byte_level().encode("river").ids[:1]])


def deltas(
    token_ids: list[int], cuts: list[int], reason: str, with_logprobs: bool, ends: bool = False
) -> list[wire.Delta]:
    """``ends``: the last one is an end token."""
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    finish = wire.Finish(reason, 0, 0, 0.0, 0.0, 0.0, has_end_token=ends)  # type: ignore[arg-type]
    pieces = [token_ids[a:b] for a, b in itertools.pairwise(bounds)] or [[]]
    return [
        wire.Delta(
            "r",
            0,
            piece,
            [wire.TokenLogprob(-1.0, [], []) for _ in piece] if with_logprobs else None,
            finish if i == len(pieces) - 1 else None,
        )
        for i, piece in enumerate(pieces)
    ]


def read(choice: Choice, arriving: list[wire.Delta]) -> tuple[str, list[str]]:
    """The text, taken after each delta, and the tokens that came with it."""
    text, tokens = "", []
    for delta in arriving:
        choice.take(delta)
        taken, choice.pending = choice.pending, ""
        text += taken
        logprobs = choice.take_logprobs()
        if logprobs is not None:
            assert taken or delta.finish is not None
            tokens += [bytes(entry.bytes) for entry in logprobs.content]
    return text, tokens


@given(words, stops, st.lists(st.integers(0, 40)), st.sampled_from(["stop", "length"]), st.booleans(), ends)
def test_any_arrival_gives_the_same_answer(parts, stop_strings, cuts, reason, with_logprobs, end):
    """However it ends: by an end token, whatever its text, or without one."""
    token_ids = byte_level().encode("".join(parts)).ids + end
    whole, stopped = obvious("".join(parts), stop_strings)
    logprobs = ChatLogprobs(VOCABULARY) if with_logprobs else None
    piecewise = Choice(0, VOCABULARY.decoder(continues=False), stop_strings, logprobs)
    text, tokens = read(piecewise, deltas(token_ids, cuts, reason, with_logprobs, bool(end)))
    at_once = Choice(0, VOCABULARY.decoder(continues=False), stop_strings, at_once=True)
    for delta in deltas(token_ids, cuts, reason, False, bool(end)):
        at_once.take(delta)
    assert text == at_once.pending == whole
    assert piecewise.finish_reason == at_once.finish_reason == ("stop" if stopped else reason)
    assert piecewise.num_tokens == at_once.num_tokens == num_until_stopped(token_ids, stop_strings, bool(end))
    if with_logprobs:
        # A token that a stop string begins in is still part of the text before it.
        assert b"".join(tokens).startswith(whole.encode())
        if not stopped:
            assert b"".join(tokens) == whole.encode()


def num_until_stopped(token_ids: list[int], stop_strings: list[str], ends: bool) -> int:
    """Tokens up to the one that completed a stop string."""
    for num in range(1, len(token_ids) - ends + 1):
        decoder = VOCABULARY.decoder(continues=False)
        if obvious(decoder.feed(token_ids[:num]), stop_strings)[1]:
            return num
    return len(token_ids)


def test_an_end_without_a_token_is_an_end():
    choice = Choice(0, VOCABULARY.decoder(continues=False))
    choice.take(wire.Delta("r", 0, [], None, wire.Finish("stop", 0, 0, 0.0, 0.0, 0.0)))
    assert (choice.pending, choice.num_tokens, choice.finish_reason) == ("", 0, "stop")


def test_a_token_without_text_at_the_very_end_has_its_logprob():
    choice = Choice(0, VOCABULARY.decoder(continues=False), logprobs=ChatLogprobs(VOCABULARY))
    river = byte_level().encode("river").ids
    for delta in deltas([*river, END], [], "length", True):
        choice.take(delta)
    assert choice.pending == "river"
    assert [entry.token for entry in choice.take_logprobs().content][-1] == "</s>"
