"""The gateway that ``observing`` measures: the real one, but metrics and traces are switched by a signal while it runs.

    python -m benchmarks.observed ARGUMENTS

``ARGUMENTS`` are those of ``penstock``. What stays whatever is switched off, and so is in no difference: connections
note when a request's first bytes came, requests their journey, and the timers of metrics and traces tick.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal

from gateway import app
from gateway.cli import main
from gateway.doors import Doors
from gateway.entrance import Entrance
from gateway.house import Gateway
from gateway.metrics.counts import Counts

SIGNALS = {kind: signal.SIGRTMIN + number for number, kind in enumerate(("bare", "metered", "traced", "beside"))}
"""By what is on from then on; the last two are the same to the gateway."""


class Switched(Entrance):
    """Answers with traces and metrics, or without."""

    def __init__(self, gw: Gateway, doors: Doors, *others: object) -> None:
        super().__init__(gw, doors, *others)  # type: ignore[arg-type]
        self._watched, self._unwatched = gw, dataclasses.replace(gw, tracing=None)
        self._tally = gw.ledger.tally
        self._all = list(self._tally.watchers)
        self._others = [each for each in self._all if not isinstance(getattr(each, "__self__", None), Counts)]
        assert len(self._others) == len(self._all) - 1
        for kind, number in SIGNALS.items():
            asyncio.get_running_loop().add_signal_handler(number, self._switch, kind)

    def _switch(self, kind: str) -> None:
        self._tally.flush()
        self._tally.watchers[:] = self._others if kind == "bare" else self._all
        self._gw = self._watched if kind in ("traced", "beside") else self._unwatched


if __name__ == "__main__":
    app.Entrance = Switched  # type: ignore[assignment,attr-defined]
    main(prog_name="penstock")
