"""Work on its way to another thread, of which the system may have none left: no fault of whoever hands it over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Made = TypeVar("Made")


def handed(submit: Callable[[Callable[[], Made]], Future[Made]], work: Callable[[], Made]) -> Future[Made]:
    """``submit``: an executor's. What it raises where no thread can be started is what the future holds."""
    try:
        return submit(work)
    except RuntimeError as error:
        lost = Future[Made]()
        lost.set_exception(error)
        return lost
