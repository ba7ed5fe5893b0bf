"""Room in a worker: for whom there is some, and who keeps what."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from policies.room import MAX_DISPLACED, Room

SHARES = {0: 0.5, 1: 0.3, 2: 0.1}


def full_of(priority: int) -> Room:
    """16 places and one beyond, 1,000 tokens."""
    room = Room(SHARES, 16, 1000)
    for _ in range(17):
        room.give(priority, priority, 1, 10)
    return room


def test_an_empty_worker_takes_whatever_comes():
    assert Room(SHARES, 16, 1000).has_room(2, 40, 5000)


def test_a_batch_takes_a_little_more_than_it_has_places_and_no_more_than_its_memory():
    room = Room(SHARES, 16, 1000)
    room.give(1, 1, 16, 900)
    assert room.has_room(1, 1, 100)
    assert not room.has_room(1, 2, 100)
    assert not room.has_room(1, 1, 101)
    assert room.has_room(1, 1, 300, num_free_tokens=300)


def test_the_more_important_are_sent_past_a_full_batch_and_the_others_are_not():
    room = full_of(1)
    assert room.has_room(0, 1, 10)
    assert not room.has_room(1, 1, 10)
    assert not room.has_room(2, 1, 10)


def test_those_who_step_back_keep_their_share_of_places_and_memory():
    room = full_of(2)
    num_sent = 0
    while room.has_room(0, 1, 10):
        room.give(0, 0, 1, 10)
        num_sent += 1
    assert num_sent == 16 - 1  # a tenth of 16 places, at least one, stays
    room = full_of(2)
    assert room.has_room(0, 1, 900)
    assert not room.has_room(0, 1, 901)


def test_what_was_sent_on_the_guarantee_is_part_of_the_share_and_steps_back_for_nobody():
    room = Room(SHARES, 16, 1000)
    for _ in range(5):
        room.give(0, 1, 1, 10)  # claimed: three tenths of 16 places are 4, so the others keep none
    for _ in range(12):
        room.give(1, 1, 1, 10)
    num_sent = 0
    while room.has_room(0, 1, 10):
        room.give(0, 0, 1, 10)
        num_sent += 1
    assert num_sent == 16 - 5


@given(st.integers(0, 2**32 - 1))
def test_a_worker_never_gets_more_than_a_bounded_number(seed):
    rng = random.Random(seed)
    room, held = Room(SHARES, 16, 1000), list[tuple[int, int, int, int]]()
    for _ in range(300):
        own, num_sequences, num_tokens = rng.randrange(3), rng.randint(1, 3), rng.randint(1, 100)
        priority = rng.choice((0, own))
        if room.has_room(priority, num_sequences, num_tokens):
            held.append((priority, own, num_sequences, num_tokens))
            room.give(priority, own, num_sequences, num_tokens)
        if held and rng.random() < 0.3:
            priority, own, num_sequences, num_tokens = held.pop(rng.randrange(len(held)))
            room.give(priority, own, -num_sequences, -num_tokens)
        assert sum(num_sequences for _, _, num_sequences, _ in held) <= MAX_DISPLACED * 17, f"seed {seed}"
        assert room.num_tokens == sum(num_tokens for _, _, _, num_tokens in held)
