"""Between the host and a device, in the order of the device's work, and without waiting for it.

A copy from or to memory that is not pinned would wait for the step that is under way, and the host with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def sent(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On their way to the device, as they are now; on the CPU they are shared."""
    on_host = torch.from_numpy(numbers)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


def send_into(target: Tensor, numbers: npt.NDArray[Any]) -> None:
    """As ``sent``, to where a device's tensor of the same size and type lies."""
    on_host = torch.from_numpy(numbers)
    target.copy_(on_host.pin_memory() if target.is_cuda else on_host, non_blocking=True)


def rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """These of its rows, copied; itself where they are as many as it has, and so all. To index with a list would wait
    for the device."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, sent(np.array(rows, dtype=np.int64), tensor.device))


class Arriving:
    """Tensors on their way to the host, as they are when this is made."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """All on one device."""
        self._on_host = list(tensors)
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._on_host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
            for target, tensor in zip(self._on_host, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def take(self) -> list[Tensor]:
        """Waits for them, but for nothing that the device was given later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host
