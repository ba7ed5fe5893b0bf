"""Where an answer is in an expression: a set of states of its automaton (policies.expressions)."""

from __future__ import annotations

from policies.expressions import Expression
from policies.grammar import unanchored


class Matched:
    """An expression, of which ASCII is read."""

    def __init__(self, source: str) -> None:
        """Raises NotRead."""
        self._expression = Expression(f"^(?:{unanchored(source)})$")
        self._kinds = self._expression.kinds() + b"\xff" * 128

    def begin(self) -> frozenset[int]:
        return self._expression.begin()

    def after(self, state: frozenset[int], byte: int) -> frozenset[int] | None:
        return (self._expression.after(state, chr(byte)) if byte < 0x80 else None) or None

    def weight(self, state: frozenset[int]) -> int:
        return 8 + len(state)

    def tells(self, state: frozenset[int]) -> bool:
        return True

    def kinds(self, state: frozenset[int]) -> bytes:
        return self._kinds

    def plain(self, state: frozenset[int]) -> int:
        return self._expression.plain(state)

    def room(self, state: frozenset[int]) -> None:
        return None

    def limit(self, state: frozenset[int]) -> None:
        return None

    def alike(self, state: frozenset[int], num_ended: int) -> frozenset[int]:
        return state
