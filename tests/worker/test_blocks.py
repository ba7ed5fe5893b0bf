import itertools
import random
from typing import NamedTuple

import pytest

from policies.prefix import Chain, Link
from worker.blocks import NO_PARENT, Pool

SIZE = 2


class Held(NamedTuple):
    """A table whose full blocks are sealed, and the chain they are sealed with."""

    block_ids: list[int]
    chain: Chain


def hold(pool, token_ids, salt=b""):
    """What a sequence does: find its beginning, allocate the rest, seal what is full."""
    chain = Chain(SIZE, salt)
    links = chain.extend(token_ids)
    block_ids = pool.match(links, chain.key, len(links))
    num_found = len(block_ids)
    pool.acquire(block_ids)
    block_ids += pool.allocate(-(-len(token_ids) // SIZE) - num_found, block_ids[-1] if block_ids else NO_PARENT)
    for position in range(num_found, len(links)):
        parent = block_ids[position - 1] if position else NO_PARENT
        block_ids[position] = pool.seal(block_ids[position], parent, links[position], chain.key)
    return Held(block_ids, chain)


def num_found(pool, token_ids, salt=b""):
    chain = Chain(SIZE, salt)
    return len(pool.match(chain.extend(token_ids), chain.key, 1000))


def test_a_sequence_lies_in_one_run():
    pool = Pool(64)
    first = pool.allocate(5)
    second = pool.allocate(5)
    assert first == list(range(first[0], first[0] + 5))
    assert second == list(range(second[0], second[0] + 5))
    for table in (first, second, first, second):
        table += pool.allocate(1, table[-1])
    assert first == list(range(first[0], first[0] + 7))
    assert second == list(range(second[0], second[0] + 7))
    pool.audit([first, second])


def test_tables_stay_in_few_runs_on_a_pool_that_is_full_of_cache():
    rng = random.Random(3)
    pool = Pool(600)
    growing, num_runs, num_tables = [], 0, 0
    for _ in range(3000):
        if len(growing) < 12:
            growing.append(hold(pool, [rng.randrange(9999) for _ in range(2 * rng.randrange(4, 30))]).block_ids)
        table = rng.choice(growing)
        table += pool.allocate(1, table[-1])
        if rng.random() < 0.1:
            table = growing.pop(rng.randrange(len(growing)))
            num_runs += 1 + sum(after != before + 1 for before, after in itertools.pairwise(table))
            num_tables += 1
            pool.release(table)
    assert pool.num_cached > 50
    assert num_runs < 2 * num_tables


def test_what_a_finished_sequence_leaves_is_found_again_up_to_the_first_difference():
    pool = Pool(16)
    held = hold(pool, [1, 2, 3, 4, 5])
    pool.release(held.block_ids)
    assert (pool.num_cached, pool.num_used) == (2, 0)
    assert num_found(pool, [1, 2, 3, 4, 9, 9]) == 2
    assert num_found(pool, [1, 2, 4, 4]) == 1
    assert num_found(pool, [2, 2, 3, 4]) == 0
    pool.audit([])


def test_another_salt_finds_nothing():
    pool = Pool(16)
    hold(pool, [1, 2, 3, 4], b"tenant")
    assert num_found(pool, [1, 2, 3, 4], b"tenant") == 2
    assert num_found(pool, [1, 2, 3, 4], b"stranger") == 0


def test_a_colliding_digest_costs_a_hit_and_never_serves_other_tokens():
    pool = Pool(16)
    held = hold(pool, [1, 2])
    (true,) = held.chain.links
    forged = Link(true.digest, b"other tokens")
    assert pool.match([forged], held.chain.key, 1) == []
    assert pool.match([true], b"another key", 1) == []
    (own,) = pool.allocate(1)
    assert pool.seal(own, NO_PARENT, forged, held.chain.key) is None
    child = Chain(SIZE, b"").extend([1, 2, 3, 4])[1]
    assert pool.find(child, own, held.chain.key) is None
    pool.audit([held.block_ids, [own]])


def test_what_is_doubted_is_found_no_more_nor_is_what_goes_on_behind_it_but_what_others_use_is():
    pool = Pool(16)
    whole, other = hold(pool, [1, 2, 3, 4, 5, 6, 7, 8]), hold(pool, [1, 2, 3, 4, 9, 9])
    pool.release(hold(pool, [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]).block_ids)
    pool.take_moved()
    pool.doubt(whole.block_ids)
    pool.audit([whole.block_ids, other.block_ids])
    assert num_found(pool, [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]) == 2
    assert num_found(pool, [1, 2, 3, 4, 9, 9]) == 3
    stored, gone = pool.take_moved()
    assert (len(stored), len(gone)) == (0, 3)
    pool.release(whole.block_ids)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (3, 0, 13)
    pool.audit([other.block_ids])


def test_two_that_computed_the_same_block_end_up_on_one():
    pool = Pool(16)
    first, second = pool.allocate(1), pool.allocate(1)
    chain = Chain(SIZE, b"")
    (link,) = chain.extend([1, 2])
    assert pool.seal(first[0], NO_PARENT, link, chain.key) == first[0]
    assert pool.seal(second[0], NO_PARENT, link, chain.key) == first[0]
    assert (pool.num_used, pool.num_users(first[0])) == (1, 2)
    pool.audit([first, first])


def test_the_least_recently_used_leaf_goes_first_and_no_parent_before_its_child():
    pool = Pool(6)
    old = hold(pool, [1, 2, 3, 4])
    pool.release(old.block_ids)
    young = hold(pool, [1, 2, 5, 6])
    pool.release(young.block_ids)
    other = hold(pool, [7, 8])
    pool.release(other.block_ids)
    pool.allocate(3)  # two were free
    assert [num_found(pool, tokens) for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8])] == [1, 2, 1]
    pool.allocate(1)
    assert [num_found(pool, tokens) for tokens in ([1, 2, 5, 6], [7, 8])] == [1, 1]
    pool.allocate(1)
    assert [num_found(pool, tokens) for tokens in ([1, 2], [7, 8])] == [0, 1]


def test_a_block_in_use_is_never_evicted():
    pool = Pool(4)
    held = hold(pool, [1, 2, 3, 4])
    assert pool.num_available == 2
    pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.allocate(1)
    assert num_found(pool, [1, 2, 3, 4]) == 2
    assert held.block_ids == pool.match(held.chain.links, held.chain.key, 9)


def test_releasing_too_often_is_a_broken_invariant():
    pool = Pool(4)
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError):
        pool.release(block_ids)


def test_the_audit_notices_a_lost_block_and_a_wrong_count():
    pool = Pool(4)
    block_ids = pool.allocate(2)
    pool.audit([block_ids])
    for tables in ([], [block_ids, block_ids], [block_ids[:1]]):
        with pytest.raises(AssertionError):
            pool.audit(tables)


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_sharing_releasing_and_evicting_keeps_every_block_accounted_for(seed):
    rng = random.Random(seed)
    pool = Pool(rng.choice([3, 17, 200]))
    tables = []
    for _ in range(500):
        if tables and rng.random() < 0.5:
            table = tables.pop(rng.randrange(len(tables)))
            if rng.random() < 0.1:
                pool.doubt(table)
            pool.release(table)
        else:
            token_ids = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            if -(-len(token_ids) // SIZE) <= pool.num_available:
                tables.append(hold(pool, token_ids, rng.choice([b"", b"a"])).block_ids)
        pool.audit(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_used == 0
    pool.audit([])
