"""``python -m worker SETTINGS``: one model served on one socket, with policies.settings.WorkerSettings as JSON. Where
they are "-" they are one line on standard input, which may come later, and what takes long to be imported is
imported meanwhile.

Exit status: 0 after a drain (SIGTERM, SIGHUP, or asked for on the wire), an interrupt, or the end of standard input; 2
when it cannot start, with one sentence on stderr; 3 when an invariant broke, with a traceback, or another rank is gone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from policies import wire
from policies.costs import StepCosts
from policies.settings import WorkerSettings
from worker.channel import listen
from worker.lines import log_to_stderr, tell_operator
from worker.process import NICENESS, freeze_objects, importing, leave_with, prepare

if TYPE_CHECKING:
    from types import FrameType

    from worker.engine import Engine
    from worker.parallel.runner import ParallelRunner
    from worker.runner import Runner

CANNOT_START, BROKEN = 2, 3
TOLD_WITHIN_S = 60.0
"""Of what was imported for nobody yet, the memory is not kept longer."""
GRACE_S = 5.0
"""When the parent is gone: for the step that is computed, and the other ranks' leave."""
NUM_COMPILING = 2
"""Threads that compile grammars."""

log = logging.getLogger("penstock.worker")


class CannotStart(Exception):
    """One sentence for the operator."""


def main() -> int:
    """Reads the settings, binds, loads, serves."""
    try:
        arguments = sys.argv[1:]
        if arguments == ["-"] and not (arguments := _told_later()):
            return 0  # nobody needs it
        settings = _settings(arguments)
        log_to_stderr(settings.log, settings.name)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it is the gateway's, and may be sent to all of a service
        # The terminal's interrupt reaches the whole process group; with a parent, it is the parent who decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN if settings.exit_with_stdin else _leave)
        _on_request(_leave)
        if settings.exit_with_stdin:
            leave_with(0, GRACE_S)
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
        tell_operator(str(error))
        return CANNOT_START


def _on_request(end: Callable[[int, FrameType | None], object]) -> None:
    """From now on what SIGTERM does, and the end of the terminal (SIGHUP), unless that is nothing to us (nohup)."""
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)


def _leave(signum: int, frame: object) -> NoReturn:
    """Before anything is served, every request to end is one to end at once."""
    raise SystemExit(0)


def _told_later() -> list[str]:
    """The settings, or nothing where standard input ends, or is silent for too long."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for whoever tells them to decide
    signal.signal(signal.SIGTERM, _leave)
    prepare()
    with importing():
        import worker.loop
        import worker.runner  # noqa: F401

    line = b""
    # Nothing is held back in a buffer: its end is watched for later.
    while not line.endswith(b"\n"):
        there, _, _ = select.select([0], [], [], TOLD_WITHIN_S)
        read = os.read(0, 1 << 16) if there else b""
        if not read:
            return []
        line += read
    return [line.decode()]


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


class _Others:
    """What becomes of this process when another rank of its model ends."""

    def __init__(self) -> None:
        self.is_serving = False

    def lost(self, fault: Exception) -> NoReturn:
        """On another thread: the main one may be waiting for that rank, without end."""
        from worker.models import ModelError

        if self.is_serving:
            log.error("%s", fault)
        else:
            tell_operator(str(fault))
        logging.shutdown()
        os._exit(CANNOT_START if isinstance(fault, ModelError) else BROKEN)


def _serve(settings: WorkerSettings, listener: socket.socket) -> int:
    prepare()
    with importing():
        from worker.device import is_out_of_memory
        from worker.devices import own_turn, placed
        from worker.models import ModelError
        from worker.parallel.ranks import RankEnded
        from worker.parallel.runner import ParallelRunner
        from worker.runner import Runner

    started_at = time.monotonic()
    others = _Others()
    try:
        settings = placed(settings)
        engine = settings.engine
        if engine.tensor_parallel * engine.pipeline_parallel == 1:
            alone = Runner.load(settings.source, engine, own_turn(settings), may_part=True)
            return _run(settings, listener, alone, others, started_at)
        with closing(ParallelRunner.load(settings, others.lost)) as runner:
            return _run(settings, listener, runner, others, started_at)
    except ModelError as error:
        raise CannotStart(str(error)) from None
    except RankEnded as error:  # the next try may go well
        tell_operator(str(error))
        return BROKEN
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise CannotStart(f"there is no memory to start {settings.source} with: {reason}") from None


def _run(
    settings: WorkerSettings,
    listener: socket.socket,
    runner: Runner | ParallelRunner,
    others: _Others,
    started_at: float,
) -> int:
    import torch

    from worker.adapters.store import Store
    from worker.grammar.store import Grammars
    from worker.grammar.vocabulary import read_vocabulary
    from worker.loop import Loop
    from worker.models import path_of

    if runner.device == "cpu":
        os.nice(NICENESS)
    engine = _engine(settings, runner)
    ready = _ready(settings, runner, engine)
    runner.have_pages_ready()
    freeze_objects()
    others.is_serving = True
    facts = settings.source, settings.listen, time.monotonic() - started_at, torch.get_num_threads()
    log.info("serving %s on %s, loaded in %.2f s, CPU threads: %d", *facts)

    wakeup, wakes = socket.socketpair()
    wakeup.setblocking(False)
    wakes.setblocking(False)
    adapters = None
    if ready.max_adapter_bytes:
        reader = ThreadPoolExecutor(1, "adapters")
        adapters = Store(runner.load_adapter, ready.max_adapter_bytes, reader, lambda: _wake(wakes))
    hello = wire.Hello(wire.VERSION, settings.name)
    path, num_logits, eos_token_ids = path_of(settings.source), runner.vocab_size, frozenset(runner.eos_token_ids)
    grammars = Grammars(
        lambda: read_vocabulary(path, num_logits, eos_token_ids),
        num_logits,
        eos_token_ids,
        ThreadPoolExecutor(NUM_COMPILING, "grammars"),
        lambda: _wake(wakes),
        settings.engine.grammars,
    )
    loop = Loop(engine, listener, hello, ready, time.monotonic, adapters, grammars)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    loop.wake_on(wakeup)
    _on_request(lambda signum, frame: loop.drain())
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


def _engine(settings: WorkerSettings, runner: Runner | ParallelRunner) -> Engine:
    """With whoever guesses for it, and what its steps cost. Raises CannotStart where nothing comes of its steps."""
    from worker.engine import Engine
    from worker.grammar.vocabulary import spelt
    from worker.models import not_finite, path_of
    from worker.probe import ProbeFailed, probe
    from worker.sampler import Sampler
    from worker.speculation import Speculation
    from worker.speculation.load import draft_model
    from worker.speculation.twins import Twins

    sampler = Sampler(runner.vocab_size, runner.eos_token_ids, by_row=settings.engine.deterministic)

    drafter = twins = None
    if runner.writes and settings.engine.speculation.enabled:
        drafter = draft_model(settings.source, settings.engine, runner, time.monotonic)
        twins = Twins(spelt(path_of(settings.source)))
    speculation = Speculation.of(settings.engine, drafter, twins)

    def engine_with(costs: StepCosts) -> Engine:
        return Engine(runner, sampler, settings.engine, time.monotonic, costs, speculation)

    try:
        return engine_with(probe(engine_with, runner.max_model_tokens, runner.writes))
    except ProbeFailed as error:
        reason = not_finite(path_of(settings.source)) or error
        raise CannotStart(f"the model is loaded, but it cannot compute: {reason}") from None


def _ready(settings: WorkerSettings, runner: Runner | ParallelRunner, engine: Engine) -> wire.Ready:
    """What gateways are told of it."""
    return wire.Ready(
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
        tensor_parallel=settings.engine.tensor_parallel,
        pipeline_parallel=settings.engine.pipeline_parallel,
        deterministic=settings.engine.deterministic,
        kv_dtype=settings.engine.kv_dtype,
        max_adapter_bytes=settings.engine.max_adapter_bytes if runner.takes_adapters else 0,
        writes=runner.writes,
        pooling=runner.pooling,
        num_dimensions=runner.num_dimensions,
        scores=runner.scores,
    )


def _wake(wakes: socket.socket) -> None:
    with suppress(BlockingIOError):  # full: it is being woken
        wakes.send(b"\0")


if __name__ == "__main__":
    sys.exit(main())
