"""A GGUF's tensors by the names that the decoder asks for, in the stored forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from policies.gguf import TensorPlace, shown
from worker.models.architecture import Architecture
from worker.models.errors import ModelError
from worker.models.fitting import dense_of, together
from worker.models.forms import Form, Int8, Plain, alone
from worker.models.gguf.blocks import FLOATS, KINDS, OTHERS, form_of, values_of
from worker.models.gguf.config import PERMUTED
from worker.models.gguf.file import GgufFile
from worker.models.shard import Part
from worker.models.sources import FileSource

_OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OF_QKV = re.compile(r"(blk\.\d+)\.attn_([qkv])\.(weight|bias)")
_WHOLE = {"self_attn.sinks": "attn_sinks.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
"""Those whose names end otherwise in the file."""
_OF_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_OF_EXPERTS = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_OF_EXPERTS |= {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
_GATES_AND_UPS, _UPS = "ffn_gate_up_exps.weight", (".up_proj.weight", ".w3.weight")
"""Where a file has what opens and what is opened in one tensor, and of these the second."""
_OF_STACK = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\w+_proj)(_bias)?")
_OF_STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
"""Of all experts in one tensor: those whose rows it has in turns."""
_NOT_NEEDED = re.compile(r"(blk\.\d+\.)?(rope_freqs|rope_factors_long|rope_factors_short|attn_rot_embd)\.weight")
"""They are in the architecture, or follow from it."""


class GgufSource(FileSource):
    """See FileSource. A tensor may be asked for more than once."""

    def __init__(self, file: GgufFile, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._file, self._architecture = file, architecture
        self._dtype, self.device = dtype, device
        self._taken: set[str] = set()
        self.rounded = set()
        name = file.header.text("general.architecture")
        self._is_post_named = name in ("gpt-oss", "seed_oss")
        # Those that see have theirs apart.
        self._is_permuted = name in PERMUTED and f"{name}.rope.dimension_sections" not in file.header.metadata
        self._has_gates_in_ups = name in ("chatglm", "glm4")

    def tensor(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source."""
        dtype = dtype or self._dtype
        names = self._names_of_stack(name)
        if names:
            whole = self._biases(names, shape).to(self.device, dtype)
            return whole if part is None else part.of(whole)
        kind, raw = self._raw(name, shape)
        if len(shape) == 1:
            whole = values_of(kind, raw)[0].to(self.device, dtype)
            return whole if part is None else part.of(whole)
        raw = raw if part is None else Part(part.rows).of(raw)
        assert part is None or part.columns is None
        weight = dense_of((len(raw), shape[1]), lambda start, stop: values_of(kind, raw[start:stop]), dtype)
        return weight.to(self.device)

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:
        """See Source."""
        if name.endswith(".kv_b_proj"):
            return self._of_latent(f"{name}.weight", shape, part)
        kind, raw = self._raw(f"{name}.weight", shape)
        if kind in OTHERS:
            self.rounded.add(name)
        raw = raw if part is None else Part(part.rows).of(raw)
        form = form_of(kind, raw, (len(raw), shape[1]), self._dtype)
        if part is not None and part.columns is not None:
            form = alone(form.columns(part.columns.start, part.columns.stop))
        return form.to(self.device)

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Form:
        """See Source."""
        return self.matrix(name, shape, part)

    def experts(
        self, name: str, shape: tuple[int, int, int], outputs: Tensor, part: Part | None = None
    ) -> Iterator[Form]:
        """See Source. One expert is unpacked at a time; of ``outputs`` the gates are first."""
        num_experts, num_inputs, num_outputs = shape
        names = self._names_of_stack(name)
        places = {own: self._place(own, (num_experts, num_outputs // len(names), num_inputs)) for own in names}
        columns = None if part is None else part.columns
        rows = outputs
        if part is not None and columns is not None and part.dim == 2:
            rows, columns = outputs + columns.start, None
        for expert in range(num_experts):
            forms = {}
            for turn, (own, place) in enumerate(places.items()):
                whole = self._file.raw(place)[expert].view(place.shape[1], -1)
                raw = whole[rows[rows % len(names) == turn] // len(names)]
                form = form_of(place.kind.name, raw, (len(raw), num_inputs), self._dtype)
                forms[own] = form if columns is None else alone(form.columns(columns.start, columns.stop))
            one = together(forms, self._dtype, self.eight)
            if isinstance(one, Int8):
                self.rounded.add(f"{name}.{expert}")
            yield one.to(self.device)

    def skip(self, name: str, shape: tuple[int, ...]) -> None:
        """See FileSource."""
        names = self._names_of_stack(name) or [self._held_in(self._named(f"{name}.weight")[0], shape[0])[0]]
        self._taken.update(names)

    def finish(self, misses: Callable[[str], bool]) -> None:
        """Raises ModelError where tensors are left that no part of the decoder wanted; ``misses``: whether a name in
        the decoder's words is another rank's."""
        left = sorted(
            name
            for name in self._file.header.tensors
            if name not in self._taken and not _NOT_NEEDED.fullmatch(name) and not misses(_decoders_name(name))
        )
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"{self._file.path} holds tensor {shown(left[0])}{more}, which this architecture does not use"
            )

    def _raw(self, name: str, shape: tuple[int, ...]) -> tuple[str, Tensor]:
        """The kind of its blocks, and [rows, bytes of a row] uint8."""
        own, expert = self._named(name)
        mixture = self._architecture.mixture
        times = 2 if own.endswith(_GATES_AND_UPS) else 1
        in_file = shape if expert is None or mixture is None else (mixture.num_experts, times * shape[0], *shape[1:])
        own, first, num_rows = self._held_in(own, in_file[0])
        place = self._place(own, (num_rows, *in_file[1:]))
        raw = self._file.raw(place)
        if num_rows != in_file[0]:
            rows = raw.view(num_rows, -1)[first : first + shape[0]]
            raw = rows if len(shape) > 1 else rows.reshape(1, -1)
        if expert is not None:
            gates_first = raw[expert].view(times * shape[0], -1)
            raw = gates_first[-shape[0] :] if name.endswith(_UPS) else gates_first[: shape[0]]
        if self._is_permuted and re.search(r"\.self_attn\.[qk]_proj\.", name):
            raw = self._unpermuted(raw if len(shape) > 1 else raw.view(shape[0], -1)).reshape(raw.shape)
        return place.kind.name, raw

    def _held_in(self, own: str, num_rows: int) -> tuple[str, int, int]:
        """The tensor that these rows are in, which of its rows is their first, and how many it has: files may have
        queries, keys and values in one, and some have gates in one with what they open."""
        if own in self._file.header.tensors:
            if self._has_gates_in_ups and ".ffn_up." in own:
                return own, num_rows, 2 * num_rows
            return own, 0, num_rows
        if self._has_gates_in_ups and ".ffn_gate." in own:
            return own.replace(".ffn_gate.", ".ffn_up."), 0, 2 * num_rows
        found = _OF_QKV.fullmatch(own)
        together = f"{found[1]}.attn_qkv.{found[3]}" if found else ""
        if found is None or together not in self._file.header.tensors:
            return own, 0, num_rows
        architecture = self._architecture
        queries, keys = (heads * architecture.head_dim for heads in (architecture.num_heads, architecture.num_kv_heads))
        return together, {"q": 0, "k": queries, "v": queries + keys}[found[2]], queries + 2 * keys

    def _place(self, own: str, shape: tuple[int, ...]) -> TensorPlace:
        """Of a tensor by its name in the file, which is taken. Raises ModelError."""
        place = self._file.header.tensors.get(own)
        if place is None:
            raise ModelError(f"{self._file.path} has no tensor {own}")
        kinds = KINDS if len(shape) > 1 else FLOATS
        if place.kind.name not in kinds:
            raise ModelError(
                f"tensor {own} of {self._file.path} is stored as {place.kind.name}, which is not supported;"
                f" supported are {', '.join(kinds)}"
            )
        if place.shape != shape:
            there, wanted = ("x".join(map(str, sizes)) for sizes in (place.shape, shape))
            raise ModelError(f"tensor {own} of {self._file.path} is {there}, not {wanted}")
        self._taken.add(own)
        return place

    def _of_latent(self, name: str, shape: tuple[int, int], part: Part | None) -> Plain:
        """What makes keys and values of all heads, which is folded into others as floats: one matrix, or in files since
        April 2025 one of keys, turned, and one of values."""
        latent, own = self._architecture.latent, self._named(name)[0]
        assert latent is not None
        if own in self._file.header.tensors:
            return Plain(self.tensor(name, shape, part))
        num_heads = shape[0] // (latent.key_dim + latent.value_dim)
        keys = self._dense(own.replace("kv_b", "k_b"), (num_heads, latent.rank, latent.key_dim))
        values = self._dense(own.replace("kv_b", "v_b"), (num_heads, latent.value_dim, latent.rank))
        whole = torch.cat((keys.mT, values), 1).view(shape)
        return Plain((whole if part is None else part.of(whole)).to(self.device))

    def _dense(self, own: str, shape: tuple[int, int, int]) -> Tensor:
        """By its name in the file."""
        place = self._place(own, shape)
        raw = self._file.raw(place).view(shape[0] * shape[1], -1)
        rows = dense_of(
            (len(raw), shape[2]), lambda start, stop: values_of(place.kind.name, raw[start:stop]), self._dtype
        )
        return rows.view(shape)

    def _biases(self, names: list[str], shape: tuple[int, ...]) -> Tensor:
        """Of all experts, ``shape`` [num_experts, out] f32."""
        places = [self._place(own, (shape[0], shape[1] // len(names))) for own in names]
        each = [values_of(place.kind.name, self._file.raw(place)) for place in places]
        return torch.stack(each, 2).flatten(1)

    def _unpermuted(self, raw: Tensor) -> Tensor:
        """Rows of queries or keys [heads * head_dim, …], where the two that turn together stand side by side in the
        file and half a head apart in the decoder."""
        by_head = raw.reshape(-1, self._architecture.head_dim, raw.shape[1])
        turning, others = by_head.tensor_split([self._architecture.ropes[0].rotary_dim], 1)
        return torch.cat((turning[:, 0::2], turning[:, 1::2], others), 1).reshape(raw.shape)

    def _named(self, name: str) -> tuple[str, int | None]:
        """What the file calls it, and which expert's part of that it is, if one's."""
        module, _, ending = name.rpartition(".")
        if module in _OUTER:
            return f"{_OUTER[module]}.{ending}", None
        _, index, inner = name.split(".", 2)
        if inner in _WHOLE:
            return f"blk.{index}.{_WHOLE[inner]}", None
        inner = inner.removesuffix(f".{ending}")
        if (found := _OF_EXPERT.fullmatch(inner)) is not None:
            return self._named_of_expert(index, int(found[1]), _OF_EXPERTS[found[2]], ending)
        if inner == "post_attention_layernorm":
            # Where the MLP has a norm of its own before it, this one follows attention; in two others it is called so.
            follows = self._architecture.attention_post_norm == inner or self._is_post_named
            return f"blk.{index}.{'post_attention_norm' if follows else 'ffn_norm'}.{ending}", None
        return f"blk.{index}.{_INNER[inner]}.{ending}", None

    def _names_of_stack(self, name: str) -> list[str]:
        """What the file calls that of which one of all experts' tensors is made; nothing where it is no such."""
        found = _OF_STACK.fullmatch(name)
        if found is None:
            return []
        index, last, bias = found.groups()
        return [f"blk.{index}.{own}.{'bias' if bias else 'weight'}" for own in _OF_STACKS[last]]

    def _named_of_expert(self, index: str, expert: int, name: str, ending: str) -> tuple[str, int | None]:
        """In files of before April 2024 each has tensors of its own."""
        alone = f"blk.{index}.{name}.{expert}.{ending}"
        if alone in self._file.header.tensors:
            return alone, None
        both = f"blk.{index}.{_GATES_AND_UPS}"
        if name != "ffn_down" and both in self._file.header.tensors:
            return both, expert
        return f"blk.{index}.{name}_exps.{ending}", expert


def _decoders_name(name: str) -> str:
    """By which a shard knows whose it is."""
    if name.startswith("blk."):
        return f"layers.{name.removeprefix('blk.')}"
    return next((f"{outer}.weight" for outer, own in _OUTER.items() if name == f"{own}.weight"), name)
