"""Properties of routing: what is known of a worker's cache, and who gets the next request."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from policies.routing import COPY_WEIGHT, SEQUENCE_WEIGHT, Candidate, PrefixIndex, choose


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{position}".encode() for position in range(length)]


def test_a_prefix_is_as_long_as_what_is_held_or_expected_from_its_first_block():
    index = PrefixIndex(10)
    blocks = chain("a", 6)
    assert index.match(blocks) == 0
    assert index.update(blocks[:2], [])
    index.expect(blocks[:5])
    assert index.match(blocks) == 5
    index.forget(blocks[:5])
    assert index.match(blocks) == 2
    assert index.update([], blocks[1:2])
    assert index.match(blocks) == 1
    assert index.match([]) == 0


def test_two_requests_that_are_expected_leave_one_after_the_other():
    index = PrefixIndex(10)
    blocks = chain("a", 3)
    index.expect(blocks)
    index.expect(blocks[:2])
    index.forget(blocks)
    assert index.match(blocks) == 2
    index.forget(blocks[:2])
    assert index.match(blocks) == 0


def test_a_worker_that_claims_more_blocks_than_it_has_is_not_believed():
    index = PrefixIndex(3)
    assert index.update(chain("a", 3), [])
    assert not index.update(chain("b", 1), [])


@given(st.integers(0, 2**32 - 1))
def test_over_a_long_walk_the_index_agrees_with_a_plain_set(seed):
    rng = random.Random(seed)
    index, held, flights = PrefixIndex(1000), dict[str, int](), list[list[bytes]]()
    chains = {name: chain(name, 20) for name in "abcd"}
    for _ in range(200):
        name = rng.choice("abcd")
        length = held.get(name, 0)
        match rng.randrange(4):
            case 0:
                new_length = rng.randint(length, 20)
                assert index.update(chains[name][length:new_length], [])
                held[name] = new_length
            case 1:
                new_length = rng.randint(0, length)
                assert index.update([], chains[name][new_length:length])
                held[name] = new_length
            case 2:
                flights.append(chains[name][: rng.randint(0, 20)])
                index.expect(flights[-1])
            case 3 if flights:
                index.forget(flights.pop(rng.randrange(len(flights))))
        known = {block for name, length in held.items() for block in chains[name][:length]}
        known.update(block for flight in flights for block in flight)
        for blocks in chains.values():
            plain = next((position for position, block in enumerate(blocks) if block not in known), len(blocks))
            assert index.match(blocks) == plain, f"seed {seed}"
        assert len(index) == sum(held.values())


def test_a_prefix_decides_between_workers_with_equal_work():
    assert choose(1000, [Candidate(0, 0), Candidate(512, 0)]) == 1


def test_a_worker_that_is_far_behind_loses_what_its_prefix_would_win():
    num_matched = 512
    least = int(COPY_WEIGHT * num_matched)
    assert choose(1000, [Candidate(0, 0), Candidate(num_matched, least - 1)]) == 1
    assert choose(1000, [Candidate(0, 0), Candidate(num_matched, least + 1)]) == 0


def test_a_short_prefix_is_worth_no_crowd():
    crowd = int(COPY_WEIGHT * 64 / SEQUENCE_WEIGHT) + 1
    assert choose(1000, [Candidate(0, 0, 0), Candidate(64, 0, crowd)]) == 0
    assert choose(1000, [Candidate(0, 0, 0), Candidate(64, 0, crowd - 2)]) == 1


def test_a_beginning_that_many_share_is_copied_to_a_worker_that_idles_and_then_both_work():
    open_there, matched = [0, 0], [0, 0]
    for _ in range(40):  # none of which ends
        candidates = [
            Candidate(have, 0, num_open, 0, num_open) for have, num_open in zip(matched, open_there, strict=True)
        ]
        chosen = choose(4100, candidates)
        open_there[chosen] += 1
        matched[chosen] = 4000
    assert min(open_there) >= 19


def test_a_beginning_that_one_request_has_is_worth_as_much_as_one_that_none_has():
    crowd = int(COPY_WEIGHT * 4000 / SEQUENCE_WEIGHT)
    for num_sharing in (0, 1):
        assert choose(4100, [Candidate(0, 0, 0), Candidate(4000, 0, crowd - 1, 0, num_sharing)]) == 1
        assert choose(4100, [Candidate(0, 0, 0), Candidate(4000, 0, crowd + 1, 0, num_sharing)]) == 0


def test_workers_alike_take_turns_by_what_they_were_given():
    assert choose(100, [Candidate(0, 0, 3, 900), Candidate(0, 0, 3, 100), Candidate(0, 0, 4, 0)]) == 1


@given(
    st.integers(1, 100_000),
    st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 100_000)), min_size=1, max_size=8),
)
def test_the_copies_bought_for_balance_never_cost_more_than_they_spare(num_prompt_tokens, workers):
    candidates = [Candidate(min(matched, num_prompt_tokens), pending) for matched, pending in workers]
    chosen = candidates[choose(num_prompt_tokens, candidates)]
    for other in candidates:
        spared = other.num_pending_tokens - chosen.num_pending_tokens
        copied = other.num_matched_tokens - chosen.num_matched_tokens
        assert copied <= 0 or COPY_WEIGHT * copied <= spared


def test_a_flood_of_equal_prompts_is_split_once_one_worker_is_behind():
    pending, sent = [0, 0], [0, 0]
    for _ in range(100):
        chosen = choose(1000, [Candidate(900 if sent[worker] else 0, pending[worker]) for worker in range(2)])
        pending[chosen] += 100 if sent[chosen] else 1000
        sent[chosen] += 1
    assert min(sent) > 40
