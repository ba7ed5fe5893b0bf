"""What the operator calls a model: which of what lies there is meant, and what is said where there is none.

Looking and downloading are for whoever calls (``sources``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import NamedTuple

from policies.gguf import SUFFIX, part_name

_PROJECTOR = re.compile(r"(^|[-._])mmproj[-._]", re.IGNORECASE)
"""In a file's name, as llama.cpp's converter gives it."""


class SourceError(ValueError):
    """There is no such model; the message is one sentence for the operator."""


class HubModel(NamedTuple):
    """A model of the hub, of one revision."""

    hub_id: str
    """OWNER/NAME."""
    revision: str
    """Empty: the main one."""


def hub_model(source: str, is_there: bool) -> HubModel:
    """The parts of OWNER/NAME or OWNER/NAME@REVISION. ``is_there``: a file has that name. Raises SourceError."""
    if is_there:
        raise SourceError(f"{source} is a file; a model is a directory in Hugging Face layout, or a GGUF file")
    hub_id, _, revision = source.partition("@")
    if source.startswith((".", "/", "~")) or hub_id.count("/") != 1:
        raise SourceError(f"{_nothing(source)}, and it is no hub id (OWNER/NAME) either")
    return HubModel(hub_id, revision)


def gguf_in(directory: str, names: Iterable[str]) -> str | None:
    """Of the files in a directory the one of GGUF that is the model, or the first part of it, or None where it is the
    directory. Raises SourceError.
    """
    held = sorted(names)
    files = models_in(held)
    if "config.json" in held or not files:
        return None
    if len(files) > 1:
        raise SourceError(f"{directory} holds {len(files)} GGUF files; name one of them, such as {files[0]}")
    if files[0] not in held:
        raise SourceError(f"{directory} holds parts of a GGUF file without the first, {files[0]}")
    return files[0]


def pulled_gguf(model: HubModel, names: Iterable[str]) -> str | None:
    """Of the files in the cache of the hub, by their paths in the repository, the one of GGUF that ``penstock pull``
    has put there, or the first part of it; nobody else puts one there. Raises SourceError.
    """
    files = models_in(names)
    if len(files) > 1:
        raise SourceError(
            f"{len(files)} GGUF files of {model.hub_id} were pulled ({', '.join(files)}); name one by its path"
        )
    return files[0] if files else None


def models_in(names: Iterable[str]) -> list[str]:
    """Of these names those of models as GGUF: of one in parts that of the first, be it there or not. What makes tokens
    of pictures lies beside the model, and is none itself."""
    files = [name for name in names if name.endswith(SUFFIX) and not _PROJECTOR.search(PurePath(name).name)]
    return sorted({name if (part := part_name(name)) is None else part.first for name in files})


def refuse_later_part(source: str) -> None:
    """Raises SourceError where a GGUF file is another part of a model than the first."""
    part = part_name(PurePath(source).name)
    if part is not None and part.number > 1:
        raise SourceError(
            f"{source} is part {part.number} of {part.num_parts} of a model; name the first, {part.first}"
        )


def refusal(model: HubModel, error: Exception) -> SourceError:
    """What is said of an error of huggingface_hub's, which is known by its name."""
    names = {each.__name__ for each in type(error).__mro__}
    if "RevisionNotFoundError" in names:
        return SourceError(f"the hub's model {model.hub_id} has no revision {model.revision}")
    if "RepositoryNotFoundError" in names:
        return SourceError(f"the hub has no model {model.hub_id} that is open to this machine")
    if "HFValidationError" in names:
        return SourceError(f"{_nothing(model.hub_id)}, and it is no hub id (OWNER/NAME) either")
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return SourceError(f"{_nothing(model.hub_id)}, and the hub cannot be reached: {reason}")


def _nothing(source: str) -> str:
    return f"there is no {'file' if source.endswith(SUFFIX) else 'directory'} {source}"
