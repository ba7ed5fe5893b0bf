"""The Link between processes: collectives of torch.distributed, NCCL between CUDA devices and gloo on the CPU.

The NCCL path has run with torch's own process groups over stand-ins of CUDA and NCCL, which show who says what to whom
and from which device; it has not been measured yet, which takes two devices.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from worker.device import is_out_of_memory
from worker.models import Layout

HOST = "127.0.0.1"
"""All ranks are on one machine."""
PATIENCE = timedelta(minutes=10)
"""A rank waits so long for another in the middle of a step; the gateway loses its patience earlier."""


class LinkBroken(RuntimeError):
    """Another rank is gone, or what leads to it, in the middle of what all do together; what torch.distributed says of
    it, one line."""


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Raises LinkBroken; that this rank has no memory for it is nobody else's fault, and stays as it is."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise LinkBroken(str(error).strip().partition("\n")[0]) from error


def store(port: int = 0, num_ranks: int | None = None) -> TCPStore:
    """Where ranks find each other: a new one, for so many, on a free port; or the one that rank 0 has on this port."""
    if port:
        return TCPStore(HOST, port, wait_for_workers=False, timeout=PATIENCE)
    # Left to itself it would listen on all addresses of the machine, and it asks nobody who they are.
    listener = socket.create_server((HOST, 0))
    port, file = listener.getsockname()[1], listener.detach()
    return TCPStore(HOST, port, num_ranks, True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=file)


def keep_to_this_machine(environ: MutableMapping[str, str]) -> None:
    """What no one has chosen otherwise: ranks meet, and listen for each other, on the loopback interface."""
    if sys.platform != "linux":
        return
    # Else gloo asks what the machine's name resolves to, which in a container may be nothing.
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Else NCCL takes one that leads elsewhere, if there is any. Of this one it does not use the address in IPv6.
    if environ.get("NCCL_SOCKET_FAMILY") != "AF_INET6":
        environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")


class ProcessLink:
    """One rank's end of it. Calls are made in the same order on all ranks of a group. Each may raise LinkBroken."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        group: dist.ProcessGroup | None,
        pairs: Mapping[int, dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        """``group``: the ranks that share this stage's matrices; None: it has them alone. ``pairs``: each rank of
        another stage than the last, with the one that it sends to."""
        self._rank, self._layout, self._device = rank, layout, device
        self._group, self._pairs = group, pairs
        self._is_leader = rank == layout.ranks(layout.stage(rank))[0]
        # Stages count down as ranks count up: the last one has rank 0.
        self._next, self._previous = rank - layout.tensor, rank + layout.tensor
        self._on_the_way: list[tuple[dist.Work | None, Tensor]] = []
        self.num_calls = 0
        """That have come to their end."""

    @classmethod
    def between(cls, layout: Layout, rank: int, device: torch.device, meeting: Store) -> ProcessLink:
        """Connects to all other ranks, which do the same; returns when they are there."""
        on_cuda = device.type == "cuda"
        keep_to_this_machine(os.environ)
        # It says that what a group sends waits for whatever else the group does: here a pair sends, and nothing else.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=meeting,
            rank=rank,
            world_size=layout.num_ranks,
            timeout=PATIENCE,
            device_id=device if on_cuda else None,
        )
        own = None
        if layout.tensor > 1:
            groups = [dist.new_group(list(layout.ranks(stage))) for stage in range(layout.pipeline)]
            own = groups[layout.stage(rank)]
        # In one group for all a stage would not hear from the one before while it still sends to the next.
        senders = range(layout.tensor, layout.num_ranks)
        pairs = {sender: dist.new_group([sender - layout.tensor, sender]) for sender in senders}
        # NCCL connects at first use; what keeps it from that is better known before anybody is served.
        dist.all_reduce(torch.zeros(1, device=device))
        return cls(layout, rank, own, pairs, device)

    def sum(self, x: Tensor) -> Tensor:
        """See Link."""
        if self._group is not None:
            with _together():
                dist.all_reduce(x, group=self._group)
        self.num_calls += 1
        return x

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        """See Link."""
        if self._group is None:
            self.num_calls += 1
            return columns
        # A collective moves pieces of one size.
        own = F.pad(columns, (0, max(widths) - columns.shape[1])).contiguous()
        if not self._is_leader:
            with _together():
                dist.gather(own, None, group=self._group, group_dst=0)
            self.num_calls += 1
            return columns.new_empty((0, sum(widths)))
        pieces = [torch.empty_like(own) for _ in widths]
        with _together():
            dist.gather(own, pieces, group=self._group, group_dst=0)
        self.num_calls += 1
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, widths, strict=True)], 1)

    def send(self, x: Tensor) -> None:
        """See Link. Returns at once, so that this stage can go on with what comes next."""
        x = x.contiguous()
        with _together():
            self._on_the_way.append((dist.isend(x, self._next, self._pairs[self._rank]), x))
        self.num_calls += 1

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See Link."""
        x = torch.empty(shape, dtype=dtype, device=device)
        with _together():
            dist.recv(x, self._previous, self._pairs[self._previous])
        self.num_calls += 1
        return x

    def rehearse(self, num_tokens: int, width: int, dtype: torch.dtype) -> None:
        """What steps ask for, once, as large as they may: NCCL takes memory of its own for it, which KV is not to have.
        On all ranks."""
        x = torch.zeros((num_tokens, width), dtype=dtype, device=self._device)
        if self._previous < self._layout.num_ranks:
            x = self.receive((num_tokens, width), dtype, self._device)
        self.sum(x)
        self.gather(x[:1], [width] * self._layout.tensor)
        if self._next >= 0:
            self.send(x)
        self.settle()

    def meet(self) -> None:
        """``settle`` then waits for all ranks of the model."""
        with _together():
            dist.all_reduce(torch.zeros(1, device=self._device))

    def settle(self) -> None:
        """Waits until all that was sent is on its way and its memory may be used again, and the others have taken part
        in all that came before.
        """
        with _together():
            for work, _ in self._on_the_way:
                if work is not None:
                    work.wait()
        self._on_the_way.clear()
        if self._device.type == "cuda":
            # There calls only queue up, and the host is at the end of a step before the others have begun it: what
            # they have to say of it would come after rank 0 has asked.
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Leaves the others; they are to do the same."""
        dist.destroy_process_group()
