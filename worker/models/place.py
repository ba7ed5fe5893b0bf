"""Where a model is: what the operator calls it, to a path."""

from __future__ import annotations

from pathlib import Path

from policies.gguf import SUFFIX
from worker.models.errors import ModelError

FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def path_of(source: str) -> Path:
    """A GGUF file, or a directory in Hugging Face layout: as it stands, the bundled model for "demo", a hub id's
    snapshot, main or as in "OWNER/NAME@REVISION". Raises ModelError.
    """
    if source == "demo":
        import demo

        return Path(demo.MODEL_DIR)
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if is_gguf(path):
        return path
    if path.exists():
        raise ModelError(f"{source} is a file; a model is a directory in Hugging Face layout, or a GGUF file")
    if source.startswith((".", "/", "~")) or source.partition("@")[0].count("/") != 1:
        raise ModelError(f"there is no directory {source}, and it is no hub id (OWNER/NAME) either")
    return _snapshot(source)


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def _in_directory(path: Path) -> Path:
    """The directory itself, or the one GGUF file that it holds."""
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise ModelError(f"{path} holds {len(files)} GGUF files; name one of them, such as {files[0].name}")
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
            huggingface_hub.snapshot_download(hub_id, revision=revision or None, allow_patterns=FILES)
        )
    except RevisionNotFoundError:
        raise ModelError(f"the hub's model {hub_id} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise ModelError(f"the hub has no model {hub_id} that is open to this machine") from None
    except HFValidationError:
        raise ModelError(f"there is no directory {hub_id}, and it is no hub id (OWNER/NAME) either") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"there is no directory {hub_id}, and the hub cannot be reached to download it: {reason}"
        ) from None


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
        raise ModelError(f"{len(files)} GGUF files of {hub_id} were pulled ({names}); name one by its path")
    return files[0] if files else None
