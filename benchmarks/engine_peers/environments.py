"""Which peers are installed: in the interpreter that runs the race, and in environments that lie beside each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmarks.engine_peers.contenders import DRIVERS, NAMES, OURS, Contestant, parse

MODULES = {
    "vllm": ("vllm",),
    "openvino": ("openvino_genai", "optimum"),
    "llama": ("llama_cpp", "gguf"),
    "transformers": ("transformers", "torch"),
}
"""That a peer's driver imports: the peer itself, and what makes its files of a checkpoint."""
USUAL = {
    "vllm": ("vllm", "vllm:int8"),
    "openvino": ("openvino", "openvino:int8", "openvino:int4@1"),
    "llama": ("llama:q8_0", "llama:q4_0@1,8", "llama:bf16@1"),
    "transformers": ("transformers@1",),
}
"""Forms in which a peer that is found takes part, and at how many prompts at a time where more of them would take
minutes a round."""
AS_OURS = {"bf16": "bf16", "int8": "int8", "q8_0": "int8", "int4": "int4", "q4_0": "int4"}
"""Ours of as many bits."""
PATIENCE_S = 60.0


class Installed(msgspec.Struct, frozen=True):
    """A peer in one interpreter."""

    version: str
    missing: list[str]
    """Modules that it needs besides."""


class Unknown(Exception):
    """An interpreter does not say what it has; the message is why."""


def find(directory: Path | None) -> tuple[list[Contestant], list[str]]:
    """Whoever is found takes part, in this interpreter or else in the first of ``directory``/*/bin/python that has it;
    and a sentence for each that was found, or was not."""
    pythons = [sys.executable, *(map(str, sorted(directory.absolute().glob("*/bin/python"))) if directory else ())]
    contestants: list[Contestant] = []
    taken, lacking, said = set[str](), dict[str, str](), list[str]()
    for python in pythons:
        try:
            installed = _installed(python)
        except Unknown as error:
            said.append(f"{python} does not say what it has: {error}")
            continue
        for engine, each in installed.items():
            what = f"{NAMES.get(engine, engine)} {each.version} in {python}"
            if each.missing:
                lacking[engine] = f"{what} lacks {', '.join(each.missing)}"
            elif engine in taken:
                said.append(f"left out: {what}, found before")
            else:
                taken.add(engine)
                contestants += [parse(f"{usual}={python}") for usual in USUAL[engine]]
                said.append(f"found: {what}: {', '.join(USUAL[engine])}")
    absent = (engine for engine in MODULES if engine not in taken)
    said += [f"not found: {lacking.get(engine, NAMES.get(engine, engine))}" for engine in absent]
    return contestants, said


def forms_beside(peers: Iterable[Contestant]) -> list[str]:
    """Ours: bf16, and those that have as many bits as a peer's."""
    theirs = {AS_OURS[peer.form] for peer in peers if peer.engine != OURS}
    return [form for form in dict.fromkeys(AS_OURS.values()) if form == "bf16" or form in theirs]


def _installed(python: str) -> dict[str, Installed]:
    """By engine. Raises Unknown."""
    asked = [f"{engine}={','.join(modules)}" for engine, modules in MODULES.items()]
    command = [python, str(DRIVERS / "installed.py"), *asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            raise Unknown((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
        return msgspec.json.decode(done.stdout, type=dict[str, Installed])
    except OSError as error:
        raise Unknown(error.strerror or str(error)) from None
    except subprocess.TimeoutExpired:
        raise Unknown(f"no answer within {PATIENCE_S:g} s") from None
    except msgspec.DecodeError as error:
        raise Unknown(str(error)) from None
