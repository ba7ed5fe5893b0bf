"""The real worker, but that its drafters guess as if verifying cost nothing, so that each answer is guessed at, and
that somebody loses all blocks every few steps; one drafter raises whenever it is asked for a request in whose prompt
CURSED stands. Without speculation it is the worker as it is.

python -m tests.guessing_worker '{"name": "w", ...}'
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence as Run
from typing import TYPE_CHECKING

from tests.failing_worker import CURSED
from worker.__main__ import main
from worker.process import prepare

if TYPE_CHECKING:
    from policies import wire
    from policies.costs import StepCosts, Work
    from worker.sequence import Sequence
    from worker.speculation import Draft

PREEMPTS_EVERY = 7
"""Steps."""


def eager() -> None:
    """Before anything is computed."""
    prepare()
    from policies.costs import StepCosts
    from worker.engine import Engine
    from worker.speculation import Speculation, SuffixDrafter

    rng = random.Random(1)
    draft, spent, propose, step = Speculation.draft, Speculation.spent, SuffixDrafter.propose, Engine.step

    def draft_freely(
        self: Speculation,
        batch: Run[tuple[Sequence, int]],
        work: Work,
        max_tokens: int,
        costs: StepCosts,
        now: float,
    ) -> list[tuple[int, list[int]]]:
        return draft(self, batch, work, max_tokens, StepCosts(), now)

    def spent_nothing(self: Speculation, work: Work, seconds: float, num_right: int, costs: StepCosts) -> None:
        spent(self, work, seconds, num_right, StepCosts())

    def propose_or_fail(self: SuffixDrafter, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        if any(CURSED in sequence.token_ids[: sequence.num_prompt_tokens] for sequence in sequences):
            raise ValueError("this one cannot be drafted for")
        return propose(self, sequences, num_tokens)

    def step_among_losses(self: Engine) -> tuple[list[wire.Delta], list[wire.Failed]]:
        running = self._scheduler.running
        if self.speculates and running and not rng.randrange(PREEMPTS_EVERY):
            self._scheduler.preempt(rng.choice(running), self._now())
        return step(self)

    Engine.step = step_among_losses  # type: ignore[method-assign]
    Speculation.draft = draft_freely  # type: ignore[method-assign]
    Speculation.spent = spent_nothing  # type: ignore[method-assign]
    SuffixDrafter.propose = propose_or_fail  # type: ignore[method-assign]


if __name__ == "__main__":
    eager()
    sys.exit(main())
