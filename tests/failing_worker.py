"""The real worker on a device that fails whenever it meets CURSED_PROMPT: everybody in that step fails with it. And
where it meets DEADLY_PROMPT, its process ends there and then.

python -m tests.failing_worker '{"name": "w", ...}'
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from worker.__main__ import main
from worker.process import prepare

if TYPE_CHECKING:
    from torch import Tensor

    from worker.inputs import Span

CURSED = 7
"""A token that no text has."""
CURSED_PROMPT = [CURSED, 8, CURSED]
"""Of different tokens: a worker tries its own speed at its start with prompts of one token, in chunks of any length."""
DEADLY_PROMPT = [9, 8, 9]


def curse() -> None:
    """Before anything is computed."""
    prepare()
    from worker.runner import Runner

    forward = Runner.forward

    def forward_or_fail(runner: Runner, spans: Sequence[Span], sampled_before: Tensor | None = None) -> Tensor:
        if any(list(span.token_ids) == DEADLY_PROMPT for span in spans):
            os.kill(os.getpid(), signal.SIGKILL)
        logits = forward(runner, spans, sampled_before)
        if any(list(span.token_ids) == CURSED_PROMPT for span in spans):
            raise RuntimeError("the device has none left")
        return logits

    Runner.forward = forward_or_fail  # type: ignore[method-assign]


if __name__ == "__main__":
    curse()
    sys.exit(main())
