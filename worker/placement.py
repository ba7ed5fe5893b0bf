"""Where on the machine a worker's threads run: how many, and on which node of its memory.

A node's memory is read by its own cores at full speed and by the others' at half of it or less, so on a machine of
several nodes each process keeps to one: its threads, and with them whatever they are the first to touch. Processes of
one model are busy at the same time, and divide the cores that they share; those of different models often are not, and
each has as many threads as if it were alone: threads that wait for work sleep, and the system deals out the rest.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from policies.devices import ALONE, Turn
from worker.cgroups import cpu_quota

SYSTEM = Path("/sys/devices/system")
CORES_WITH_ROOM = 4
"""From so many on, one is left to the gateway."""


class Part(NamedTuple):
    """Of the machine, one process's."""

    num_cores: int
    """What no other process of its model computes on; some may be left for others."""
    num_threads: int


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


def part_of(turn: Turn, choice: list[set[int]], quota: float | None = None, system: Path = SYSTEM) -> Part:
    """``choice``: the CPUs of each node, which processes take in turn. ``quota``: CPUs that all of them together may
    use, wherever they are; None: all.
    """
    num_nodes = len(choice)
    own = range(turn.first, turn.first + turn.num_own)
    num_there = sum((each - turn.number) % num_nodes == 0 for each in own)
    num_cores = len(cores(choice[turn.number % num_nodes], system))
    limits = [(num_cores, num_there)] if quota is None else [(num_cores, num_there), (int(quota), turn.num_own)]
    return Part(
        min(max(1, num // num_sharing) for num, num_sharing in limits),
        min(max(1, _without_the_gateway(num) // num_sharing) for num, num_sharing in limits),
    )


def _without_the_gateway(num_cores: int) -> int:
    return num_cores - 1 if num_cores >= CORES_WITH_ROOM else num_cores


_taken: Part | None = None
"""Of the process, as what it is bound to is."""


def take(turn: Turn, binds: bool) -> Part:
    """What this process has from now on. ``binds``: before it has other threads, to the node that it gets in turn."""
    global _taken
    choice = choices() if binds else [allowed()]
    _taken = part_of(turn, choice, cpu_quota())
    if len(choice) > 1:
        os.sched_setaffinity(0, choice[turn.number % len(choice)])
    return _taken


def taken() -> Part:
    """What this process has; as if it were alone where it has not taken its part."""
    return _taken or part_of(ALONE, [allowed()], cpu_quota())


def choices() -> list[set[int]]:
    """The CPUs that a process can keep to: a node's, or all where there is no choice, or no way to bind."""
    return (nodes(allowed()) if hasattr(os, "sched_setaffinity") else []) or [allowed()]


def numbers(text: str) -> set[int]:
    """The kernel's lists: "0-3,8" is {0, 1, 2, 3, 8}. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            found |= set(range(int(first), int(last or first) + 1))
    return found
