"""Answers in memory: within their bytes and their time, and the least recently used goes first."""

from __future__ import annotations

import random
import tracemalloc

from gateway.cache.memory import ENTRY_BYTES, Held, Memory


async def test_an_answer_is_there_until_its_time_is_up(clock):
    memory = Memory(10_000, clock)
    memory.put(b"scope", b"name", b"value", ttl_s=60.0)
    clock.advance(59.9)
    assert await memory.get(b"scope", b"name") == b"value"
    assert await memory.get(b"other", b"name") is None
    clock.advance(0.1)
    assert await memory.get(b"scope", b"name") is None
    assert await memory.held() == Held(0, 0)


async def test_the_least_recently_used_goes_first(clock):
    memory = Memory(3 * (ENTRY_BYTES + 1), clock)
    for name in (b"a", b"b", b"c"):
        memory.put(b"", name, b"1", 60.0)
    assert await memory.get(b"", b"a")
    memory.put(b"", b"d", b"1", 60.0)
    assert [bool(await memory.get(b"", name)) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


async def test_what_is_larger_than_all_of_it_is_not_kept_and_displaces_nothing(clock):
    memory = Memory(1000, clock)
    memory.put(b"", b"a", b"1", 60.0)
    memory.put(b"", b"b", bytes(1000), 60.0)
    assert await memory.held() == Held(1, ENTRY_BYTES + 1)
    nothing = Memory(0, clock)
    nothing.put(b"", b"a", b"", 60.0)
    assert await nothing.held() == Held(0, 0)


async def test_a_flush_forgets_one_scope_and_no_other(clock):
    memory = Memory(10_000, clock)
    for scope, name in ((b"a", b"1"), (b"a", b"2"), (b"b", b"1")):
        memory.put(scope, name, b"value", 60.0)
    assert await memory.flush(b"a") == 2
    assert await memory.flush(b"nobody") == 0
    assert await memory.held(b"a") == Held(0, 0)
    assert await memory.held() == await memory.held(b"b") == Held(1, ENTRY_BYTES + 5)


async def test_a_flood_drives_out_itself_and_not_what_others_keep(clock):
    memory = Memory(100 * ENTRY_BYTES, clock)
    for number in range(20):
        memory.put(b"quiet", b"%d" % number, b"", 3600.0)
    for number in range(1000):
        memory.put(b"flood", b"%d" % number, b"", 3600.0)
    assert (await memory.held(b"quiet")).num_entries == 20
    assert (await memory.held(b"flood")).num_entries == 80
    for number in range(20):
        assert await memory.get(b"quiet", b"%d" % number) is not None
    for number in range(100):
        memory.put(b"third", b"%d" % number, b"", 3600.0)
    counts = [(await memory.held(scope)).num_entries for scope in (b"quiet", b"flood", b"third")]
    assert counts == [20, 47, 33], "an equal share is there for whoever comes"


async def test_a_long_walk_never_holds_more_than_its_bytes_nor_forgets_without_need(clock):
    for seed in range(20):
        draw, max_bytes = random.Random(seed), 20 * ENTRY_BYTES
        memory = Memory(max_bytes, clock)
        obvious: dict[tuple[bytes, bytes], tuple[bytes, float]] = {}  # the least recently used first

        def size(entries=obvious):
            return sum(len(value) + ENTRY_BYTES for value, _ in entries.values())

        for _ in range(500):
            key = (draw.choice([b"x", b"y", b"z"]), bytes([draw.randrange(20)]))
            match draw.randrange(20):
                case 0:
                    clock.advance(draw.uniform(0, 20))
                case 1:
                    mine = [each for each in obvious if each[0] == key[0]]
                    assert await memory.flush(key[0]) == len(mine), seed
                    for each in mine:
                        del obvious[each]
                case number if number < 10:
                    value, ttl_s = draw.randbytes(draw.choice([0, 10, 1000, 20_000])), draw.uniform(0, 60)
                    memory.put(*key, value, ttl_s)
                    obvious.pop(key, None)
                    if len(value) + ENTRY_BYTES <= max_bytes:
                        while size() + len(value) + ENTRY_BYTES > max_bytes:
                            mine = [each for each in obvious if each[0] == key[0]]
                            share = max_bytes / len({scope for scope, _ in obvious})
                            above = len(value) + ENTRY_BYTES + size({each: obvious[each] for each in mine}) > share
                            del obvious[mine[0] if mine and above else next(iter(obvious))]
                        obvious[key] = (value, clock.now() + ttl_s)
                case _:
                    expected, ends_at = obvious.pop(key, (None, 0.0))
                    if expected is not None and ends_at > clock.now():
                        obvious[key] = (expected, ends_at)
                    else:
                        expected = None
                    assert await memory.get(*key) == expected, seed
            assert await memory.held() == Held(len(obvious), size()), seed
            assert size() <= max_bytes, seed
            mine = [value for (scope, _), (value, _) in obvious.items() if scope == key[0]]
            assert (await memory.held(key[0])).num_entries == len(mine), seed


def test_an_entry_takes_no_more_than_it_is_said_to(clock):
    num_entries = 20_000
    memory = Memory(1 << 30, clock)
    draw = random.Random(1)
    scopes = [draw.randbytes(16) for _ in range(100)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(num_entries):
            memory.put(scopes[i % 100], draw.randbytes(32), draw.randbytes(100), 60.0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= num_entries * (ENTRY_BYTES + 100)
