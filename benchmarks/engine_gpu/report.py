"""What was measured, kept as it comes."""

from __future__ import annotations

from pathlib import Path

import msgspec

TENSORRT_LLM_TOKENS_PER_S = {(128, 128): 27_911, (1000, 1000): 17_744}
"""Published by its authors for one H200 and Llama-3.1-8B in FP8 (its performance overview), in tokens in and out."""


class OfExperts(msgspec.Struct):
    """One layer's experts, some tokens at once."""

    call_us: float
    """As a worker computes them."""
    apart_us: float
    """One after another, the host waiting to be told which."""
    dense_us: float
    """Two products of as many rows with one matrix each, by torch."""
    num_bytes: int
    """Of the matrices of those that were chosen."""


class OfMixed(msgspec.Struct):
    """A step of decodes and a chunk of a prompt."""

    launched_ms: float
    """Launch by launch."""
    graph_ms: float | None
    """None: there is none for such a step here."""
    recorded_ms: float | None
    """The step in which that is recorded."""


class Report(msgspec.Struct):
    """What was measured; None: not measured."""

    date: str
    commit: str
    device: str
    torch: str
    shape: str
    quantize: str
    weight_bytes: int
    copy_gb_per_s: float = 0.0
    single_decode_tokens_per_s: float | None = None
    loop_decode_tokens_per_s: float | None = None
    few_rows_s: dict[str, dict[str, float]] = {}
    """A step's, by its rows and the way that it is computed in."""
    ours_tokens_per_s: dict[str, float] = {}
    """By "tokens in/tokens out"."""
    transformers_tokens_per_s: dict[str, float] = {}
    transformers: str = ""
    reckoned: list[str] = []
    """Of these, those that were not run to the end."""
    attention_kernel: str = ""
    attention_decode_gb_per_s: float | None = None
    attention_prefill_ms: float | None = None
    """As a worker computes it."""
    kernel_prefill_ms: dict[str, float] = {}
    """Our own kernel, by tokens."""
    flash_prefill_ms: dict[str, float] = {}
    busy_share: float | None = None
    mixed_steps: dict[str, OfMixed] = {}
    """By what they consist of."""
    experts: dict[str, OfExperts] = {}
    """By tokens."""
    forms_decode_tokens_per_s: dict[str, float] = {}
    """One sequence, by the form of the weights."""
    failures: dict[str, str] = {}
    doing: str = ""
    """The part that is being measured."""
    done: list[str] = []

    def lines(self) -> list[str]:
        """What the figures mean, a sentence each."""
        said = [f"copy: {self.copy_gb_per_s:,.0f} GB/s read and written"]
        if rate := self.single_decode_tokens_per_s:
            share = rate * self.weight_bytes / (self.copy_gb_per_s * 1e9)
            said.append(f"decode alone: {rate:,.1f} tokens/s, {share:.2f} of copying the weights' bytes")
            if self.loop_decode_tokens_per_s:
                ratio = rate / self.loop_decode_tokens_per_s
                said.append(f"compiled loop: {self.loop_decode_tokens_per_s:,.1f} tokens/s; ours is {ratio:.2f} of it")
        for rows, tried in self.few_rows_s.items():
            copy_s = self.weight_bytes / (self.copy_gb_per_s * 1e9)
            ways = "; ".join(f"{way} {1e3 * took_s:.2f} ms, {copy_s / took_s:.2f}" for way, took_s in tried.items())
            said.append(f"a step of {rows}, of copying the weights' bytes: {ways}")
        for name, rate in self.ours_tokens_per_s.items():
            said.append(f"{name}: {rate:,.0f} tokens/s")
            if theirs := self.transformers_tokens_per_s.get(name):
                how = " at most, reckoned from its first steps" if name in self.reckoned else ""
                said.append(
                    f"{name}: transformers {self.transformers} {theirs:,.0f}{how}; ours is {rate / theirs:.2f} of it"
                )
            sizes = tuple(int(part) for part in name.split("/"))
            if (
                "H200" in self.device
                and self.shape == "8b"
                and (anchor := TENSORRT_LLM_TOKENS_PER_S.get((sizes[0], sizes[1])))
            ):
                said.append(f"{name}: {rate / anchor:.2f} of TensorRT-LLM's published {anchor:,} in FP8")
        if self.attention_decode_gb_per_s:
            share = self.attention_decode_gb_per_s / self.copy_gb_per_s
            said.append(f"attention of decode, {self.attention_kernel}: {share:.2f} of the copy's bandwidth")
        if self.attention_prefill_ms and self.flash_prefill_ms:
            ratio = max(self.flash_prefill_ms.values()) / self.attention_prefill_ms
            said.append(
                f"attention of a prompt: {self.attention_prefill_ms:.2f} ms, {ratio:.2f} of torch's flash speed"
            )
        for tokens, took_ms in self.kernel_prefill_ms.items():
            share = self.flash_prefill_ms[tokens] / took_ms
            said.append(
                f"our kernel, a prompt of {tokens} tokens: {took_ms:.2f} ms, {share:.2f} of torch's flash speed"
            )
        if self.busy_share is not None:
            said.append(f"GPU busy in steady decode: {self.busy_share:.1%}")
        for name, step in self.mixed_steps.items():
            said.append(f"a step of {name}: {step.launched_ms:.2f} ms")
            if step.graph_ms and step.recorded_ms:
                said[-1] += (
                    f", as a graph {step.graph_ms:.2f}, {step.launched_ms / step.graph_ms:.2f} times as fast;"
                    f" recorded in {step.recorded_ms:.0f} ms"
                )
        for tokens, each in self.experts.items():
            share = each.num_bytes / each.call_us / 1e3 / self.copy_gb_per_s
            said.append(
                f"experts of a layer, {tokens} tokens: {each.call_us:,.0f} us, {share:.2f} of copying their bytes,"
                f" {each.dense_us / each.call_us:.2f} of a dense product's speed,"
                f" {each.apart_us / each.call_us:.1f} times that of one after another"
            )
        for form, rate in self.forms_decode_tokens_per_s.items():
            said.append(f"decode alone, weights in {form}: {rate:,.1f} tokens/s")
        return said + [f"not measured: {part}: {reason}" for part, reason in self.failures.items()]

    @property
    def head(self) -> str:
        """What it was measured on."""
        return f"{self.date}, {self.commit}, {self.device}, torch {self.torch}, {self.shape}, quantize {self.quantize}"

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    def note(self, path: Path) -> None:
        """At the end of these notes, in place of what it said there before."""
        before, _, _ = (path.read_text() if path.exists() else "").partition(f"\n## {self.head}\n")
        path.write_text(before + "\n".join(["", f"## {self.head}", "", *(f"- {line}" for line in self.lines()), ""]))


def read(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)
