"""The control groups, of version 2 or 1, that this process is in; each has limits for all that is in it together."""

from __future__ import annotations

from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """The directories of those that may limit what ``controller`` stands for, each before the one around it; none where
    the system does not say. Which version one is of is told by the names of its files.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's; the container's own group is then mounted as the root.
        for directory in (group, *group.parents):
            found.append(directory)
            if directory == base:
                break
    return found


def cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs whose whole time the tightest of them gives; None: that of all there are."""
    quotas = []
    for directory in groups("cpu", root, membership):
        try:
            quota, period = _quota_of(directory)
        except (OSError, ValueError):  # it has none, or says "max"
            continue
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _quota_of(directory: Path) -> tuple[int, int]:
    """Of each period, in microseconds, with the period. Raises OSError and ValueError."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()
    except FileNotFoundError:
        quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota), int(period)
