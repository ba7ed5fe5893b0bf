"""Where a model's files are: what the operator calls it, to a path. A gateway looks for the text, a worker for all."""

from __future__ import annotations

import stat
from pathlib import Path

import demo
from policies.gguf import MAGIC, SUFFIX
from policies.model_source import HubModel, SourceError, gguf_in, hub_model, pulled_gguf, refusal, refuse_later_part

TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model")
WEIGHTS = "*.safetensors"


def place_of(source: str, *more: str) -> Path:
    """A GGUF file, or the first part of one, or a directory in Hugging Face layout: as it stands, the bundled model for
    "demo", a hub id's snapshot, main or as in "OWNER/NAME@REVISION". ``more``: patterns of files that are fetched
    beside those of its text. May wait for a download. Raises SourceError.
    """
    if source == "demo":
        return demo.MODEL_DIR
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return path / (gguf_in(str(path), (file.name for file in path.iterdir())) or "")
        refuse_later_part(source)
        is_file, is_there = is_gguf(path), path.exists()
    except PermissionError as error:
        raise SourceError(f"{source} cannot be read by the user that this runs as: {error.strerror}") from None
    except (OSError, RuntimeError) as error:  # the latter where "~NAME" is nobody's
        raise SourceError(f"{source[:200]} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return path if is_file else _snapshot(hub_model(source, is_there), [*TEXT_FILES, *more])


def is_gguf(path: Path) -> bool:
    """By its name, or where it has another one, as in Ollama's directories, by what it begins with."""
    return path.is_file() and (path.suffix == SUFFIX or _begins_as_gguf(path))


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def content(path: Path) -> bytes:
    """Of a file. Raises OSError, as ``refuse_pipe``."""
    refuse_pipe(path)
    return path.read_bytes()


def refuse_pipe(path: Path) -> None:
    """Raises OSError, also of a pipe or a device, whose reader could wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")


def _snapshot(model: HubModel, patterns: list[str]) -> Path:
    # Slow to import, and not needed for a directory.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        revision = model.revision or None
        return _pulled(model) or Path(
            huggingface_hub.snapshot_download(model.hub_id, revision=revision, allow_patterns=patterns)
        )
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise refusal(model, error) from None


def _pulled(model: HubModel) -> Path | None:
    """The GGUF file of this repository in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.hub_id, repo_type="model")
    try:
        commit = (folder / "refs" / (model.revision or constants.DEFAULT_REVISION)).read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    name = pulled_gguf(model, (file.relative_to(snapshot).as_posix() for file in snapshot.rglob(f"*{SUFFIX}")))
    return snapshot / name if name else None
