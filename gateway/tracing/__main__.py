"""The process that makes spans and hands them to the collector: ``python -m gateway.tracing 'ORDER' FD``.

It ends when the gateway's end of the socket is closed: what waits is exported in the time that is left for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

import msgspec

from gateway.tracing.collector import Collector
from gateway.tracing.order import Order

NICENESS = 19
"""Also before it stands back altogether."""


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=Order)
    # Of a terminal, to all that belong to it: the gateway goes first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with socket.socket(fileno=int(sys.argv[2])) as connection:
        Collector(order, connection).run()
    sys.stderr.flush()
    os._exit(0)  # an export may hang in a thread for longer than anybody waits


main()
