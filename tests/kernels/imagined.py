"""A CUDA device that is imagined: tensors on it have shapes and no numbers (torch's FakeTensor), and Triton's kernels
are launched nowhere. What it shows is what a CPU cannot: where a step waits for the device, mixes what is on it with
what is not, or does while it is recorded what can be done but once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from tests.kernels.compiled import OnPaper
from worker.sampling import race

DEVICE = torch.device("cuda", 0)
WAITS = ("_local_scalar_dense", "nonzero", "unique", "aten.equal.", "bincount", "masked_select")
"""Parts of the names of operators whose result the host has to know."""

aten: Any = torch.ops.aten


class Watch(TorchDispatchMode):
    """Notes each operator that waits for the device, with the line of ours that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.is_recording = False
        self.num_launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = self._wrong(str(func), args, kwargs or {})
        if what:
            lines = [f for f in traceback.extract_stack() if "/worker/" in f.filename]
            at = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else "a test"
            self.seen.append(f"{func} {what}, at {at}")
        return func(*args, **(kwargs or {}))

    def _wrong(self, name: str, args: Any, kwargs: Any) -> str:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        places = {each.device.type for each in tensors}
        if "cuda" in places and any(part in name for part in WAITS):
            return "waits"
        if "_to_copy" in name or "copy_." in name:
            source = tensors[-1].device.type
            target = torch.device(kwargs["device"]).type if kwargs.get("device") else tensors[0].device.type
            is_free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if source != target and (self.is_recording or not is_free):
                return f"from {source} to {target}"
        elif "cuda" in places and any(each.device.type == "cpu" and each.dim() for each in tensors):
            return "mixes devices"
        if name.startswith("aten.index") and any(each.dtype is torch.bool for each in tensors[1:]):
            return "waits"
        return ""


class Record:
    """Runs once for what is made once only, and then as a recording would."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self._watch.is_recording = True
        run()
        self._watch.is_recording = False
        return lambda: None

    def seconds(self, replay: Callable[[], None]) -> float:
        return 0.0


class Arriving:
    """In place of worker.transfer's: zeros arrive."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = list(tensors)
        assert all(each.is_cuda for each in self._tensors)

    def take(self) -> list[torch.Tensor]:
        with _disable_current_modes():
            return [torch.zeros(tuple(each.shape), dtype=each.dtype) for each in self._tensors]


def _cut(x: Any, key: Any) -> tuple[Any, list[Any]]:
    """By whole numbers and slices; and what else there is of each dimension left."""
    dim, others = 0, []
    for each in key if isinstance(key, tuple) else (key,):
        if isinstance(each, int):
            x = aten.select.int(x, dim, each)
            continue
        if each is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(each, slice):
            x = aten.slice.Tensor(x, dim, each.start, each.stop, each.step or 1)
        elif each is Ellipsis:
            dim = x.dim() - 1  # only ever before the last
            continue
        else:
            index = each if isinstance(each, torch.Tensor) else torch.tensor(each)
            others += [None] * (dim - len(others)) + [index.to(x.device)]
        dim += 1
    return x, others


def _get(self: Any, key: Any) -> Any:
    x, others = _cut(self, key)
    return aten.index.Tensor(x, others) if others else x


def _set(self: Any, key: Any, value: Any) -> None:
    x, others = _cut(self, key)
    if others:
        aten.index_put_(x, others, value)
    else:
        aten.copy_.default(x, value)


def _numpy(self: Any) -> Any:
    """The same each time; what windows of one pool have in the other."""
    if not hasattr(self, "on_host"):
        with _disable_current_modes():
            self.on_host = torch.full(tuple(self.shape), -1, dtype=self.dtype).numpy()
    return self.on_host


@contextmanager
def imagined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Everything inside is on it that names it."""
    watch = Watch()

    def launch(self: Any, *args: Any, **_: Any) -> None:
        assert all(each.is_cuda for each in args if isinstance(each, torch.Tensor)), self.__name__
        watch.num_launches += 1

    def streams(keys: Any, device: torch.device) -> torch.Tensor:
        with _disable_current_modes():
            return on_host(keys, torch.device("cpu"))

    on_host = race.streams
    facts = {
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(multi_processor_count=132),
        "mem_get_info": (1 << 33, 1 << 34),
        "empty_cache": None,
    }
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr("worker.attention.dense._shares_keys", lambda launch, device: True)
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    # The build of torch for CPUs knows no device to go to for these.
    for name, method in (("__getitem__", _get), ("__setitem__", _set), ("numpy", _numpy)):
        monkeypatch.setattr(FakeTensor, name, method, raising=False)
    monkeypatch.setattr(FakeTensor, "__iter__", lambda self: iter([_get(self, at) for at in range(len(self))]))
    copy = lambda self, source, non_blocking=False: aten.copy_.default(self, source, non_blocking)  # noqa: E731
    monkeypatch.setattr(FakeTensor, "copy_", copy, raising=False)
    whole = lambda self: aten.clone.default(self, memory_format=torch.contiguous_format)  # noqa: E731
    monkeypatch.setattr(FakeTensor, "contiguous", whole, raising=False)
    pinned = lambda self: torch.empty(tuple(self.shape), dtype=self.dtype)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr("worker.triton.check.agrees", lambda device: True)
    monkeypatch.setattr("worker.sampling.on_device.agrees", lambda device, vocab_size: True)
    monkeypatch.setattr("worker.graphs._agree", lambda said, expected: True)
    monkeypatch.setattr("worker.models.fused.FusedDecoder.agrees", lambda self: True)
    monkeypatch.setattr("worker.graphs.CudaRecord", lambda: Record(watch))
    monkeypatch.setattr("worker.sampling.race.streams", streams)
    monkeypatch.setattr("worker.vectors._bytes_of", lambda vector: bytes(4))
    for module in ("sampler", "vectors"):
        monkeypatch.setattr(f"worker.{module}.Arriving", Arriving)
    triton.runtime.driver.set_active(OnPaper(90))
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        yield watch
