"""What an answer took of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    def across(
        cls, told: Sequence[wire.Finish | wire.Failed], num_before: int, before: Spent, waited_s: float
    ) -> Spent:
        """With several workers, one after the other: the first ``num_before`` that were told are of those before
        the last one."""
        each = [cls.told(one, waited_s) for one in told]
        last = cls.of(each[num_before:])
        return cls.of(each)._replace(
            queue_s=max(waited_s, last.queue_s),
            prefill_s=before.prefill_s + last.prefill_s,
            decode_s=before.decode_s + last.decode_s,
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
