"""One answer in the making: its tokens, its block table, how far it has caught up; and the request that it belongs
to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from policies import wire
from policies.batching import Place, token_due_at
from policies.prefix import Chain
from policies.terms import MAX_TIMELINE, FinishReason, Sampling
from worker.adapters import Adapter
from worker.forked import Forked, tokens_of
from worker.sampler import Row

if TYPE_CHECKING:
    from worker.grammar.guide import Guide

SEEDS = 1 << 64
UNKNOWN = -1
"""In place of a token that the device has sampled, or is about to, and that has not been read yet."""


class Request:
    """What the sequences of one ``Submit`` have in common."""

    __slots__ = ("adapter", "leader", "live", "num_prompt_logprobs", "request_id", "root", "scored")

    def __init__(
        self,
        request_id: str,
        adapter: Adapter | None = None,
        root: bytes = b"",
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.root = root
        """Its salt (see policies.prefix.root_of): what it leaves behind is for requests of the same only."""
        self.adapter = adapter
        """What changes the model for it."""
        self.live: list[Sequence] = []
        """Sequences that have not ended, by index."""
        self.leader: Sequence | None = None
        """The one that computes the prompt for those still waiting to fork from it."""
        self.num_prompt_logprobs = num_prompt_logprobs
        """As in ``Sampling``; None also where they were told before, elsewhere."""
        self.scored: list[wire.TokenLogprob] | None = None if num_prompt_logprobs is None else []
        """Those of the prompt's tokens from the second on, as far as it is computed; None once they are told."""

    def with_scores(self, gained: list[wire.Delta]) -> list[wire.Delta]:
        """What a sequence has gained, with what is still to be told of the prompt."""
        scored, self.scored = self.scored, None
        if scored is None:
            return gained
        return [msgspec.structs.replace(gained[0], prompt_logprobs=scored), *gained[1:]]


class Sequence:
    """Position p of ``token_ids`` is computed when p < ``num_computed``: its KV is then in slot p of ``block_ids``."""

    __slots__ = (
        "arrival",
        "block_ids",
        "chain",
        "companions",
        "draft_token_ids",
        "engine_s",
        "first_token_at",
        "guide",
        "has_ended",
        "held_at",
        "held_up_at",
        "hits",
        "index",
        "kv_block_s",
        "last_token_at",
        "may_share_tail",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_drafted_tokens",
        "num_emitted",
        "num_gone",
        "num_known",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sealed",
        "num_unread",
        "output_token_ids",
        "place",
        "pooling",
        "predicted_token_ids",
        "priority",
        "request",
        "row",
        "samples_by_output",
        "sampling",
        "started_at",
        "stop_token_ids",
        "submitted_at",
        "tenant",
        "timeline",
        "token_ids",
        "tpot_s",
        "ttft_s",
        "weight",
    )

    def __init__(
        self,
        request: Request,
        submit: wire.Submit,
        index: int,
        arrival: int,
        stop_token_ids: frozenset[int],
        chain: Chain | None,
        now: float,
        guide: Guide | None = None,
    ) -> None:
        emitted_token_ids = submit.emitted_token_ids.get(index, [])
        self.request = request
        self.index = index
        self.priority = submit.priority
        self.arrival = arrival
        self.place: Place = (submit.priority, now + (submit.ttft_s or 0.0), arrival)
        """Its priority may rise while it waits."""
        self.ttft_s = submit.ttft_s
        self.tpot_s = submit.tpot_s
        self.tenant = submit.tenant
        self.weight = submit.weight
        self.sampling = submit.sampling
        self.predicted_token_ids = submit.predicted_token_ids
        self.pooling = submit.pooling
        """It is computed for a vector; else for what follows it."""
        self.stop_token_ids = stop_token_ids
        """Any of these ends it."""
        self.num_prompt_tokens = len(submit.prompt_token_ids)
        self.num_emitted = len(emitted_token_ids)
        """Tokens of its completion that came from elsewhere."""
        self.samples_by_output = _samples_by_output(submit.sampling)
        """What it samples depends on the tokens before, beyond what the model makes of them: they must be known."""
        self.token_ids = tokens_of(submit.prompt_token_ids, emitted_token_ids, submit.num_sequences)
        """Prompt and completion; only the last one may be UNKNOWN."""
        self.num_known = self.num_unread = len(self.token_ids)
        """``num_unread``: of those that it came with, never computed or found so far."""
        self.has_ended = False
        self.output_token_ids = list(emitted_token_ids)
        self.row = Row(
            sampling=submit.sampling,
            seed=(submit.sampling.seed + index) % SEEDS,
            prompt_token_ids=submit.prompt_token_ids,
            output_token_ids=self.output_token_ids,
        )
        self.guide = guide
        """Holds it to its grammar, if it has one; knows the tokens that are known."""
        self.chain = chain
        """None: its blocks get no names."""
        self.hits: list[int] = []
        """While the step is planned: the cached blocks that it would begin with."""
        self.block_ids: list[int] = []
        self.num_computed = 0
        self.num_gone = 0
        """Leading blocks of the table that are not its own any more, since no layer looks so far back."""
        self.num_sealed = 0
        """Leading blocks that have their names."""
        self.companions = range(0)
        """Places in the table of blocks whose companions it uses, see ``worker.windows``."""
        self.may_share_tail = False
        """The block that it writes next may be another's too, and is then copied first."""
        self.num_cached_tokens = 0
        self.draft_token_ids: list[int] = []
        """What may follow its last token, to be verified in this step; not among ``token_ids``."""
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.num_preemptions = 0
        """How often it lost blocks, all or the last ones."""
        self.num_overtaken = 0
        self.engine_s = 0.0
        """Its share of the steps that it was in."""
        self.kv_block_s = 0.0
        """Blocks that it held, times how long, until ``held_at``."""
        self.held_at = now
        self.submitted_at = self.held_up_at = now
        """``held_up_at``: when its next token could last not have been drawn."""
        self.timeline: wire.Timeline | None = wire.Timeline([], []) if submit.traceparent else None
        """What is told of it at its end; None: nobody asks."""
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def num_pending(self) -> int:
        """Tokens known and not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def has_output(self) -> bool:
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def moved_at(self) -> float:
        """When it last got a token, came, or could not go on for reasons of its own."""
        return max(self.submitted_at if self.last_token_at is None else self.last_token_at, self.held_up_at)

    @property
    def token_due_at(self) -> float:
        """When its next token is due, once it has one."""
        num_tokens = len(self.output_token_ids) - self.num_emitted
        return token_due_at(self.tpot_s, self.first_token_at, self.moved_at, num_tokens)

    @property
    def is_complete(self) -> bool:
        """It has as many tokens as it may have, though the last one may not have been read."""
        if self.pooling is not None:
            return self.num_computed == len(self.token_ids)
        return len(self.token_ids) - self.num_prompt_tokens >= self.sampling.max_tokens

    @property
    def num_left(self) -> int:
        """Tokens that it may still have."""
        return self.sampling.max_tokens - (len(self.token_ids) - self.num_prompt_tokens)

    def may_be_drawn(self, num_tokens: int) -> bool:
        """Behind so many more tokens its next one follows, and all before it are known."""
        return self.num_computed + num_tokens == len(self.token_ids) == self.num_known

    @property
    def is_held_up(self) -> bool:
        """Its next token cannot be drawn yet; of one whose guide is followed aside."""
        guide = self.guide
        return self.num_known < len(self.token_ids) or (guide is not None and guide.is_late)

    @property
    def ended_aside(self) -> FinishReason | None:
        """How its last token ended it, of one that was held up until that was known."""
        return self.ending() if self.has_output and not self.is_held_up else None

    def num_draftable(self, token_ids: list[int]) -> int:
        """How many of these may be verified in one step: what its grammar forbids is wrong already, and where it must
        see to its end, tokens are looked at one by one."""
        if self.guide is None:
            return len(token_ids)
        num = self.guide.num_allowed(token_ids)
        return 0 if self.guide.is_careful(self.num_left, num) else num

    def rows(self) -> Iterator[Row]:
        """What is sampled in this step: its next token, and the one after each token of its draft."""
        row, draft = self.row, self.draft_token_ids
        yield row
        for num in range(1, len(draft) + 1):
            yield Row(self.sampling, row.seed, row.prompt_token_ids, row.output_token_ids, row.state, draft[:num])

    @property
    def known_token_ids(self) -> list[int] | Forked:
        return self.token_ids if self.num_known == len(self.token_ids) else self.token_ids[: self.num_known]

    @property
    def held_block_ids(self) -> list[int]:
        """Those of the table that are its own."""
        return self.block_ids[self.num_gone :] if self.num_gone else self.block_ids

    def held(self, now: float) -> None:
        """Until now it has held the blocks of its table; to be said before there are more or fewer of them."""
        self.kv_block_s += len(self.held_block_ids) * (now - self.held_at)
        self.held_at = now

    def computed_chunk(self, num_tokens: int, seconds: float, now: float) -> None:
        """So many tokens of its prompt, in a step that is over."""
        timeline = self.timeline
        if timeline is not None and len(timeline.chunks) < MAX_TIMELINE:
            timeline.chunks.append(wire.Chunk(now - seconds - self.submitted_at, seconds, num_tokens))

    def preempted(self, now: float) -> None:
        """It lost blocks, all or the last ones; where it only waits for its last token to be read, that is nothing to
        it."""
        if self.is_complete:
            return
        self.num_preemptions += 1
        timeline = self.timeline
        if timeline is not None and len(timeline.preempted_s) < MAX_TIMELINE:
            timeline.preempted_s.append(now - self.submitted_at)

    @property
    def spent(self) -> tuple[float, float, int, int]:
        """As the end of ``wire.Failed`` has it."""
        return self.engine_s, self.kv_block_s, self.num_drafted_tokens, self.num_accepted_tokens

    def expect(self) -> int:
        """A token is being sampled. Its position."""
        self.token_ids.append(UNKNOWN)
        self.output_token_ids.append(UNKNOWN)
        return len(self.token_ids) - 1

    def settle(self, position: int, token_id: int, now: float) -> None:
        """The token that was expected there, or one more, since the draft was right so far."""
        if position == len(self.token_ids):
            self.token_ids.append(token_id)
            self.output_token_ids.append(token_id)
        else:
            self.token_ids[position] = token_id
            self.output_token_ids[position - self.num_prompt_tokens] = token_id
        self.num_known = position + 1
        if self.guide is not None and token_id not in self.stop_token_ids:
            self.guide.advance(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def gained(
        self, token_ids: list[int], logprobs: list[wire.TokenLogprob] | None, num_cached_tokens: int | None
    ) -> wire.Delta:
        """What is told of a step after which it goes on."""
        is_cut = self.guide is not None and self.guide.is_cut
        return wire.Delta(
            self.request.request_id, self.index, token_ids, logprobs, None, num_cached_tokens, is_cut=is_cut
        )

    @property
    def has_end_token(self) -> bool:
        """The last token of its completion that is known is one that ends it."""
        return self.num_known > self.num_prompt_tokens and self.token_ids[self.num_known - 1] in self.stop_token_ids

    def ending(self) -> FinishReason | None:
        """How the last token that is known ended it, if it did."""
        guide = self.guide
        if self.has_end_token or (guide is not None and guide.is_whole):
            # By itself; but what it would have said may have had no room.
            return "length" if guide is not None and guide.is_cut else "stop"
        if guide is not None and guide.is_late:
            return None  # whether it is whole is not known yet
        if self.num_known - self.num_prompt_tokens >= self.sampling.max_tokens:
            return "length"
        return None

    def finish(self, reason: FinishReason, now: float) -> wire.Finish:
        """The account of it, at its end."""
        started_at = now if self.started_at is None else self.started_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        last_token_at = first_token_at if self.last_token_at is None else self.last_token_at
        return wire.Finish(
            reason=reason,
            num_cached_tokens=min(self.num_cached_tokens, self.num_prompt_tokens),
            num_preemptions=self.num_preemptions,
            queue_s=started_at - self.submitted_at,
            prefill_s=first_token_at - started_at,
            decode_s=last_token_at - first_token_at,
            engine_s=self.engine_s,
            kv_block_s=self.kv_block_s,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            timeline=self.timeline,
            has_end_token=self.has_end_token,
        )


def _samples_by_output(sampling: Sampling) -> bool:
    counts = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    return bool(counts) or any(len(word) > 1 for word in sampling.bad_words)
