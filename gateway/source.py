"""Where a model's text lies: its tokenizer and chat template. The weights are the worker's to find."""

from __future__ import annotations

from pathlib import Path

import demo
from policies.gguf import SUFFIX

TEXT_FILES = ["*.json", "*.jinja", "tokenizer.model"]


class SourceError(ValueError):
    """There is no such model; the message is one sentence for the operator."""


def place_of(source: str) -> Path:
    """A GGUF file, or a directory: as it stands, the bundled model for "demo", a hub id's snapshot, main or as in
    "OWNER/NAME@REVISION". May wait for a download. Raises SourceError.
    """
    if source == "demo":
        return demo.MODEL_DIR
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if path.suffix == SUFFIX and path.is_file():
        return path
    if path.exists():
        raise SourceError(f"{source} is a file; a model is a directory in Hugging Face layout, or a GGUF file")
    if source.startswith((".", "/", "~")) or source.partition("@")[0].count("/") != 1:
        raise SourceError(f"there is no directory {source}, and it is no hub id (OWNER/NAME) either")
    return _snapshot(source)


def _in_directory(path: Path) -> Path:
    """The directory itself, or the one GGUF file that it holds."""
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise SourceError(f"{path} holds {len(files)} GGUF files; name one of them, such as {files[0].name}")
    return files[0] if files else path


def _snapshot(source: str) -> Path:
    hub_id, _, revision = source.partition("@")
    # Slow to import, and not needed for a directory.
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        pulled = _pulled_gguf(hub_id, revision)
        return pulled or Path(
            huggingface_hub.snapshot_download(hub_id, revision=revision or None, allow_patterns=TEXT_FILES)
        )
    except RevisionNotFoundError:
        raise SourceError(f"the hub's model {hub_id} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise SourceError(f"the hub has no model {hub_id} that is open to this machine") from None
    except HFValidationError:
        raise SourceError(f"there is no directory {hub_id}, and it is no hub id (OWNER/NAME) either") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SourceError(f"there is no directory {hub_id}, and the hub cannot be reached: {reason}") from None


def _pulled_gguf(hub_id: str, revision: str) -> Path | None:
    """The GGUF file of this repository that ``penstock pull`` has put into the cache; nobody else puts one there."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub_id, repo_type="model")
    try:
        commit = (folder / "refs" / (revision or constants.DEFAULT_REVISION)).read_text().strip()
    except OSError:
        return None
    files = sorted((folder / "snapshots" / commit).glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SourceError(f"{len(files)} GGUF files of {hub_id} were pulled ({names}); name one by its path")
    return files[0] if files else None
