"""What an answer took of the engine, and what one request's did of the workers that had it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from policies import wire


class Spent(NamedTuple):
    """What an answer took of the engine, as far as the worker has told; seconds."""

    engine_s: float = 0.0
    kv_block_s: float = 0.0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    queue_s: float = 0.0
    """In line and in the worker, as are the next two of the sequence that took longest."""
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def since(self, seconds: float) -> Spent:
        """For whoever came so long after it began: what it waited for was less."""
        queue_s = max(0.0, self.queue_s - seconds)
        seconds = max(0.0, seconds - self.queue_s)
        prefill_s = max(0.0, self.prefill_s - seconds)
        seconds = max(0.0, seconds - self.prefill_s)
        return self._replace(queue_s=queue_s, prefill_s=prefill_s, decode_s=max(0.0, self.decode_s - seconds))

    def longer(self, prefill_s: float, decode_s: float) -> Spent:
        """By so much."""
        return self._replace(prefill_s=self.prefill_s + prefill_s, decode_s=self.decode_s + decode_s)

    def by_nobody(self) -> Spent:
        """The times alone: somebody else pays for what was computed."""
        return Spent(queue_s=self.queue_s, prefill_s=self.prefill_s, decode_s=self.decode_s)

    @classmethod
    def told(cls, told: wire.Finish | wire.Failed, waited_s: float) -> Spent:
        """``waited_s``: in line."""
        queue_s, prefill_s, decode_s = waited_s, 0.0, 0.0
        if isinstance(told, wire.Finish):
            queue_s, prefill_s, decode_s = waited_s + told.queue_s, told.prefill_s, told.decode_s
        return cls(
            told.engine_s,
            told.kv_block_s,
            told.num_drafted_tokens,
            told.num_accepted_tokens,
            queue_s,
            prefill_s,
            decode_s,
        )

    @classmethod
    def of(cls, parts: Iterable[Spent]) -> Spent:
        """What was computed beside each other."""
        parts = list(parts)
        longest = max(parts, key=lambda spent: spent.queue_s + spent.prefill_s + spent.decode_s, default=cls())
        return longest._replace(
            engine_s=sum([spent.engine_s for spent in parts]),
            kv_block_s=sum([spent.kv_block_s for spent in parts]),
            num_drafted_tokens=sum([spent.num_drafted_tokens for spent in parts]),
            num_accepted_tokens=sum([spent.num_accepted_tokens for spent in parts]),
        )


NOWHERE = Spent()


class Meter:
    """What one request took of the workers that had it, one after the other, as they have told. Of one that was lost
    it is what that one has told: nothing of the sequences that had not finished there; the times are by our clock
    there."""

    __slots__ = ("_before", "_num_before", "told", "waited_s")

    def __init__(self) -> None:
        self.told: list[wire.Finish | wire.Failed] = []
        self.waited_s = 0.0
        """In line, each time."""
        self._before = NOWHERE
        """The times with workers that had it before the last one."""
        self._num_before = 0
        """How much of ``told`` is from those."""

    def leave(self, prefill_s: float, decode_s: float) -> None:
        """Its worker has it no more, after so long there by our clock; what is told from now on is another one's."""
        self._before = self._before.longer(prefill_s, decode_s)
        self._num_before = len(self.told)

    @property
    def told_last(self) -> list[wire.Finish | wire.Failed]:
        """What the last worker has told."""
        return self.told[self._num_before :]

    @property
    def spent(self) -> Spent:
        """With all of them."""
        if len(self.told) == 1 and self._before is NOWHERE:
            return Spent.told(self.told[0], self.waited_s)
        each = [Spent.told(one, self.waited_s) for one in self.told]
        last = Spent.of(each[self._num_before :])
        return Spent.of(each)._replace(
            queue_s=max(self.waited_s, last.queue_s),
            prefill_s=self._before.prefill_s + last.prefill_s,
            decode_s=self._before.decode_s + last.decode_s,
        )
