"""Where on the machine a worker's threads run: how many, and on which node of its memory.

A node's memory is read by its own cores at full speed and by the others' at half of it or less, so on a machine of
several nodes each replica keeps to one: its threads, and with them whatever they are the first to touch.
"""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
CORES_WITH_ROOM = 4
"""From so many on, one is left to the gateway."""


def allowed() -> set[int]:
    """CPUs that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cores(cpus: set[int], system: Path = SYSTEM) -> list[set[int]]:
    """The physical cores among these: CPUs that are threads of one core stand together."""
    by_core: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        try:
            core = (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        by_core.setdefault(core, set()).add(cpu)
    return list(by_core.values())


def nodes(cpus: set[int], system: Path = SYSTEM) -> list[set[int]]:
    """The nodes that have CPUs among these, each with those it has."""
    found = []
    for path in sorted((system / "node").glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        try:
            shared = numbers(path.read_text()) & cpus
        except (OSError, ValueError):
            continue
        if shared:
            found.append(shared)
    return found


def num_nodes() -> int:
    """That this process can choose from: 1 where the system does not say."""
    return max(1, len(nodes(allowed())))


def keep_to_a_node(index: int) -> set[int] | None:
    """Bind this process, before it has other threads, to the node that the ``index``-th replica gets in turn. Its
    CPUs; None where there is no choice, or no way to bind.
    """
    choice = nodes(allowed())
    if len(choice) < 2 or not hasattr(os, "sched_setaffinity"):
        return None
    chosen = choice[index % len(choice)]
    os.sched_setaffinity(0, chosen)
    return chosen


def num_threads() -> int:
    """One a physical core, less one for the gateway where there are enough."""
    num_cores = len(cores(allowed()))
    return num_cores - 1 if num_cores >= CORES_WITH_ROOM else max(1, num_cores)


def numbers(text: str) -> set[int]:
    """The kernel's lists: "0-3,8" is {0, 1, 2, 3, 8}. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            found |= set(range(int(first), int(last or first) + 1))
    return found
