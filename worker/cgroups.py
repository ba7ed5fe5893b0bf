"""What the control groups that this process is in leave to it."""

from __future__ import annotations

from pathlib import Path

from policies import cgroups

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """As policies/cgroups.py has them; none where the system does not say."""
    try:
        return [Path(group) for group in cgroups.groups(controller, membership.read_text(), root)]
    except OSError:
        return []


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
