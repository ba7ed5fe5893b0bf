"""What Ollama's clients are told of models."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.openai import decoded

API_VERSION = "0.12.0"
"""Of Ollama, whose API of that time is spoken here; clients look whether it is new enough."""


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """As far as it is known here."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class ModelTag(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: Details


class ModelList(msgspec.Struct, frozen=True):
    models: list[ModelTag]


class RunningModel(ModelTag, frozen=True, kw_only=True):
    """One that is loaded. It expires when the settings say, so its instant is far away."""

    expires_at: str = "2318-01-01T00:00:00Z"
    size_vram: int = 0
    context_length: int


class RunningList(msgspec.Struct, frozen=True):
    models: list[RunningModel]


class ShowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show; older clients say ``name``."""

    model: str | None = None
    name: str | None = None


class ShowBody(msgspec.Struct, frozen=True, kw_only=True):
    modified_at: str
    template: str
    modelfile: str = ""
    parameters: str = ""
    license: str = ""
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]


class VersionBody(msgspec.Struct, frozen=True):
    version: str = API_VERSION


_show = msgspec.json.Decoder(ShowRequest)


def parse_show(body: bytes) -> ShowRequest:
    """Raises Malformed."""
    return decoded(_show, body)
