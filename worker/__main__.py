"""``python -m worker SETTINGS``: one model served on one socket, with policies.settings.WorkerSettings as JSON.

Exit status: 0 after a drain (SIGTERM, or asked for on the wire), an interrupt, or the end of standard input; 2 when it
cannot start, with one sentence on stderr; 3 when an invariant broke, with a traceback.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from policies import wire
from policies.costs import StepCosts
from policies.settings import WorkerSettings
from worker.channel import listen
from worker.process import prepare

CANNOT_START, BROKEN = 2, 3
NICENESS = 5
"""On a CPU the engine takes what it is given; the gateway, on the same cores, wakes for a moment only but at once."""

log = logging.getLogger("penstock.worker")


class CannotStart(Exception):
    """One sentence for the operator."""


def main() -> int:
    """Reads the settings, binds, loads, serves."""
    try:
        settings = _settings(sys.argv[1:])
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO,
            format=f"penstock worker {settings.name.replace('%', '%%')}: %(message)s",
        )
        # The terminal's interrupt reaches the whole process group; with a parent, it is the parent who decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN if settings.exit_with_stdin else _leave)
        signal.signal(signal.SIGTERM, _leave)
        listener = _listen(settings.listen)
        path = Path(settings.listen.removeprefix("unix:")) if settings.listen.startswith("unix:") else None
        bound = path.stat() if path else None
        try:
            return _serve(settings, listener)
        finally:
            listener.close()
            with suppress(OSError):
                if path and bound and os.path.samestat(path.stat(), bound):  # else a successor listens there already
                    path.unlink()
    except CannotStart as error:
        print(f"penstock worker: {error}", file=sys.stderr)
        return CANNOT_START


def _leave(signum: int, frame: object) -> NoReturn:
    """Before anything is served, every request to end is one to end at once."""
    raise SystemExit(0)


def _settings(arguments: list[str]) -> WorkerSettings:
    if len(arguments) != 1:
        raise CannotStart("one argument is expected, the settings as JSON")
    try:
        return msgspec.json.decode(arguments[0], type=WorkerSettings)
    except msgspec.DecodeError as error:
        raise CannotStart(f"the settings cannot be read: {error}") from None


def _listen(address: str) -> socket.socket:
    try:
        return listen(address)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CannotStart(f"cannot listen on {address}: {reason}") from None


def _serve(settings: WorkerSettings, listener: socket.socket) -> int:
    prepare()
    from worker.engine import Engine
    from worker.loop import Loop
    from worker.models import ModelError
    from worker.probe import ProbeFailed, probe
    from worker.runner import Runner
    from worker.sampler import Sampler

    started_at = time.monotonic()
    try:
        runner = Runner.load(settings.source, settings.engine, settings.replica)
    except ModelError as error:
        raise CannotStart(str(error)) from None
    if runner.device == "cpu":
        os.nice(NICENESS)
    sampler = Sampler(runner.vocab_size, runner.eos_token_ids)

    def engine_with(costs: StepCosts) -> Engine:
        return Engine(runner, sampler, settings.engine, time.monotonic, costs)

    try:
        engine = engine_with(probe(engine_with, runner.max_model_tokens))
    except ProbeFailed as error:
        raise CannotStart(f"the model is loaded, but it cannot compute: {error}") from None
    ready = wire.Ready(
        model=settings.model,
        max_model_tokens=runner.max_model_tokens,
        vocab_size=runner.vocab_size,
        eos_token_ids=list(runner.eos_token_ids),
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        max_sequences=engine.max_sequences,
        device=runner.device,
        dtype=runner.dtype if settings.engine.quantize == "none" else f"{runner.dtype}/{settings.engine.quantize}",
        pid=os.getpid(),
    )
    gc.collect()
    gc.freeze()  # the model's objects live as long as the process: collections need not walk them
    log.info("serving %s on %s, loaded in %.2f s", settings.source, settings.listen, time.monotonic() - started_at)

    loop = Loop(engine, listener, wire.Hello(wire.VERSION, settings.name), ready, time.monotonic)
    wakeup, wakes = socket.socketpair()
    wakeup.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    loop.wake_on(wakeup)
    signal.signal(signal.SIGTERM, lambda signum, frame: loop.drain())
    if settings.exit_with_stdin:
        loop.stop_at_end_of(0)
    else:
        signal.signal(signal.SIGINT, lambda signum, frame: loop.stop())
    try:
        loop.run()
    except Exception:
        # Better no token than a neighbour's: what is broken is not known, so nothing of it is used again.
        log.exception("an invariant is broken")
        return BROKEN
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
