"""Work on its way to another thread: tenants take turns, and the system may have no thread left, which is no fault of
whoever hands it over."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, TypeVar

Made = TypeVar("Made")


def handed(submit: Callable[[Callable[[], Made]], Future[Made]], work: Callable[[], Made]) -> Future[Made]:
    """``submit``: an executor's. What it raises where no thread can be started is what the future holds."""
    try:
        return submit(work)
    except RuntimeError as error:
        lost = Future[Made]()
        lost.set_exception(error)
        return lost


class Asked:
    """Work that waits for a thread: of many tenants each has its part, so that nobody's is behind all of somebody
    else's. Not safe for two threads."""

    def __init__(self) -> None:
        self._calls: OrderedDict[bytes, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        """By tenant, who is next first."""

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[[], Made], tenant: bytes) -> Future[Made]:
        future = Future[Made]()
        self._calls.setdefault(tenant, deque()).append((future, call))
        return future

    def next(self) -> tuple[Future[Any], Callable[[], Any]]:
        """Whose turn it is; there must be some."""
        tenant, own = self._calls.popitem(last=False)
        found = own.popleft()
        if own:
            self._calls[tenant] = own
        return found


def carry_out(future: Future[Made], call: Callable[[], Made]) -> bool:
    """On a thread; whatever is raised is for whoever asks. Whether anybody does."""
    if not future.set_running_or_notify_cancel():
        return False
    try:
        future.set_result(call())
    except BaseException as error:  # a panic of native code's too
        future.set_exception(error)
    return True


class InTurn:
    """The threads of an executor, on which tenants take turns."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()
        self._asked = Asked()

    def submit(self, call: Callable[[], Made], tenant: bytes) -> Future[Made]:
        """Raises RuntimeError where no thread can be had; it may be carried out all the same."""
        with self._lock:
            future = self._asked.add(call, tenant)
        self._executor.submit(self._go_on)
        return future

    def _go_on(self) -> None:
        with self._lock:
            work = self._asked.next() if self._asked else None
        if work is not None:
            carry_out(*work)
