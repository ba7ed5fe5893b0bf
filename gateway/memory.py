"""What models need of memory, by their files, and what the machine has.

The worker is who takes it, and its own account may differ a little: this is for deciding who is loaded beside whom
before anybody is.
"""

from __future__ import annotations

import contextlib
import mmap
from functools import cache
from pathlib import Path

import msgspec

from policies import cgroups, gguf, safetensors, settings
from policies.engine import KV_MEMORY_SHARES
from sources import refuse_pipe

PROCESS_BYTES = 384 << 20
"""Of each process of a worker without weights or KV: the interpreter, torch and its threads."""
_BYTES_EACH = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
_QUANTISED = {"int8": 1.05, "fp8": 1.05, "int4": 0.6}
"""Bytes of a value, scales included."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
"""Ends of names; rows of the one are looked up, and it stays as it is."""
_NATIVE_BFLOAT16 = ("avx512_bf16", "amx_tile")
"""Without these flags a CPU's "auto" is float32."""


class Need(msgspec.Struct, frozen=True):
    """Of one worker."""

    weights_bytes: int
    """As they are in memory; 0: not known, as of files that have not been fetched."""
    max_kv_bytes: int
    """As the settings bound it; 0: a share of what is left."""
    kv_share: float
    num_ranks: int = 1

    @property
    def least_bytes(self) -> int:
        """With which it can be loaded."""
        return self.bare_bytes + self.max_kv_bytes

    @property
    def bare_bytes(self) -> int:
        """Without KV."""
        return self.num_ranks * PROCESS_BYTES + self.weights_bytes

    def kv_bytes(self, left_bytes: int) -> int:
        """Of so much that nobody else has, what becomes its KV."""
        if self.max_kv_bytes:
            return self.max_kv_bytes
        return max(1, int((left_bytes - self.bare_bytes) * self.kv_share))


def need_of(place: Path, engine: settings.Engine) -> Need:
    """``place`` is a directory in Hugging Face layout or a GGUF file. Damaged files count as what they have; the worker
    says what is wrong with them."""
    weights_bytes = _of_gguf(place, engine) if place.is_file() else _of_directory(place, engine)
    share = engine.kv_memory_share or KV_MEMORY_SHARES["cuda" if engine.device == "cuda" else "cpu"]
    return Need(weights_bytes, engine.max_kv_bytes, share, engine.tensor_parallel * engine.pipeline_parallel)


def budget_of(config: settings.Settings) -> int | None:
    """Bytes for all the models that are started here; None: nothing is planned."""
    if config.memory.budget_bytes:
        return config.memory.budget_bytes
    devices = {model.engine.device for model in config.models.values() if model.replicas}
    if "cuda" in devices or ("auto" in devices and Path("/dev/nvidiactl").exists()):
        return None
    return free_bytes(Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))


def free_bytes(meminfo: Path, root: Path, membership: Path) -> int | None:
    """What the kernel would hand out without swapping, within the tightest limit of the control groups that this
    process, and its workers with it, is in; None where it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        groups = cgroups.groups("memory", membership.read_text(), root)
    except OSError:
        groups = []
    return max(0, min([free, *(room for group in groups if (room := _room_in(Path(group))) is not None)]))


def _room_in(group: Path) -> int | None:
    """What it leaves, of which page cache is a part; None where it has no limit."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            return int((group / limit).read_text()) - int((group / used).read_text()) + _page_cache_of(group)
        except (OSError, ValueError):  # "max", or of the other version
            continue
    return None


def _page_cache_of(group: Path) -> int:
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _of_gguf(file: Path, engine: settings.Engine) -> int:
    """Of its tensors, of all parts, in the form that they are loaded in."""
    parts = gguf.parts_of(file)
    try:
        with contextlib.ExitStack() as stack:
            header = gguf.joined([gguf.parse(_viewed(part, stack)) for part in parts])
            plain_bytes = _plain_bytes(engine)
            return int(header.loaded_bytes(_QUANTISED.get(engine.quantize, plain_bytes), plain_bytes))
    except (OSError, ValueError):
        return sum(map(_size, parts))


def _viewed(path: Path, stack: contextlib.ExitStack) -> memoryview:
    """While ``stack`` lasts. Raises OSError, and ValueError of an empty file."""
    refuse_pipe(path)
    opened = stack.enter_context(path.open("rb"))
    mapped = stack.enter_context(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    return stack.enter_context(memoryview(mapped))


def _of_directory(directory: Path, engine: settings.Engine) -> int:
    """Of its tensors in the form that they are loaded in."""
    tensors: dict[str, safetensors.Tensor] = {}
    damaged_bytes = 0
    for file in directory.glob("*.safetensors"):
        size = _size(file)
        try:
            refuse_pipe(file)
            with file.open("rb") as opened:
                length = safetensors.header_length(opened.read(safetensors.LENGTH_BYTES), size)
                tensors |= safetensors.tensors_of(opened.read(length), size)
        except (OSError, safetensors.SafetensorsInvalid):
            damaged_bytes += size
    held = damaged_bytes + sum(_bytes_of(name, tensor, engine) for name, tensor in tensors.items())
    table = next((tensor for name, tensor in tensors.items() if name.endswith(_EMBEDDING)), None)
    if table is not None and not any(name.endswith(_HEAD) for name in tensors):
        held += _bytes_of_tied_head(table, engine)
    return int(held)


def _bytes_of(name: str, tensor: safetensors.Tensor, engine: settings.Engine) -> float:
    if tensor.dtype not in safetensors.FLOATS:
        return tensor.num_bytes  # it is quantised, and stays so
    if len(tensor.shape) > 1 and engine.quantize != "none" and not name.endswith(_EMBEDDING):
        return tensor.num_values * _QUANTISED[engine.quantize]
    return tensor.num_values * _plain_bytes(engine)


def _bytes_of_tied_head(table: safetensors.Tensor, engine: settings.Engine) -> float:
    """Of the embedding as it is multiplied, where that is another copy: rounded, or in the order of a CPU's kernels."""
    if engine.quantize != "none":
        return table.num_values * _QUANTISED[engine.quantize]
    if engine.device == "cuda":
        return 0.0
    return table.num_values * min(_plain_bytes(engine), 2.0 if table.dtype == "BF16" else 4.0)


def _plain_bytes(engine: settings.Engine) -> float:
    """Of a weight that is not quantised."""
    return _BYTES_EACH.get(engine.dtype, 2.0 if _has_bfloat16() else 4.0)


@cache
def _has_bfloat16() -> bool:
    try:
        return any(flag in Path("/proc/cpuinfo").read_text() for flag in _NATIVE_BFLOAT16)
    except OSError:
        return True


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
