"""A CUDA device that is pretended: tensors on it have their numbers in the host's memory, and whatever would go wrong
where that is another memory goes wrong here, too, so a model is loaded and computes as it would there. Where Triton's
interpreter is switched on it runs the kernels; elsewhere the device is too old for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from worker.triton import has_triton

DEVICE = torch.device("cuda", 0)
MAY_MIX = ("_to_copy", "copy_", "aten.index.Tensor", "aten.index_put")
"""Parts of the names of operators that take tensors of both."""

aten: Any = torch.ops.aten
internals: Any = torch._C
future: Any = torch.__future__


class There(torch.Tensor):
    """One on the device."""

    here: torch.Tensor
    """Its numbers."""

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> There:
        kind: Any = torch.Tensor
        sizes = {"strides": here.stride(), "storage_offset": here.storage_offset()}
        made: There = kind._make_wrapper_subclass(cls, here.size(), dtype=here.dtype, device=DEVICE, **sizes)
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute_there(func, args, kwargs or {})

    # The build of torch for CPUs knows no device to go to for these.

    def __getitem__(self, key: Any) -> Any:
        x, others = _cut(self, key)
        return aten.index.Tensor(x, others) if others else x

    def __setitem__(self, key: Any, value: Any) -> None:
        x, others = _cut(self, key)
        value = value if isinstance(value, torch.Tensor) else There(torch.tensor(value, dtype=self.dtype))
        if others:
            aten.index_put_(x, others, value)
        else:
            aten.copy_.default(x, value)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[at] for at in range(len(self))])

    def __invert__(self) -> Any:
        return aten.bitwise_not(self)

    def copy_(self, source: Any, non_blocking: bool = False) -> Any:
        return aten.copy_.default(self, source, non_blocking)

    def contiguous(self, **_: Any) -> Any:
        return self if self.here.is_contiguous() else aten.clone.default(self, memory_format=torch.contiguous_format)

    def nonzero(self, **asked: Any) -> Any:
        found = aten.nonzero(self)
        return tuple(found[:, dim] for dim in range(self.dim())) if asked.get("as_tuple") else found

    def numpy(self, **_: Any) -> Any:
        raise TypeError("it is on the device")

    def tolist(self) -> Any:
        return self.here.tolist()

    def item(self) -> Any:
        return self.here.item()

    def __float__(self) -> float:
        return float(self.here)

    def __int__(self) -> int:
        return int(self.here)

    def __bool__(self) -> bool:
        return bool(self.here)


def _cut(x: Any, key: Any) -> tuple[Any, list[Any]]:
    """By whole numbers and slices; and what else there is of each dimension left."""
    keys = key if isinstance(key, tuple) else (key,)
    dim, others = 0, list[Any]()
    for place, each in enumerate(keys):
        if isinstance(each, int):
            x = aten.select.int(x, dim, each)
            continue
        if each is Ellipsis:
            dim = x.dim() - sum(after is not None for after in keys[place + 1 :])
            continue
        if each is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(each, slice):
            x = aten.slice.Tensor(x, dim, each.start, each.stop, each.step or 1)
        else:
            others += [None] * (dim - len(others)) + [each if isinstance(each, torch.Tensor) else torch.tensor(each)]
        dim += 1
    return x, others


def _compute_there(func: Any, args: Any, kwargs: Any) -> Any:
    """Wherever its tensors are, or it says itself; those that are somewhere else are refused."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    is_there = any(isinstance(each, There) for each in tensors)
    is_here = any(each.dim() and not isinstance(each, There) for each in tensors)
    if is_there and is_here and not any(part in str(func) for part in MAY_MIX):
        raise RuntimeError(f"{func} is given tensors of the device and of the host")
    said = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if said.get("device") is not None:
        is_there = torch.device(said["device"]).type == "cuda"
        said["device"] = torch.device("cpu") if is_there else said["device"]
    plain_args, plain = tree_map(lambda each: each.here if isinstance(each, There) else each, (args, said))
    out = func(*plain_args, **plain)
    name = func._schema.name
    if name.endswith("_") and not name.endswith("__"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map(lambda each: There(each) if isinstance(each, torch.Tensor) and is_there else each, out)


class _Pretending(TorchDispatchMode):
    """For what makes tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute_there(func, args, kwargs or {})


class _Event:
    """Of a device that is never behind."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def _as_no_grad(self: Any) -> None:
    """Tensors of inference cannot be wrapped."""
    self._instead = torch.no_grad()
    self._instead.__enter__()


def _interpreted_there() -> Any:
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launch_there(self: Any, *args: Any, **kwargs: Any) -> None:
        assert all(isinstance(each, There) for each in args if isinstance(each, torch.Tensor))
        with _disable_current_modes():
            launch(self, *[each.here if isinstance(each, There) else each for each in args], **kwargs)

    return patch.object(GridExecutor, "__call__", launch_there)


@contextmanager
def pretended() -> Iterator[None]:
    """There is such a device inside, and it is the only one."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    with ExitStack() as patches:
        if is_interpreted:
            patches.enter_context(_interpreted_there())
        facts: dict[str, Any] = {
            "is_available": True,
            "device_count": 1,
            "get_device_capability": (9, 0) if is_interpreted else (7, 5),
            "get_device_properties": SimpleNamespace(multi_processor_count=132),
            "mem_get_info": (1 << 33, 1 << 34),
            **dict.fromkeys(("_lazy_init", "set_device", "empty_cache", "synchronize")),
        }
        for name, value in facts.items():
            patches.enter_context(patch.object(torch.cuda, name, lambda *_, value=value: value))
        patches.enter_context(patch.object(torch.cuda, "Event", _Event))
        patches.enter_context(patch.object(torch.Tensor, "pin_memory", lambda self: self))
        patches.enter_context(patch.object(torch.inference_mode, "__enter__", _as_no_grad))
        leave = lambda self, *raised: self._instead.__exit__(*raised)  # noqa: E731
        patches.enter_context(patch.object(torch.inference_mode, "__exit__", leave))
        before = internals._only_lift_cpu_tensors(), future.get_overwrite_module_params_on_conversion()
        internals._set_only_lift_cpu_tensors(True)
        # What a parameter's ``data`` becomes is not seen otherwise.
        future.set_overwrite_module_params_on_conversion(True)
        has_triton.cache_clear()
        try:
            with _Pretending():
                yield
        finally:
            has_triton.cache_clear()
            internals._set_only_lift_cpu_tensors(before[0])
            future.set_overwrite_module_params_on_conversion(before[1])
