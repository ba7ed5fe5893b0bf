"""Room in a worker: for whom there is some, and who keeps what."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from policies.room import MAX_DISPLACED, OVERCOMMIT, Amount, Room

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
    room.reported(1, Amount(0, 400))  # it was given 900 of 1,000, and uses 600
    assert not room.has_room(1, 1, 300)  # which may not have what it was given lately in it
    room.reported(1, Amount(0, 400))
    room.reported(1, Amount(0, 400))
    assert room.has_room(1, 1, 400)
    assert not room.has_room(1, 1, 401)
    room.reported(1, None)
    assert not room.has_room(1, 1, 400)


def test_the_more_important_are_sent_past_a_full_batch_and_the_others_are_not():
    room = full_of(1)
    assert room.has_room(0, 1, 10)
    assert not room.has_room(1, 1, 10)
    assert not room.has_room(2, 1, 10)


def test_places_that_are_lent_are_given_to_others_up_to_twice_what_fits():
    room = full_of(1)
    room.reported(1, Amount(-1, 830), num_idle=3)
    for _ in range(3):
        assert room.has_room(1, 1, 10)
        room.give(1, 1, 1, 10)
    assert not room.has_room(1, 1, 10)
    room.reported(1, Amount(-4, 800), num_idle=1000)
    while room.has_room(2, 1, 10):
        room.give(2, 2, 1, 10)
    assert room.num_sequences == MAX_DISPLACED * 17
    room.reported(2, Amount(0, 400), num_idle=1)
    assert not room.has_room(1, 1, 10)


def test_three_classes_one_above_the_other_come_to_no_more_than_twice_what_fits():
    room = full_of(2)
    for priority in (1, 0):
        while room.has_room(priority, 1, 10):
            room.give(priority, priority, 1, 10)
    assert room.num_sequences == MAX_DISPLACED * 17


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


def test_a_class_whose_share_is_less_than_a_place_keeps_one():
    room = Room({0: 0.9, 2: 0.01}, 16, 1000)
    for _ in range(17):
        room.give(2, 2, 1, 10)
    while room.has_room(0, 1, 10):
        room.give(0, 0, 1, 10)
    assert room.num_sequences == 17 + 16 - 1


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


def test_a_gateway_of_several_keeps_to_its_part():
    room = Room(SHARES, 16, 1000, num_gateways=3)
    room.give(1, 1, 5, 300)
    assert not room.has_room(1, 1, 10)
    room.reported(2, None)  # one has left
    assert room.has_room(1, 3, 200)
    assert not room.has_room(1, 4, 200)
    assert not room.has_room(1, 3, 201)


def test_a_gateway_that_sends_alone_counts_its_places_itself():
    room = full_of(1)
    for _ in range(2):
        room.reported(1, Amount(4, 900))
    assert not room.has_room(1, 1, 10)


def test_what_ends_adds_nothing_to_what_was_told_to_be_free():
    room = Room(SHARES, 16, 1000, num_gateways=2)
    room.give(1, 1, 8, 80)
    room.reported(2, Amount(8, 900))
    assert not room.has_room(1, 1, 10)  # what was given lately may not be in it
    room.reported(2, Amount(8, 900))
    room.give(1, 1, -2, -20)
    assert room.has_room(1, 4, 10)
    assert not room.has_room(1, 5, 10)


def test_a_gateway_that_is_busy_alone_comes_to_nearly_all_of_the_worker():
    room = Room(SHARES, 16, 1000, num_gateways=3)
    for _ in range(20):
        while room.has_room(1, 1, 10):
            room.give(1, 1, 1, 10)
        room.reported(3, Amount(16 - room.num_sequences, 1000 - room.num_tokens))
    assert room.num_sequences == 16
    room.reported(3, None)  # the others have come, and some of theirs wait
    assert not room.has_room(1, 1, 10)


def test_each_of_several_lets_some_step_back_and_they_keep_their_share_of_its_part():
    room = Room(SHARES, 20, 1000, num_gateways=2)
    for _ in range(10):
        room.give(2, 2, 1, 10)
    num_sent = 0
    while room.has_room(0, 1, 10):
        room.give(0, 0, 1, 10)
        num_sent += 1
    assert num_sent == 10 - 1


PLACES, TOKENS = 16, 1000


def walk_of_several(seed: int, num_gateways: int, priorities: list[int], reports: bool) -> int:
    """The most sequences that the worker had at once; what it tells is true when it tells it."""
    rng = random.Random(seed)
    rooms = [Room(SHARES, PLACES, TOKENS, num_gateways) for _ in range(num_gateways)]
    held = list[tuple[Room, int]]()
    most = 0
    for _ in range(400):
        room, own = rng.choice(rooms), rng.choice(priorities)
        if room.has_room(own, 1, 10):
            room.give(own, own, 1, 10)
            held.append((room, own))
        if held and rng.random() < 0.2:
            room, own = held.pop(rng.randrange(len(held)))
            room.give(own, own, -1, -10)
        if reports and rng.random() < 0.2:
            free = Amount(PLACES - len(held), TOKENS - 10 * len(held))
            for each in rooms:
                each.reported(num_gateways, free if len(held) <= PLACES else None)
        most = max(most, len(held))
    return most


several = st.integers(2, 5)


@given(st.integers(0, 2**32 - 1), several)
def test_gateways_together_give_a_worker_no_more_than_one_would(seed, num_gateways):
    assert walk_of_several(seed, num_gateways, [1], reports=False) <= PLACES + PLACES // OVERCOMMIT


@given(st.integers(0, 2**32 - 1), several)
def test_what_others_leave_unused_is_not_given_twice(seed, num_gateways):
    """To the parts of all comes at most what was free, and the last few places that each may take."""
    most = walk_of_several(seed, num_gateways, [1], reports=True)
    assert most <= PLACES + PLACES // OVERCOMMIT + PLACES + num_gateways - 1


@given(st.integers(0, 2**32 - 1), several)
def test_with_those_who_step_back_it_is_a_bounded_number_too(seed, num_gateways):
    most = walk_of_several(seed, num_gateways, [0, 1, 2], reports=True)
    assert most <= MAX_DISPLACED * (PLACES + PLACES // OVERCOMMIT) + PLACES + num_gateways - 1
