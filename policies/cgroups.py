"""The control groups, of version 2 or 1, that a process is in; each has limits for all that is in it together."""

from __future__ import annotations

from pathlib import PurePath


def groups(controller: str, membership: str, root: PurePath) -> list[PurePath]:
    """The directories of those that may limit what ``controller`` stands for, each before the one around it. Which
    version one is of is told by the names of its files. ``membership``: what the system says in /proc/self/cgroup;
    ``root``: where it shows the groups.
    """
    found = []
    for _, controllers, path in (line.split(":", 2) for line in membership.splitlines() if line.count(":") >= 2):
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
