"""Runs PTX on the CPU, an instruction at a time for all threads of a warp that stand at it, so that what a compiler has
made of a kernel can be tried where there is no device.

Warps take turns at random: what depends on another warp's being slower shows. Of the language it knows what our kernels
without tensor cores are made of (PTX ISA, version 8), anything else raises NotImplementedError. Arithmetic is numpy's:
a fused multiply-add rounds twice, and what is approximate on a device is exact.
"""

from __future__ import annotations

import operator
import random
import re
from typing import Any, NamedTuple

import numpy as np

TYPES = {
    f"{kind}{8 * size}": np.dtype(f"{letter}{size}")
    for kind, letter in (("b", "u"), ("u", "u"), ("s", "i"), ("f", "f"))
    for size in (2, 4, 8)
}
BITS = {size: np.dtype(f"u{size}") for size in (2, 4, 8)}
REGISTERS = {"%r": BITS[4], "%rd": BITS[8], "%rs": BITS[2], "%p": np.dtype(bool)}
LANES = 32
SHARED_BYTES = 1 << 17
MOST_STEPS = 1_000_000
"""Of all warps together; a kernel that takes more does not end."""
TWO = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "div": operator.truediv,
}  # fmt: skip
COMPARED = {
    "lt": operator.lt, "gt": operator.gt, "eq": operator.eq, "ne": operator.ne, "le": operator.le, "ge": operator.ge,
}  # fmt: skip
ONE = {"neg": operator.neg, "abs": abs, "ex2": np.exp2, "rcp": lambda x: 1.0 / x}


class Instruction(NamedTuple):
    text: str
    parts: list[str]
    """Of its name: setp, lt, s32."""
    operands: list[str]
    guard: str
    """The predicate that it goes by, perhaps with a ! before it; empty: none."""


class Program:
    """One kernel; its grid is a single block."""

    def __init__(self, ptx: str) -> None:
        found = re.search(r"\.reqntid (\d+)", ptx)
        assert found is not None
        self.num_threads = int(found[1])
        self._code: list[Instruction] = []
        self._labels: dict[str, int] = {}
        body = ptx[ptx.index(".reqntid") :].partition("{")[2]
        for line in body.partition(".section")[0].splitlines():
            text = line.partition("//")[0].strip()
            if text.endswith(":"):
                self._labels[text[:-1]] = len(self._code)
            elif not text.startswith("."):
                # "{ .reg .b32 tmp; mov.b64 {tmp, %r1}, %rd1; }" is one line.
                statements = [each.strip() for each in text.split(";")]
                self._code += [
                    _parsed(each) for each in statements if each not in ("", "{", "}") and ".reg" not in each
                ]

    def run(self, parameters: list[int], memory: np.ndarray, base: int, seed: int) -> None:
        """memory [bytes] u8 begins at address ``base``, and is changed. Raises IndexError where something outside of it
        is touched, TimeoutError."""
        with np.errstate(all="ignore"):
            _Block(self._code, self._labels, self.num_threads, parameters, memory, base).run(random.Random(seed))


def _parsed(statement: str) -> Instruction:
    found = re.match(r"(?:@(!?%p\d+)\s+)?(\S+)\s*(.*)", statement, re.DOTALL)
    assert found is not None
    operands = re.findall(r"[{\[][^}\]]*[}\]]|[^,\s]+", found[3])
    return Instruction(statement, found[2].split("."), operands, found[1] or "")


class _Block:
    def __init__(
        self,
        code: list[Instruction],
        labels: dict[str, int],
        num_threads: int,
        parameters: list[int],
        memory: np.ndarray,
        base: int,
    ) -> None:
        self._code, self._labels, self._num, self._parameters = code, labels, num_threads, parameters
        self._memory, self._base, self._shared = memory, base, np.zeros(SHARED_BYTES, np.uint8)
        self._threads = np.arange(num_threads, dtype=np.uint32)
        self._registers: dict[str, np.ndarray] = {}
        self._at = np.zeros(num_threads, dtype=np.int64)
        self._waits, self._lives = np.zeros(num_threads, bool), np.ones(num_threads, bool)

    def run(self, chance: random.Random) -> None:
        warps, warp, num_left = self._threads // LANES, 0, 0
        for _ in range(MOST_STEPS):
            if not self._lives.any():
                return
            ready = self._lives & ~self._waits
            if not ready.any():
                self._waits[:] = False  # all have come to the barrier
                continue
            if num_left == 0 or not ready[warps == warp].any():
                warp, num_left = chance.choice(sorted(set(warps[ready]))), chance.choice((1, 5, 40, 400))
            num_left -= 1
            ready &= warps == warp
            here = self._at[ready].min()  # threads that are ahead wait for the others
            self._step(self._code[here], ready & (self._at == here))
        raise TimeoutError("it does not end")

    def _step(self, one: Instruction, ready: np.ndarray) -> None:
        self._at[ready] += 1
        if one.guard:
            holds = self._get(one.guard.lstrip("!"), "pred")
            ready = ready & (~holds if one.guard.startswith("!") else holds)
        name, kind, operands = one.parts[0], one.parts[-1], one.operands
        if name == "bra":
            self._at[ready] = self._labels[operands[0]]
        elif name == "ret":
            self._lives[ready] = False
        elif name == "bar":
            self._waits |= ready
        elif name in ("ld", "st") and one.parts[1] != "param":
            self._move(one, ready)
        elif name == "mov" and operands[0].startswith("{"):
            low, high = operands[0].strip("{ }").split(", ")
            wide = self._get(operands[1], "b64")
            self._put(low, (wide & 0xFFFFFFFF).astype(np.uint32), ready)
            self._put(high, (wide >> np.uint64(32)).astype(np.uint32), ready)
        else:
            self._put(operands[0].partition("|")[0], self._computed(one, name, kind, operands, ready), ready)

    def _computed(self, one: Instruction, name: str, kind: str, operands: list[str], ready: np.ndarray) -> np.ndarray:
        def get(place: int, kind: str = kind) -> np.ndarray:
            return self._get(operands[place], kind)

        bits = BITS[TYPES[kind].itemsize] if kind in TYPES else np.dtype(bool)
        match name:
            case "ld":
                value = self._parameters[int(operands[1].strip("[]").rpartition("_")[2])]
                return np.full(self._num, value & (2 ** (8 * bits.itemsize) - 1), bits)
            case "mov" if operands[1].startswith("{"):
                low, high = (self._get(each, "b32").astype(np.uint64) for each in operands[1].strip("{ }").split(", "))
                return low | high << np.uint64(32)
            case "mov":
                return get(1)
            case "not":
                return ~get(1)
            case "cvt":
                return get(1).astype(TYPES[one.parts[-2]])
            case "setp":
                return COMPARED[one.parts[1].rstrip("u")](get(1), get(2)) | self._unordered(one, get(1), get(2))
            case "selp":
                return np.where(get(3, "pred"), get(1), get(2))
            case "max" | "min":
                kinds = {"max": (np.fmax, np.maximum), "min": (np.fmin, np.minimum)}[name]
                return kinds[kind[0] != "f"](get(1), get(2))
            case "mad" if one.parts[1] == "wide":
                wide = np.int64 if kind[0] == "s" else np.uint64
                return (get(1).astype(wide) * get(2).astype(wide)).view(np.uint64) + get(3, "b64")
            case "mad" | "fma":
                return get(1) * get(2) + get(3)
            case "shl" | "shr":
                by = get(2, "b32").astype(get(1).dtype)
                assert (by < 8 * bits.itemsize).all()
                return get(1) << by if name == "shl" else get(1) >> by
            case "bfe":
                return get(1) >> np.uint32(operands[2]) & np.uint32(2 ** int(operands[3]) - 1)
            case "popc":
                return np.array([int(each).bit_count() for each in get(1)], dtype=np.uint32)
            case "shfl":
                lanes, by = self._threads % LANES, get(2, "b32")
                source = lanes ^ by if one.parts[2] == "bfly" else np.where(lanes >= by, lanes - by, lanes)
                return get(1)[self._threads - lanes + source]
            case "redux" | "vote":
                return np.repeat(self._of_warps(one, operands, ready), LANES)
            case _ if name in ONE:
                return ONE[name](get(1)).astype(TYPES[kind])
            case _ if name in TWO:
                return TWO[name](get(1), get(2))
        raise NotImplementedError(one.text)

    def _of_warps(self, one: Instruction, operands: list[str], ready: np.ndarray) -> np.ndarray:
        """A number for each."""
        if one.parts[0] == "vote":
            assert one.parts[2] == "ballot"
            says = (self._get(operands[1], "pred") & ready).reshape(-1, LANES)
            return (says.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum(1).astype(np.uint32)
        each = self._get(operands[1], one.parts[-1]).reshape(-1, LANES)
        return each.max(1) if one.parts[2] == "max" else each.sum(1, dtype=each.dtype)

    @staticmethod
    def _unordered(one: Instruction, x: np.ndarray, y: np.ndarray) -> Any:
        """Where a comparison of no numbers holds."""
        is_so = one.parts[-1][0] == "f" and (one.parts[1] == "ne" or one.parts[1].endswith("u"))
        return (np.isnan(x) | np.isnan(y)) & (one.parts[1] != "ne") if is_so else np.zeros(len(x), bool)

    def _move(self, one: Instruction, ready: np.ndarray) -> None:
        loads, (_, space, *_, kind) = one.parts[0] == "ld", one.parts
        place, names = (one.operands[1], one.operands[0]) if loads else one.operands
        memory, base = (self._memory, self._base) if space == "global" else (self._shared, 0)
        register, _, offset = place.strip("[ ]").partition("+")
        wide = "b64" if register.startswith("%rd") else "b32"
        starts = self._get(register.strip(), wide).astype(np.int64) + int(offset or 0) - base
        size = TYPES[kind].itemsize
        for number, name in enumerate(names.strip("{ }").split(", ")):
            at = starts[:, None] + number * size + np.arange(size)
            if not ((at[ready] >= 0) & (at[ready] < len(memory))).all():
                raise IndexError(f"outside of memory: {one.text}")
            if loads:
                bits = np.ascontiguousarray(memory[np.where(ready[:, None], at, 0)]).view(BITS[size])[:, 0]
                self._put(name.strip(), bits, ready)
            else:
                bits = np.ascontiguousarray(self._get(name.strip(), kind)).view(np.uint8).reshape(-1, size)
                memory[at[ready]] = bits[ready]

    def _get(self, operand: str, kind: str) -> np.ndarray:
        if operand == "%tid.x":
            return self._threads
        if operand in ("%ctaid.x", "global_smem"):
            return np.zeros(self._num, np.uint32)
        if operand.startswith("%"):
            held = self._held(operand)
            return held if kind == "pred" else held.astype(BITS[TYPES[kind].itemsize]).view(TYPES[kind])
        if kind == "pred":
            return np.full(self._num, operand != "0")
        bits = BITS[TYPES[kind].itemsize]
        value = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand, 0)
        return np.full(self._num, value % 2 ** (8 * bits.itemsize), bits).view(TYPES[kind])

    def _held(self, name: str) -> np.ndarray:
        if name not in self._registers:
            self._registers[name] = np.zeros(self._num, REGISTERS[name.rstrip("0123456789")])
        return self._registers[name]

    def _put(self, name: str, values: np.ndarray, ready: np.ndarray) -> None:
        if name not in ("_", "tmp"):
            held = self._held(name)
            bits = values if values.dtype == bool else np.ascontiguousarray(values).view(BITS[values.dtype.itemsize])
            held[ready] = bits[ready]
