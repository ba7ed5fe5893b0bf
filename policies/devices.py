"""Which of a machine's CUDA devices each worker computes on, and whose turn it is where they compute on the CPU.

Whoever starts the workers knows them all and what each was told, but not how many devices there are, or how many nodes
the CPU's memory has: each worker counts them, and deals them out as all the others do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from policies.section import NonNegative, Positive, Section

Devices = tuple[int, ...]
"""Their indexes, by rank."""


class Claim(Section, frozen=True):
    """What one worker asks for."""

    model: str
    replica: NonNegative
    num_ranks: Positive
    """Each with a device of its own, or with its part of the CPU's cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA devices if there are any."""
    devices: tuple[NonNegative, ...] = ()
    """Of CUDA's, those that it was told; empty: what fewest others have."""


class Turn(NamedTuple):
    """Where a rank stands in the line of all that take nodes of the CPU's memory in turn."""

    number: int = 0
    first: int = 0
    """Of its model: the ranks of all replicas stand side by side, and are meant to be busy at the same time."""
    num_own: int = 1
    """Of its model, itself among them."""


ALONE = Turn()


def dealt(claims: Sequence[Claim], num_devices: int) -> list[Devices]:
    """What each gets of so many. Those of one model get different ones as long as there are any; where there are not
    enough for all of them, several share one."""
    taken = Counter(device for claim in claims for device in claim.devices)
    own = Counter((claim.model, device) for claim in claims for device in claim.devices)
    found = []
    for claim in claims:
        devices = claim.devices
        if not devices:
            by_load = sorted(range(num_devices), key=lambda device: (own[claim.model, device], taken[device]))
            devices = tuple(by_load[: claim.num_ranks])
            taken.update(devices)
            own.update((claim.model, device) for device in devices)
        found.append(devices)
    return found


def turn_of(claims: Sequence[Claim], model: str, replica: int, rank: int) -> Turn:
    """Of a rank of one of these workers, all of which compute on the CPU."""
    line = [(claim.model, claim.replica, each) for claim in claims for each in range(claim.num_ranks)]
    own = [index for index, (name, _, _) in enumerate(line) if name == model]
    return Turn(line.index((model, replica, rank)), own[0], len(own))


def fault_of(devices: Sequence[int], num_replicas: int, num_ranks: int) -> str | None:
    """Why a model's workers cannot have the devices that were named for them, in turn; None: they can."""
    if not devices:
        return None
    if len(devices) < num_replicas * num_ranks:
        return (
            f"{num_replicas} replicas of {num_ranks} ranks take {num_replicas * num_ranks} CUDA devices, but"
            f" {len(devices)} are named (one that replicas are to share is named several times)"
        )
    for replica in range(num_replicas):
        (device, times), *_ = Counter(devices_of(devices, replica, num_ranks)).most_common()
        if times > 1:
            return f"replica {replica} has device {device} {times} times, but each of its ranks needs one of its own"
    return None


def devices_of(devices: Sequence[int], replica: int, num_ranks: int) -> Devices:
    """Those of a replica, of all that were named for its model."""
    return tuple(devices[replica * num_ranks : (replica + 1) * num_ranks])
