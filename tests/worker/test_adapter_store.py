"""The adapters in memory: within their bound, never one in use that goes, and whoever waits is served."""

import random
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pytest

from worker.adapters import Adapter, AdapterError
from worker.adapters.store import Loaded, Refused, Store

SIZES = {"a": 10, "b": 20, "c": 30, "d": 60, "e": 90}
MAX_BYTES = 100


class ByHand(Executor):
    """Does what it is given when it is told to."""

    def __init__(self):
        self.waiting = []

    def submit(self, function, *arguments):
        future = Future()
        self.waiting.append((future, function, arguments))
        return future

    def go(self):
        future, function, arguments = self.waiting.pop(0)
        try:
            result = function(*arguments)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)


class Bench:
    def __init__(self, max_bytes=MAX_BYTES):
        self.executor = ByHand()
        self.broken = set()
        self.num_reads = 0
        self.num_wakes = 0
        self.store = Store(self.load, max_bytes, self.executor, self.wake)

    def wake(self):
        self.num_wakes += 1

    def load(self, adapter_id, source, max_bytes, digest):
        self.num_reads += 1
        if adapter_id in self.broken:
            raise AdapterError(f"{adapter_id} is broken")
        assert digest in ("", f"digest of {adapter_id}")
        return Adapter(adapter_id, f"digest of {adapter_id}", 4, {}, SIZES[adapter_id])

    def read(self):
        """Until nothing is to be read."""
        told = []
        while self.executor.waiting:
            self.executor.go()
            told.append(self.store.turn())
            self.store.go_on()
            self.store.audit()
        return [each for each in told if each is not None]

    def want(self, *adapter_ids):
        for adapter_id in adapter_ids:
            self.store.want(adapter_id, f"files of {adapter_id}")
        return self.read()


def test_what_is_wanted_is_read_and_told_once_and_again_to_whoever_asks():
    bench = Bench()
    assert bench.want("a") == [Loaded("a", "digest of a", 4, 10)]
    assert bench.store.want("a", "files of a") == Loaded("a", "digest of a", 4, 10)
    assert (bench.num_reads, bench.num_wakes) == (1, 1)


def test_the_one_used_least_recently_makes_room():
    bench = Bench()
    bench.want("a", "b", "c")
    for adapter_id in ("b", "c", "a"):
        assert bench.store.take(adapter_id).adapter_id == adapter_id
        bench.store.give_back(adapter_id)
    bench.want("d")
    assert [bench.store.is_in_memory(adapter_id) for adapter_id in "abcd"] == [True, False, True, True]


def test_one_in_use_stays_and_one_that_finds_no_room_is_good_all_the_same():
    bench = Bench()
    bench.want("d")
    bench.store.take("d")
    assert bench.want("e") == [Loaded("e", "digest of e", 4, 90)]
    assert bench.store.is_in_memory("d")
    assert not bench.store.is_in_memory("e")
    bench.store.wait_for("e")
    assert bench.read() == []
    assert bench.store.lacks_room
    bench.store.give_back("d")
    bench.read()
    assert bench.store.is_in_memory("e")
    assert not bench.store.is_in_memory("d")


def test_one_that_is_forgotten_goes_when_its_last_user_has_gone():
    bench = Bench()
    bench.want("a")
    bench.store.take("a")
    bench.store.forget("a")
    assert bench.store.is_in_memory("a")
    bench.store.give_back("a")
    assert not bench.store.knows("a")
    assert bench.store.num_bytes == 0


def test_one_that_no_thread_can_be_had_for_is_refused_and_may_be_asked_for_again():
    bench = Bench()
    with ThreadPoolExecutor(1) as executor:
        store = Store(bench.load, MAX_BYTES, executor, bench.wake)
        before = threading.stack_size(1 << 46)  # more than there are addresses
        try:
            store.want("a", "files of a")
            store.go_on()
        finally:
            threading.stack_size(before)
        told = store.turn()
        assert isinstance(told, Refused)
        assert told.reason.startswith("RuntimeError")
        store.audit()
        assert not store.knows("a")
        store.want("a", "files of a")
        store.go_on()
    assert store.turn() == Loaded("a", "digest of a", 4, 10)
    store.audit()


def test_one_that_cannot_be_read_is_refused_by_name_and_forgotten():
    bench = Bench()
    bench.broken = {"b"}
    assert bench.want("a", "b") == [Loaded("a", "digest of a", 4, 10), Refused("b", "b is broken")]
    assert not bench.store.knows("b")
    assert bench.store.is_in_memory("a")


def test_files_are_read_again_only_if_they_are_the_same():
    bench = Bench()
    bench.want("e", "d")
    bench.store.wait_for("e")
    bench.broken = {"e"}
    assert bench.read() == [Refused("e", "e is broken")]


@pytest.mark.parametrize("seed", range(40))
def test_a_long_walk_keeps_the_bound_and_serves_whoever_waits(seed):
    chance, bench = random.Random(seed), Bench()
    store, users, waiting = bench.store, [], []
    for _ in range(400):
        adapter_id = chance.choice(list(SIZES))
        match chance.randrange(7):
            case 0 | 1:
                store.want(adapter_id, f"files of {adapter_id}")
            case 2 if chance.random() < 0.2:
                store.forget(adapter_id)
            case 3 if store.knows(adapter_id):
                if store.is_in_memory(adapter_id) and not store.lacks_room:
                    store.take(adapter_id)
                    users.append(adapter_id)
                else:
                    store.wait_for(adapter_id)
                    waiting.append(adapter_id)
            case 4 if users:
                store.give_back(users.pop(chance.randrange(len(users))))
            case 5 if waiting:
                store.stop_waiting(waiting.pop(chance.randrange(len(waiting))))
            case 6 if bench.executor.waiting:
                bench.executor.go()
        turn(store, users, waiting)
        store.audit()
        assert all(store.is_in_memory(user) for user in users), f"seed {seed}"
    for _ in range(1000):
        if not (users or waiting or bench.executor.waiting):
            break
        if users:
            store.give_back(users.pop())
        if bench.executor.waiting:
            bench.executor.go()
        turn(store, users, waiting)
        store.audit()
    assert not waiting, f"seed {seed}: nobody serves {waiting}"
    for adapter_id in SIZES:
        store.forget(adapter_id)
    assert store.num_bytes == len(store) == 0


def turn(store, users, waiting):
    """As the worker does it."""
    told = store.turn()
    assert not isinstance(told, Refused)
    for adapter_id in list(waiting):
        if store.is_in_memory(adapter_id):
            store.take(adapter_id)
            store.stop_waiting(adapter_id)
            waiting.remove(adapter_id)
            users.append(adapter_id)
        elif store.lacks_room:
            break
    store.go_on()
