"""Files on their way into the system's cache while what has arrived of them is taken.

A mapped file is fetched a few pages at a time, where it is touched; read from end to end it arrives as fast as the disk
is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20


class ReadAhead:
    """Reads them in this order until all are read, or as much as there is room for, or the block that it is entered for
    is left.
    """

    def __init__(self, paths: Iterable[Path], room_bytes: int) -> None:
        self._paths, self._room_bytes = list(paths), room_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        buffer, room = bytearray(CHUNK_BYTES), self._room_bytes
        for path in self._paths:
            try:
                with path.open("rb", buffering=0) as file:
                    while room > 0 and not self._stop.is_set() and (num_read := file.readinto(buffer)):
                        room -= num_read
            except OSError as error:  # whoever takes the tensors meets it, too, and names them
                log.info("%s is not read ahead: %s", path, error)
