"""The numbers of several gateway processes on one port: whichever is asked tells those of all.

Prometheus reaches any one of them, by the kernel's choice. So each keeps a file with what it would say, written anew
every second, and whoever is asked adds up the files of its family. A process that has died leaves its file: what it
counted was counted, and a sum that fell would be taken for a restart of all. What stood in it at a moment is left out,
and so is what others than it have counted.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from gateway.metrics.counts import Sample
from gateway.metrics.families import Families, gathered
from gateway.metrics.names import METRICS, Metric

log = logging.getLogger(__name__)

WRITE_S = 1.0
STALE_S = 10.0
"""A file that was not written for so long is that of a dead process."""

_decode = msgspec.msgpack.Decoder(list[Sample]).decode


class Files:
    """In one directory, of the processes with one parent."""

    def __init__(self, directory: Path) -> None:
        """What an earlier family has left there goes."""
        self._directory = directory
        self._family = f"{os.getppid()}-"
        self._own = directory / f"{self._family}{os.getpid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        for path in directory.iterdir():
            if not path.name.startswith(self._family):
                path.unlink(missing_ok=True)

    def write(self, families: Families) -> None:
        """What this process would say."""
        samples = [sample for series in families.values() for sample in series.values()]
        new = self._own.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(samples))
        new.replace(self._own)

    def others(self) -> list[Families]:
        """What the other processes have said last."""
        found = []
        for path in self._directory.glob(f"{self._family}*"):
            if path == self._own or path.suffix:
                continue
            try:
                samples = _decode(path.read_bytes())
                is_stale = time.time() - path.stat().st_mtime > STALE_S
            except (OSError, msgspec.DecodeError) as error:
                log.error("what another gateway has counted cannot be read: %s", error)
                continue
            if is_stale:
                samples = [sample for sample in samples if _was_its_own(METRICS[sample.name])]
            found.append(gathered(samples))
        return found


def _was_its_own(metric: Metric) -> bool:
    """What a process counted itself, which nobody else tells of."""
    return metric.kind != "gauge" and metric.merge == "sum"
