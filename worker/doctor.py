"""What this machine offers the engine, which fast paths are on, and what would be slow and why.

`python -m worker.doctor [--json]`: facts for `penstock doctor`. Exit code 1 where the engine cannot run at all, else 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from policies.devices import ALONE
from worker.cgroups import cpu_quota
from worker.placement import allowed, choices, cores, part_of
from worker.process import importing
from worker.user_cache import user_cache

Severity = Literal["fatal", "slow", "note"]
"""It cannot run; it runs slower than it could here; worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this machine, in plain words: what, why, and what to do."""

    severity: Severity
    text: str


@dataclass(slots=True)
class Facts:
    """Everything found, by name; and what follows from it."""

    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def find(self, severity: Severity, text: str) -> None:
        self.findings.append(Finding(severity, text))

    @property
    def usable(self) -> bool:
        return all(finding.severity != "fatal" for finding in self.findings)


CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
LITTLE_MEMORY_BYTES = 2 << 30


def examine() -> Facts:
    """Look at the machine. Loads torch, which takes a second or two."""
    found = Facts()
    found.facts["python"] = platform.python_version()
    found.facts["machine"] = platform.machine()
    _cpu(found)
    _memory(found)
    _cache(found)
    _packages(found)
    try:
        with importing():
            import torch
    except (ImportError, OSError) as error:
        # OSError: the package is there, but a library that it needs is not.
        found.facts["torch"] = None
        found.find("fatal", f"torch cannot be loaded ({error}), and the engine computes with it: pip install penstock")
        return found
    found.facts["torch"] = str(torch.__version__)
    _torch(found)
    _devices(found)
    return found


def _cpu(found: Facts) -> None:
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
    lines = dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    flags = set(fields.get("flags", "").split())
    cpus = allowed()
    num_cores = len(cores(cpus))
    found.facts["cpu"] = fields.get("model name") or platform.processor() or platform.machine()
    found.facts["cpu_features"] = [feature for feature in CPU_FEATURES if feature in flags]
    found.facts["num_logical_cpus"] = len(cpus)
    found.facts["num_physical_cores"] = num_cores
    choice, quota = choices(), cpu_quota()
    found.facts["num_memory_nodes"] = len(choice)
    found.facts["cpu_quota"] = quota
    found.facts["num_threads"] = num_threads = part_of(ALONE, choice, quota).num_threads
    if quota is not None and quota < num_cores:
        found.find(
            "note",
            f"this container may use {quota:g} CPUs, but sees {num_cores} cores: a worker takes {num_threads}"
            f" thread{'s' if num_threads > 1 else ''}, as more would be stopped for most of each period.",
        )


def _memory(found: Facts) -> None:
    fields = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) << 10
    found.facts["memory_bytes"] = fields.get("MemTotal")
    available = found.facts["available_memory_bytes"] = fields.get("MemAvailable")
    if available is not None and available < LITTLE_MEMORY_BYTES:
        found.find(
            "slow", f"only {available >> 20} MiB of memory are free: few KV blocks fit, so few requests run at once."
        )


def _cache(found: Facts) -> None:
    """Compiled kernels and quantised weights."""
    try:
        directory = user_cache()
        sizes = [path.lstat().st_size for path in directory.rglob("*") if path.is_file()]
    except OSError as error:
        found.facts["cache"], found.facts["cache_bytes"] = None, None
        found.find("slow", f"nothing is kept from start to start, for there is no place for it: {error}.")
        return
    found.facts["cache"], found.facts["cache_bytes"] = str(directory), sum(sizes)


def _packages(found: Facts) -> None:
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for package in ("penstock", "numpy", "safetensors", "huggingface_hub", "transformers", "matplotlib"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    found.facts["packages"] = versions
    if versions["transformers"] is None:
        found.find(
            "note",
            "transformers is not installed; models of other families and encoders need it (penstock[families]), and"
            " `penstock bench engine --peer transformers`.",
        )


def _torch(found: Facts) -> None:
    import torch

    from worker.native.build import compiler

    facts = found.facts
    torch.set_num_threads(facts["num_threads"])
    facts["omp_wait_policy"] = os.environ.get("OMP_WAIT_POLICY")
    facts["compiler"] = compiler()
    # Untyped in torch.
    has_onednn = bool(cast(Any, torch.backends.mkldnn).is_available())
    has_cuda_flash = torch.cuda.is_available() and bool(cast(Any, torch.backends.cuda).flash_sdp_enabled())
    on_x86 = facts["machine"] in ("x86_64", "AMD64")
    native_bf16 = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()) if on_x86 else False
    packed = has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    facts["fast_paths"] = {
        "onednn": has_onednn,
        "cpu_native_bf16": native_bf16,
        "cpu_packed_bf16_linear": packed and native_bf16,
        "cpu_compiled_kernels": _compiled_kernels(found),
        "cpu_flash_attention": hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
        "cuda_flash_attention": has_cuda_flash,
    }
    if not facts["fast_paths"]["cpu_flash_attention"]:
        found.find("slow", "this torch has no flash attention for the CPU: attention runs in the plain way.")
    if not torch.cuda.is_available():
        if not facts["fast_paths"]["onednn"]:
            found.find(
                "slow", "this torch was built without oneDNN: matrix products on the CPU take several times longer."
            )
        if not native_bf16:
            found.find(
                "slow",
                "the CPU has neither AVX512-BF16 nor AMX: the engine computes in float32, which takes several times as"
                " long for prompts and, without a C++ compiler, for each token.",
            )


def _compiled_kernels(found: Facts) -> bool:
    """Builds them where that has not happened yet, as the first start would."""
    from worker.native.build import BuildError, CompilerFailed, built
    from worker.native.trusted import Unproved, prove

    try:
        prove(built())
    except CompilerFailed as error:
        said = str(error).partition("\n")[0]
        found.find("slow", f"the kernels for the CPU do not compile ({said}): decoding takes about half as long again.")
        return False
    except BuildError as error:
        found.find(
            "slow",
            f"the kernels for the CPU cannot be compiled ({error}): decoding takes about half as long again;"
            " install g++.",
        )
        return False
    except Unproved as error:
        found.find("slow", f"the kernels for the CPU are not used: {error}.")
        return False
    return True


def _devices(found: Facts) -> None:
    import torch

    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": properties.name,
                "memory_bytes": total,
                "free_memory_bytes": free,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
        if properties.major < 8:
            found.find("slow", f"{properties.name} has no bfloat16 units: the engine uses float16 or float32 there.")
        if free < total // 2:
            found.find("slow", f"other programs hold {(total - free) >> 20} of {total >> 20} MiB on {properties.name}.")
    found.facts["parallel"] = _parallel(len(devices))
    found.facts["cuda"] = torch.version.cuda
    found.facts["devices"] = devices
    if not devices:
        built = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        found.find("note", f"the engine runs on the CPU ({built}).")
        num_cores, quota = found.facts["num_physical_cores"], found.facts["cpu_quota"]
        if min(num_cores, quota or num_cores) < 2:
            found.find("slow", "there is one CPU core to compute on, and the gateway shares it with the engine.")


def _parallel(num_devices: int) -> dict[str, Any]:
    """What ranks of one model (engine.tensor_parallel, engine.pipeline_parallel) can speak through."""
    import torch.distributed as dist

    has_any = dist.is_available()
    return {
        "gloo": has_any and dist.is_gloo_available(),
        "nccl": has_any and dist.is_nccl_available(),
        "max_cuda_ranks": num_devices,
    }


def report(found: Facts) -> str:
    """The facts as lines for a terminal."""
    facts = found.facts
    fast_paths = facts.get("fast_paths", {})
    lines = [
        f"python       {facts['python']} on {facts['machine']}",
        f"torch        {facts['torch'] or 'not usable'}" + (f", CUDA {facts['cuda']}" if facts.get("cuda") else ""),
        f"cpu          {facts['cpu']}, {facts['num_physical_cores']} cores"
        + (f" on {facts['num_memory_nodes']} memory nodes" if facts["num_memory_nodes"] > 1 else "")
        + (f", {facts['cpu_quota']:g} CPUs by quota" if facts["cpu_quota"] is not None else ""),
        f"             {' '.join(facts['cpu_features']) or 'no vector extensions known'}",
        f"threads      {facts['num_threads']} for a worker on the CPU",
        f"memory       {_gib(facts['available_memory_bytes'])} free of {_gib(facts['memory_bytes'])}",
        f"cache        {_gib(facts['cache_bytes'])} in {facts['cache'] or 'no place'}",
    ]
    lines += [
        f"device {index}     {device['name']}, capability {device['capability']},"
        f" {_gib(device['free_memory_bytes'])} free of {_gib(device['memory_bytes'])}"
        for index, device in enumerate(facts.get("devices", []))
    ]
    parallel = facts.get("parallel")
    if parallel:
        on_cpu = "on" if parallel["gloo"] else "off (torch without gloo)"
        on_cuda = f"up to {parallel['max_cuda_ranks']}" if parallel["nccl"] else "off (torch without NCCL)"
        lines.append(f"ranks        on the CPU {on_cpu}, on CUDA {on_cuda}")
    if fast_paths:
        lines.append("fast paths   " + ", ".join(f"{name} {'on' if on else 'off'}" for name, on in fast_paths.items()))
    marks = {"fatal": "cannot run", "slow": "slow", "note": "note"}
    lines += [f"{marks[finding.severity]}: {finding.text}" for finding in found.findings]
    return "\n".join(lines)


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def main() -> int:
    """Prints; returns the exit code."""
    found = examine()
    if "--json" in sys.argv[1:]:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(report(found))
    return 0 if found.usable else 1


if __name__ == "__main__":
    sys.exit(main())
