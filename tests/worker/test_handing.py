"""Work for threads: whose turn it is, and what becomes of what nobody can carry out."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from worker.handing import InTurn


def test_tenants_take_turns_on_the_threads_of_an_executor():
    goes_on, begun, order = threading.Event(), threading.Event(), []
    with ThreadPoolExecutor(1) as executor:
        threads = InTurn(executor)
        threads.submit(lambda: (begun.set(), goes_on.wait()), b"a")
        begun.wait()
        futures = [threads.submit(lambda number=number: order.append(number), b"a") for number in range(4)]
        other = threads.submit(lambda: order.append("b"), b"b")
        assert futures[1].cancel()
        goes_on.set()
    assert other.done()
    assert order == [0, "b", 2, 3]


def test_what_is_raised_is_for_whoever_asks_and_the_thread_goes_on():
    class Panic(BaseException):
        pass

    def lost():
        raise Panic

    with ThreadPoolExecutor(1) as executor:
        threads = InTurn(executor)
        futures = [threads.submit(lost, b""), threads.submit(lambda: 7, b"")]
    assert isinstance(futures[0].exception(), Panic)
    assert futures[1].result() == 7


def test_what_no_thread_was_there_for_is_told():
    executor = ThreadPoolExecutor(1)
    threads = InTurn(executor)
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        with pytest.raises(RuntimeError):
            threads.submit(lambda: 7, b"")
    finally:
        threading.stack_size(before)
    assert threads.submit(lambda: 8, b"").result() == 8
    executor.shutdown()
