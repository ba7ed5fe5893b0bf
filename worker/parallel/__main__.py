"""``python -m worker.parallel DUTY``: a rank that is not 0. Only a worker starts it.

Exit status: 0 when rank 0 is gone, however it went; 2 when it cannot start, which rank 0 is told the reason of; 3, with
a traceback, when a step broke off here; 4 when it did for want of another rank, which rank 0 is told.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from worker.lines import log_to_stderr
from worker.parallel.control import Begin, Control, Failed, Loaded, Meet, Parted, Room
from worker.parallel.duty import PARTED, Duty
from worker.process import NICENESS, end_with_parent, freeze_objects, importing, leave_with, prepare

CANNOT_START, BROKEN = 2, 3
GRACE_S = 3.0
"""When rank 0 is gone: a step without the others never ends, and to leave them in order may take NCCL a while, for
which rank 0 waits as well."""

log = logging.getLogger("penstock.worker")


def main() -> int:
    """Load, connect, compute."""
    duty = msgspec.json.decode(sys.argv[1], type=Duty)
    connection = socket.socket(fileno=duty.control)
    # A signal to the whole group is meant for rank 0: it decides when the others end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with_parent()
    leave_with(connection.fileno(), GRACE_S)
    log_to_stderr(duty.settings.log, f"{duty.settings.name}, rank {duty.rank}")
    prepare()
    control = Control(connection)
    try:
        return _compute(duty, control)
    except OSError:
        return 0  # said to nobody: rank 0 is gone


def _compute(duty: Duty, control: Control) -> int:
    with importing():
        from worker.devices import own_turn
        from worker.loading import load_model
        from worker.models import ModelError
        from worker.parallel.adapters import Shelf, read_beside
        from worker.parallel.link import LinkBroken, ProcessLink, store
        from worker.parallel.rank import Rank, layout_of, serve
        from worker.room import room, rooms_apart

    engine = duty.settings.engine
    layout = layout_of(engine)
    try:
        model = load_model(duty.settings.source, engine, layout, duty.rank, own_turn(duty.settings, duty.rank))
        control.tell(Loaded())
        meet = control.hear()
        if not isinstance(meet, Meet):
            return 0
        link = ProcessLink.between(layout, duty.rank, model.device, store(meet.port))
        link.rehearse(engine.max_step_tokens, model.architecture.hidden_size, model.dtype)
        control.tell(Room(room(model, engine), rooms_apart(model, engine)))
        begin = control.hear()
        if not isinstance(begin, Begin):
            return 0
        rank = Rank(model, engine, begin.num_blocks, begin.num_windowed_blocks, link)
    except LinkBroken as error:
        control.tell(Parted(str(error)))
        return PARTED
    except ModelError as error:
        control.tell(Failed(str(error)))
        return CANNOT_START
    except Exception as error:
        control.tell(Failed(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"))
        return CANNOT_START
    if rank.runner.device == "cpu":
        os.nice(NICENESS)
    shelf = Shelf(rank.runner)
    reading = Control(socket.socket(fileno=duty.reading))
    threading.Thread(target=read_beside, args=(reading, shelf.read), name="adapters", daemon=True).start()
    freeze_objects()
    try:
        serve(control, rank, shelf)
    except LinkBroken as error:
        control.tell(Parted(str(error)))
        return PARTED
    except Exception:
        log.exception("a step failed")
        return BROKEN
    link.close()
    return 0


if __name__ == "__main__":
    # Nothing is left to be done, and threads that wait for the others must not be waited for.
    status = main()
    logging.shutdown()
    os._exit(status)
