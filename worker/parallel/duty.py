"""What a rank that is not 0 is told on its command line."""

from __future__ import annotations

import sys

import msgspec

from policies.settings import WorkerSettings

PARTED = 4
"""The exit status of a rank that ends for want of another one."""


class Duty(msgspec.Struct, frozen=True):
    """As JSON, for ``python -m worker.parallel``."""

    settings: WorkerSettings
    """Rank 0's own."""
    rank: int
    control: int
    """The file that is this rank's end of the socket to rank 0."""
    reading: int
    """The same, of the one for what is read beside the steps."""

    def command(self) -> list[str]:
        """Starts the process; it has the package from where this one has it."""
        alike = ["-P"] if sys.flags.safe_path else []
        return [sys.executable, *alike, "-m", "worker.parallel", msgspec.json.encode(self).decode()]
