"""Where these tests run: on a CUDA device, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1, set before
anything imports Triton).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def examples(num: int) -> int:
    """So many, or few of them on a device, where each shape is compiled anew."""
    return num if DEVICE.type == "cpu" else max(2, num // 8)


def check_no_overflow() -> None:
    """The interpreter does each sum of integers again in 64 bits to find overflow, and then, since that is said only to
    who debugs, throws what it found away: a third of the time of these tests.
    """
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def prepare_once() -> None:
    """Whenever one function calls another, the interpreter replaces the language's functions by its own again, though
    it has done so where the kernel was launched. That takes a third of the time of these tests, so here it is done
    where they are the compiler's, and not where they are the interpreter's already.
    """
    from triton import language
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    modules = (language, language.core)

    def patch_once(function: Any) -> Any:
        seen = [each for each in function.__globals__.values() if any(each is module for module in modules)]
        if any(language.core.is_builtin(module.load) for module in seen):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


if DEVICE.type == "cpu":
    check_no_overflow()
    prepare_once()
