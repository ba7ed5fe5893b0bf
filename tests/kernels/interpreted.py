"""Triton's interpreter without what it does anew for every operation of every program, though it comes to the same:
types, shapes and what stands for the language's functions. That is half the time of these tests. What is computed stays
as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hasten() -> None:
    check_no_overflow()
    prepare_once()
    know_types()
    know_shapes()
    leave_as_they_are()


def check_no_overflow() -> None:
    """It does each sum of integers again in 64 bits to find overflow, and then, since that is said only to who debugs,
    throws what it found away.
    """
    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def prepare_once() -> None:
    """Whenever a kernel is launched or one function calls another, it replaces the language's functions by its own, and
    puts them back behind a launch. Here they stay.
    """
    patch: Callable[[Any], Any] = interpreter._patch_lang
    prepared: set[Any] = set()

    def patch_once(function: Any) -> Any:
        if function not in prepared:
            prepared.add(function)
            patch(function)
        return interpreter._LangPatchScope()

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def said(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, said)

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attr


def know_types() -> None:
    """numpy's, of each of the language's."""
    find: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def known_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    interpreter._get_np_dtype = known_type


def know_shapes() -> None:
    """Of blocks: tensors of one shape share what says so."""
    of_block: Callable[..., None] = core.block_type.__init__
    known: dict[tuple[int, ...], tuple[Any, Any, str]] = {}
    sizes: dict[int, tuple[Any, Any]] = {}
    kinds: dict[tuple[int, str], Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(core._unwrap_if_constexpr(each) for each in core._unwrap_if_constexpr(shape))
        if key not in known:
            of_block(self, element_ty, shape)
            known[key] = self.shape, self.numel, str(self.shape)
            sizes[id(self.shape)] = size_of(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, named = known[key]
        self.name = f"<{named}, {element_ty}>"

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = id(self.shape), scalar_ty.name
        if key not in kinds:
            kinds[key] = core.block_type(scalar_ty, self.shape)
        return kinds[key]

    def size_of(shape: Any) -> tuple[Any, Any]:
        num = 1
        for each in shape:
            num *= each
        return core.constexpr(num), core.tuple([core.constexpr(each) for each in shape])

    of_scalar = size_of(())

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = sizes[id(kind.shape)] if kind.is_block() else of_scalar

    core.block_type.__init__, core.block_type.with_element_ty = init_block, with_element_ty
    core.tensor.__init__ = init_tensor


def leave_as_they_are() -> None:
    """Values that are no constexpr, and pairs of one shape."""
    unwrap: Callable[[Any], Any] = core._unwrap_if_constexpr
    broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
    plain = {core.tensor, core.dtype, int, float, bool, type(None)}

    def unwrap_others(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core._unwrap_if_constexpr = unwrap_others
    TritonSemantic.broadcast_impl_value = broadcast_others
