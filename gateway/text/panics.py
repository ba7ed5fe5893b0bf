"""Where the tokenizers' library cannot go on with a text it panics (a regular expression that tries too much, say), and
what Python gets is no Exception: nobody would answer for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Panicked(Exception):
    """In one line."""


@contextmanager
def as_errors() -> Iterator[None]:
    """What the library raises there is an Exception, as all else that it raises. Raises Panicked."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # its module can be imported by nobody
            raise Panicked(str(error).partition("\n")[0]) from None
        raise
