"""From a directory to a Foreign: transformers' own loader, which renames and joins tensors as each family needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sources import is_gguf
from worker.models.errors import ModelError
from worker.models.facts import token_ids
from worker.models.families import FAMILIES, computes
from worker.models.fields import MAX_LAYERS
from worker.models.foreign.check import NUM_TRIED, check, expected_of, unlike_generate
from worker.models.foreign.interface import register
from worker.models.foreign.manners import InTurn, Together
from worker.models.foreign.model import Facts, Foreign
from worker.models.importers import method_of
from worker.models.weights import read_json

STATES = re.compile(r"Mamba|Rwkv|LSTM|LinearAttention|ShortConv|DeltaNet|Lightning|Recurrent|SSM")
"""Classes of modules that carry something besides keys and values from one token to the next."""
_MISMATCH = re.compile(r"(\S+)\s*\|[^|]*MISMATCH.*ckpt: torch.Size\(\[(.*?)\]\) vs model: *torch.Size\(\[(.*?)\]\)")
LENGTH_BOUND = ("dynamic", "longrope")
"""Ropes whose angles depend on the length of the batch; within the context of pretraining they do not."""
POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length")
UNSAID_POSITIONS = 2048
"""For families that know no bound, such as those with ALiBi."""

log = logging.getLogger("penstock.worker")


def is_native(path: Path) -> bool:
    """Whether our own decoder computes it, or says what is wrong with it."""
    if is_gguf(path):
        return True
    config = read_json(path / "config.json")
    names = config.get("architectures")
    return not (isinstance(names, list) and names and isinstance(names[0], str)) or computes(config, names[0])


def refuse_foreign(path: Path) -> None:
    """Raises ModelError where it is one: it cannot be shared out."""
    if not is_native(path):
        raise ModelError(
            f"{read_facts(path).name} is served by way of transformers, on one rank: engine.tensor_parallel and"
            " engine.pipeline_parallel do not reach it"
        )


def read_facts(path: Path) -> Facts:
    """Raises ModelError where no causal language model of transformers is of this name."""
    raw = read_json(path / "config.json")
    name, config = raw["architectures"][0], _config(path, raw)
    text = text_config(config, path)
    place, generation = path / "config.json", path / "generation_config.json"
    eos = token_ids(raw.get("eos_token_id"), place) or token_ids(getattr(text, "eos_token_id", None), place)
    if generation.exists():
        eos = token_ids(read_json(generation).get("eos_token_id"), generation) or eos
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    vocab_size = int(text.vocab_size)
    eos = tuple(token_id for token_id in eos if 0 <= token_id < vocab_size)  # -1 is some families' word for none
    return Facts(name, vocab_size, _max_positions(text), eos, str(dtype).removeprefix("torch."))


def text_config(config: Any, path: Path) -> Any:
    """The part of transformers' configuration that is of a model for text. Raises ModelError where its layers are more
    than anyone's: each is made before a tensor is looked for.
    """
    text = config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", 0)
    if not isinstance(num_layers, int) or num_layers > MAX_LAYERS:
        raise ModelError(f"{path / 'config.json'} has an impossible number of layers: {str(num_layers)[:80]}")
    return text


@contextmanager
def quietly() -> Iterator[list[str]]:
    """Without transformers' bars, and its tables of what tensors lack: what it would have written is in the list, also
    where it was told to write less (TRANSFORMERS_VERBOSITY)."""
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()  # type: ignore[no-untyped-call]
    listener, verbosity = _Listener(), of_transformers.get_verbosity()
    of_transformers.set_verbosity(min(verbosity, logging.WARNING))
    of_transformers.disable_default_handler()
    of_transformers.add_handler(listener)
    try:
        yield listener.lines
    finally:
        of_transformers.remove_handler(listener)
        of_transformers.enable_default_handler()
        of_transformers.set_verbosity(verbosity)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def mismatch(lines: Sequence[str], path: Path) -> str:
    """Of what transformers wrote before it gave up, the tensor of another shape; empty where it wrote of none."""
    found = next(filter(None, map(_MISMATCH.search, lines)), None)
    return f"tensor {found[1]} of {path} is {found[2]}, not {found[3]}" if found else ""


def load_foreign(path: Path, facts: Facts, dtype: torch.dtype, device: torch.device, max_model_tokens: int) -> Foreign:
    """Raises ModelError."""
    import transformers

    config = _config(path, read_json(path / "config.json"))
    register()
    kind = getattr(transformers, facts.name)
    said: list[str] = []
    try:
        with quietly() as said:
            model, found = kind.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        reason = f"transformers cannot load this {facts.name}: {mismatch(said, path) or _flat(error)}"
        raise ModelError(_of_quantised(path, facts.name) or reason) from None
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(key) for key in found.get(what) or ())
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            reason = f"{path} has {what.replace('_', ' ')}: {names[0]}{more}"
            raise ModelError(_of_quantised(path, facts.name) or reason)
    model = model.eval().to(device)
    _refuse_state(model, facts.name)
    try:
        with torch.inference_mode():
            expected = expected_of(model, facts.vocab_size, max_model_tokens)
            unlike = unlike_generate(model, expected)
    except ModelError as error:
        raise ModelError(f"this {facts.name} cannot be served: {error}") from None
    except Exception as error:
        raise ModelError(f"this {facts.name} cannot be served: it does not compute ({_flat(error)})") from None
    reasons: list[str] = []
    for manner in (Together(has_past=True), Together(has_past=False), InTurn()):
        try:
            model.set_attn_implementation(manner.attention)
            with torch.inference_mode():
                kinds = manner.survey(model, NUM_TRIED, max_model_tokens)
            foreign = Foreign(model, facts, dtype, device, manner, kinds)
            check(foreign, expected)
            if unlike:
                raise ModelError(unlike)
        except ModelError as error:
            reasons.append(str(error))
            continue
        except Exception as error:
            log.debug("%s failed", type(manner).__name__, exc_info=error)
            continue
        how = "sequence after sequence" if foreign.attends_itself else "on our attention"
        log.info("%s is computed by transformers' own model, %s", facts.name, how)
        return foreign
    because = "; ".join(dict.fromkeys(reasons)) or "it computes neither all sequences at once nor each by itself"
    raise ModelError(f"this {facts.name} cannot be served: {because}")


def _of_quantised(path: Path, name: str) -> str:
    """Why transformers does not load it, where that is how it is quantised; empty: it is not."""
    method = method_of(path)
    return method and (
        f"this {name} is quantised by {method}, which transformers, by which this family is computed, does not load;"
        " take its checkpoint in floats, or one in compressed-tensors or in FP8 by blocks"
    )


def _config(path: Path, raw: dict[str, Any]) -> Any:
    name = raw["architectures"][0]
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(
            f"the architecture {name} is not among {supported}; others are served by way of transformers,"
            " which is not installed here: pip install 'penstock[families]'"
        ) from None
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or not hasattr(transformers, name):
        raise ModelError(
            f"the architecture {name} is not supported: transformers {transformers.__version__} knows no causal"
            " language model of that name"
        )
    types = [kind for kind, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if model == name]
    if raw.get("model_type") not in types:
        raise ModelError(f"config.json says model_type {raw.get('model_type')}, but a {name} is {' or '.join(types)}")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"transformers cannot read {path / 'config.json'}: {_flat(error)}") from None
    if config.is_encoder_decoder:
        raise ModelError(f"this {name} has an encoder, which is not served")
    return config


def _max_positions(text: Any) -> int:
    said = [getattr(text, name, None) for name in POSITIONS]
    max_positions = next((each for each in said if isinstance(each, int) and each > 0), UNSAID_POSITIONS)
    ropes = getattr(text, "rope_parameters", None) or {}
    tables = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    for rope in tables:
        if rope.get("rope_type") in LENGTH_BOUND:
            original = rope.get("original_max_position_embeddings") or max_positions
            max_positions = min(max_positions, int(original))
    return max_positions


def _refuse_state(model: nn.Module, name: str) -> None:
    for place, module in model.named_modules():
        found = STATES.search(type(module).__name__)
        if found and type(module).__name__ != name:
            raise ModelError(
                f"this {name} cannot be served: its {type(module).__name__} ({place}) carries a state from token to"
                " token that is neither keys nor values"
            )


def _flat(error: BaseException) -> str:
    """The first line of an error, for one sentence."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
