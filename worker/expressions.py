"""Regular expressions out of a model's or an adapter's files: matched within a bound of time.

Python's own know none and hold every other thread meanwhile, so one that tries all ways to divide a name stops a worker
for hours. The regex package takes the same expressions, and stops.
"""

from __future__ import annotations

import math
import re
import time

import regex

LIMIT_S = 2.0
"""Of the processor's time, for all that the expressions of one file are matched with; milliseconds are usual."""
MAX_SIZE = 100_000
"""Characters of one, times its counts: regex writes out what is repeated, and no name is as long."""
_COUNT = re.compile(r"\{(\d+)")


class SlowExpression(Exception):
    """The expressions of a file have used up their time; the message is the one that was being matched."""

    def __init__(self, text: str) -> None:
        super().__init__(repr(text[:200]))


class Expressions:
    """Those of one file, by their texts."""

    def __init__(self) -> None:
        self._left_s = LIMIT_S
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def add(self, text: str) -> None:
        """Raises ValueError: it is no regular expression."""
        try:
            re.compile(text)  # which does not know all that regex takes
            if len(text) * math.prod(max(1, int(count)) for count in _COUNT.findall(text)) > MAX_SIZE:
                raise ValueError
            self._compiled[text] = regex.compile(text)
        except (re.error, regex.error, OverflowError, RecursionError):  # the third: of a count too large
            raise ValueError from None

    def match(self, text: str, name: str) -> bool:
        """Of one that was added, from the beginning of the name. Raises SlowExpression."""
        began = time.process_time()
        try:
            return self._compiled[text].match(name, timeout=max(0.0, self._left_s)) is not None
        except TimeoutError:
            raise SlowExpression(text) from None
        finally:
            self._left_s -= time.process_time() - began
