"""Stop strings against the obvious way to find them: look at the whole text after each character."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from gateway.text import StopStrings


def obvious(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is sent of ``text``, and whether a stop string ended it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


few_letters = st.text("ab", max_size=30)
stop_strings = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4)


@given(few_letters, stop_strings, st.lists(st.integers(0, 30)))
def test_any_split_gives_what_the_whole_text_gives(text, stops, cuts):
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    scanner, sent = StopStrings(stops), ""
    for a, b in itertools.pairwise(bounds):
        safe, stopped = scanner.feed(text[a:b])
        sent += safe
        if stopped:
            break
        assert sent == text[: len(sent)]
        assert not any(sent.endswith(stop[:n]) and text[:b] == sent for stop in stops for n in range(1, len(stop)))
    else:
        stopped = False
        sent += scanner.finish()
    assert (sent, stopped) == obvious(text, stops)


def test_no_part_of_a_stop_string_leaks():
    scanner = StopStrings(["\n\nHuman:"])
    assert [scanner.feed(piece)[0] for piece in ("Yes.", "\n", "\nHu", "man")] == ["Yes.", "", "", ""]
    assert scanner.feed(":") == ("", True)


def test_what_was_held_back_comes_after_all_when_it_becomes_something_else():
    scanner = StopStrings(["END"])
    assert scanner.feed("the E") == ("the ", False)
    assert scanner.feed("N") == ("", False)
    assert scanner.feed("GINE") == ("ENGIN", False)
    assert scanner.finish() == "E"


def test_the_string_that_is_complete_first_wins():
    assert StopStrings(["cd", "abcde"]).feed("xabcdef") == ("xab", True)


def test_of_two_complete_at_once_the_longer_wins():
    assert StopStrings(["c", "abc"]).feed("xabc") == ("x", True)


def test_a_text_that_repeats_itself_costs_no_more():
    stops = ["a" * 1023 + "b"] * 4
    scanner = StopStrings(stops)
    started = time.process_time()
    for _ in range(20_000):
        scanner.feed("a")
    # A scan of the held text for each character would take minutes.
    assert time.process_time() - started < 20
