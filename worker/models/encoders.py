"""Encoders (BERT and its kin): models that read a whole text both ways and write none. transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sources import is_gguf
from worker.models.errors import ModelError
from worker.models.foreign import Facts, mismatch, quietly, text_config
from worker.models.weights import read_json

_FROM_PADDING = {
    *("camembert", "data2vec-text", "ibert", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"),
    "xlm-roberta-xl",
}
"""Their positions begin behind that of the padding token, as in fairseq: the first so many are never used."""
TYPES = _FROM_PADDING | {
    *("albert", "bert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert", "gte"),
    *("jina_embeddings_v3", "megatron-bert", "mobilebert", "modernbert", "nomic_bert", "nystromformer", "rembert"),
    *("roformer", "squeezebert"),
}
"""Of model_type in config.json: those that take token ids and a mask, and give a hidden state for each token."""
_SEES_PADDING = {"convbert", "mobilebert", "nystromformer"}
"""What a token becomes depends on those beside it, by a convolution or by a window of embeddings, whether or not the
mask leaves them out: what stands behind a shorter text of a batch would change it."""
LEAST_FILLED = 0.5
"""Of a padded batch's places: texts of lengths that differ more are computed apart."""


def is_encoder(path: Path) -> bool:
    """Whether the model in this directory reads only."""
    if is_gguf(path):
        return False
    config = read_json(path / "config.json")
    kind, names = config.get("model_type"), config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return isinstance(kind, str) and kind in TYPES and not name.endswith(("ForCausalLM", "LMHeadModel"))


def refuse_encoder(path: Path) -> None:
    """Raises ModelError where it is one: it cannot be shared out."""
    if is_encoder(path):
        kind = read_json(path / "config.json")["model_type"]
        raise ModelError(
            f"{kind} is an encoder, and served on one rank: engine.tensor_parallel and engine.pipeline_parallel do not"
            " reach it"
        )


class Encoder:
    """Texts to hidden states, or to a score each."""

    def __init__(self, model: Any, facts: Facts, dtype: torch.dtype, device: torch.device, pad_id: int) -> None:
        """``model`` of transformers; with a head of one number, where it has a ``classifier`` of its own."""
        self.architecture, self.dtype, self.device = facts, dtype, device
        self.hidden_size = int(model.config.hidden_size)
        self.scores = bool(getattr(model.config, "num_labels", 0) == 1 and hasattr(model, "num_labels"))
        self._has_head = hasattr(model, "num_labels")
        self._model, self._pad_id = model, pad_id
        self._has_types = int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self._as_probability = not _leaves_scores(model.config)
        self._least_filled = 1.0 if model.config.model_type in _SEES_PADDING else LEAST_FILLED

    @torch.inference_mode()
    def hidden(self, texts: Sequence[Sequence[int]], seconds_at: Sequence[int]) -> list[Tensor]:
        """Of each text [num_tokens, hidden_size]. ``seconds_at``: where each one's second text begins, 0: it has
        none."""
        found: list[Tensor] = [torch.empty(0)] * len(texts)
        base = self._model.base_model if self._has_head else self._model
        for group in _alike([len(text) for text in texts], self._least_filled):
            states = base(**self._inputs([texts[i] for i in group], [seconds_at[i] for i in group])).last_hidden_state
            for row, index in enumerate(group):
                found[index] = states[row, : len(texts[index])]
        return found

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[int]], seconds_at: Sequence[int]) -> list[Tensor]:
        """Of each text [1, 1]: what the head says of it."""
        found: list[Tensor] = [torch.empty(0)] * len(texts)
        for group in _alike([len(text) for text in texts], self._least_filled):
            logits = self._model(**self._inputs([texts[i] for i in group], [seconds_at[i] for i in group])).logits
            logits = logits.float().sigmoid() if self._as_probability else logits.float()
            for row, index in enumerate(group):
                found[index] = logits[row : row + 1]
        return found

    def _inputs(self, texts: Sequence[Sequence[int]], seconds_at: Sequence[int]) -> dict[str, Tensor]:
        rows = [torch.tensor(text) for text in texts]
        inputs = {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=self._pad_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        }
        if self._has_types:
            types = [
                (torch.arange(len(row)) >= (at or len(row))).long() for row, at in zip(rows, seconds_at, strict=True)
            ]
            inputs["token_type_ids"] = pad_sequence(types, batch_first=True)
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}


def read_encoder(path: Path) -> Facts:
    """Raises ModelError."""
    config = _config(path)
    text = text_config(config, path)
    max_positions = int(getattr(text, "max_position_embeddings", 512))
    if text.model_type in _FROM_PADDING and text.pad_token_id is not None:
        max_positions -= int(text.pad_token_id) + 1
    said = path / "sentence_bert_config.json"
    if said.exists():
        length = read_json(said).get("max_seq_length")
        if length is not None and (type(length) is not int or length < 1):
            raise ModelError(f"{said} has an impossible max_seq_length: {str(length)[:80]}")
        max_positions = min(max_positions, length or max_positions)
    names = config.architectures
    name = (
        str(names[0]) if isinstance(names, list) and names else f"{type(config).__name__.removesuffix('Config')}Model"
    )
    return Facts(name, int(text.vocab_size), max_positions, (), str(config.dtype or "float32").removeprefix("torch."))


def load_encoder(path: Path, facts: Facts, dtype: torch.dtype, device: torch.device) -> Encoder:
    """Raises ModelError."""
    import transformers

    config = _config(path)
    scores = facts.name.endswith("ForSequenceClassification")
    kind = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel
    said: list[str] = []
    try:
        with quietly() as said:
            model, found = kind.from_pretrained(
                path, config=config, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except Exception as error:
        raise ModelError(f"this {facts.name} cannot be loaded: {mismatch(said, path) or _flat(error)}") from None
    # A pooler is a head for a task of pretraining; nobody here asks for it.
    missing = sorted(name for name in found["missing_keys"] if "pooler." not in name or scores)
    if missing:
        raise ModelError(f"the checkpoint of this {facts.name} has no tensor {missing[0]}")
    if found["mismatched_keys"]:
        raise ModelError(f"a tensor of this {facts.name} has another shape: {found['mismatched_keys'][0]}")
    encoder = Encoder(model.to(device).eval(), facts, dtype, device, int(config.pad_token_id or 0))
    try:
        with torch.inference_mode():
            tried = encoder.hidden([[1, 2, 3], [1, 2]], [0, 0])
    except Exception as error:
        raise ModelError(f"this {facts.name} cannot be served: it does not compute ({_flat(error)})") from None
    if [each.shape for each in tried] != [(3, encoder.hidden_size), (2, encoder.hidden_size)]:
        raise ModelError(f"this {facts.name} gives no hidden state for each token")
    return encoder


def _config(path: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError(
            f"{path} is an encoder, which is served by way of transformers, which is not installed here:"
            " pip install 'penstock[families]'"
        ) from None
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"transformers cannot read {path / 'config.json'}: {_flat(error)}") from None


def _leaves_scores(config: Any) -> bool:
    """The files of a cross-encoder say that its score is the head's number as it stands."""
    table = getattr(config, "sentence_transformers", None)
    said = table.get("activation_fn") if isinstance(table, dict) else None
    return str(said or getattr(config, "sbert_ce_default_activation_function", "")).endswith("Identity")


def _alike(lengths: Sequence[int], least_filled: float) -> list[list[int]]:
    """The places of texts whose batch, padded to the longest, is filled so well; each place once."""
    groups: list[list[int]] = []
    longest = num_tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        filled = (num_tokens + lengths[index]) / (longest * (len(groups[-1]) + 1)) if groups else -math.inf
        if filled < least_filled or (groups and lengths[index] < least_filled * longest):
            groups.append([])
            longest, num_tokens = lengths[index], 0
        groups[-1].append(index)
        num_tokens += lengths[index]
    return groups


def _flat(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
