"""``penstock pull``: a model from the hub to this machine, each file held against what the hub says of it.

The files come through huggingface_hub, into its cache or a directory: a broken connection, or a pull that was
interrupted, goes on where it was, and what is there already is not fetched again. What is verified here is what that
library leaves to the transport: the SHA-256 of large files, the Git hash of small ones, and that the weights are whole
files of their kind.
"""

from __future__ import annotations

import errno
import glob
import mmap
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import click
import msgspec

from gateway.fetch import File, PullError, digest_of, fetch_large
from gateway.settings_file import fail
from policies import gguf, safetensors
from policies.model_source import models_in
from sources import TEXT_FILES, WEIGHTS

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo
    from rich.console import Console

MAX_SHOWN = 12
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Pulled(msgspec.Struct, frozen=True):
    """What is on this machine now."""

    source: str
    """What the settings call it."""
    commit: str
    path: str
    files: int
    bytes: int


def pull(hub_id: str, revision: str | None, to: Path | None, quantization: str | None, console: Console) -> Pulled:
    """``to``: None is the hub's cache, where ``source = "OWNER/NAME"`` finds it. ``quantization``: of GGUF files, the
    one of this name. Raises PullError."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    files, commit = _listed(hub_id, revision, quantization)
    _check_space(files, to)
    if not console.is_terminal:
        disable_progress_bars()
    try:
        for file in files:
            if file.sha256 and file.num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                fetch_large(hub_id, commit, file, to)
        names = [glob.escape(file.name) for file in files]
        root = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=names, local_dir=to))
    except _failures() as error:
        raise _explained(error, hub_id, revision) from None
    if to is None and root.name != commit:
        raise PullError(f"{hub_id} has changed on the hub meanwhile; pull it again")
    _verify(root, files, console)
    source = f"{hub_id}@{revision}" if revision else hub_id
    if to is not None:
        source = str(root / files[0].name if files[0].name.endswith(gguf.SUFFIX) else root)
    return Pulled(source, commit, str(root), len(files), sum(file.num_bytes for file in files))


def _listed(hub_id: str, revision: str | None, quantization: str | None) -> tuple[list[File], str]:
    """The files to fetch, and the commit that they are of. Raises PullError."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    if hub_id.count("/") != 1:
        raise PullError(f"{hub_id} is no hub id (OWNER/NAME)")
    try:
        info = huggingface_hub.HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    except HFValidationError:
        raise PullError(f"{hub_id} is no hub id (OWNER/NAME)") from None
    except _failures() as error:
        raise _explained(error, hub_id, revision) from None
    return chosen(hub_id, list(_files_of(info)), quantization), str(info.sha)


def _files_of(info: ModelInfo) -> Iterator[File]:
    """Raises PullError where a name would lead out of the place that they go to."""
    for sibling in info.siblings or ():
        sha256 = "" if sibling.lfs is None else sibling.lfs.sha256
        path = PurePosixPath(sibling.rfilename)
        if path.is_absolute() or ".." in path.parts or (sha256 and not _SHA256.fullmatch(sha256)):
            raise PullError(f"the hub names a file that cannot be: {gguf.shown(sibling.rfilename)}")
        yield File(sibling.rfilename, sibling.size or 0, sha256, sibling.blob_id or "")


def chosen(hub_id: str, files: Sequence[File], quantization: str | None) -> list[File]:
    """Of a repository's files those that a model is served from: safetensors with what belongs to them, or one GGUF, be
    it in parts or in a folder, which may say the quantisation as well as its name. Raises PullError."""
    models = models_in(file.name for file in files)
    known = _some(models)
    if quantization is not None:
        wanted = re.compile(rf"(^|[-._/]){re.escape(quantization)}(?=[-./]|$)", re.IGNORECASE)
        is_named = quantization in models
        named = [quantization] if is_named else [name for name in models if wanted.search(_stem(name))]
        if len(named) == 1:
            return _parts(hub_id, files, named[0])
        if named:
            raise PullError(
                f"{hub_id} has {len(named)} GGUF files of the quantisation {quantization}; choose one with --quant by"
                f" its name: {_some(named)}"
            )
        raise PullError(
            f"{hub_id} has no GGUF file of the quantisation {quantization}; it has {known or 'none at all'}"
        )
    if any(fnmatch(file.name, WEIGHTS) for file in files):
        return [file for file in files if any(fnmatch(file.name, pattern) for pattern in (*TEXT_FILES, WEIGHTS))]
    if len(models) == 1:
        return _parts(hub_id, files, models[0])
    if models:
        raise PullError(f"{hub_id} has {len(models)} GGUF files; choose one with --quant: {known}")
    raise PullError(f"{hub_id} has neither safetensors nor GGUF files, so it cannot be served")


def _stem(name: str) -> str:
    """Of a GGUF what tells it from others."""
    part = gguf.part_name(name)
    return name.removesuffix(gguf.SUFFIX) if part is None else part.model


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def _parts(hub_id: str, files: Sequence[File], name: str) -> list[File]:
    """Of a GGUF, by the name of its first part. Raises PullError."""
    there = {file.name: file for file in files}
    names = [str(part) for part in gguf.parts_of(PurePosixPath(name))]
    if missing := [part for part in names if part not in there]:
        raise PullError(f"{hub_id} has no {missing[0]}, which is a part of {name}")
    return [there[part] for part in names]


def _check_space(files: Sequence[File], to: Path | None) -> None:
    """Raises PullError. What is there already may be counted as well: better too careful than half a model."""
    from huggingface_hub import constants

    place = (Path(constants.HF_HUB_CACHE) if to is None else to).expanduser().absolute()
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    missing = sum(file.num_bytes for file in files if to is None or not (to / file.name).exists())
    free = shutil.disk_usage(there).free
    if to is None and missing > free:
        have = {path.name for path in place.glob("models--*/blobs/*")}
        missing = sum(file.num_bytes for file in files if not {file.sha256, file.git_hash} & have)
    if missing > free:
        raise PullError(f"it takes {_shown(missing)}, and {there} has {_shown(free)} free")


def _verify(root: Path, files: Sequence[File], console: Console) -> None:
    """Raises PullError; what is not what the hub says is removed, so that it is fetched again."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("Verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sum(file.num_bytes for file in files))
        for file in files:
            path = root / file.name
            fault = fault_of(path, file, lambda num_bytes: progress.advance(task, num_bytes))
            if fault:
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise PullError(f"{file.name} is not what it should be: {fault}; it was removed, so pull it again")


def fault_of(path: Path, file: File, advance: Callable[[int], object]) -> str:
    """What is wrong with a file that was fetched; empty: nothing. ``advance`` hears of bytes that were read."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != file.num_bytes:
            return f"it has {num_bytes} bytes, and {file.num_bytes} on the hub"
        if digest_of(path, file, advance) != (file.sha256 or file.git_hash):
            return "its hash is another one than on the hub"
        if file.name.endswith(".safetensors"):
            with path.open("rb") as opened:
                length = safetensors.header_length(opened.read(safetensors.LENGTH_BYTES), num_bytes)
                safetensors.tensors_of(opened.read(length), num_bytes)
        elif file.name.endswith(gguf.SUFFIX):
            with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                view = memoryview(mapped)
                try:
                    gguf.parse(view)
                finally:
                    view.release()
    except (safetensors.SafetensorsInvalid, gguf.GgufInvalid) as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return ""


def _failures() -> tuple[type[Exception], ...]:
    """What the library raises: its own errors and those of the HTTP client below it, another one in another version."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)), OSError)


def _explained(error: Exception, hub_id: str, revision: str | None) -> PullError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return PullError(
            f"{hub_id} is gated: accept its terms on the hub, and set HF_TOKEN to a token of the account that has"
        )
    if isinstance(error, RevisionNotFoundError):
        return PullError(f"{hub_id} has no revision {revision}")
    if isinstance(error, RepositoryNotFoundError):
        return PullError(
            f"the hub has no model {hub_id}, or none that is open to this machine; for a private one set HF_TOKEN"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return PullError("HF_HUB_OFFLINE is set, so the hub is not asked")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PullError("there is no space left on the disk; what has come whole is kept")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            return PullError(
                f"the hub does not let this machine have {hub_id} ({status}): set HF_TOKEN to a token that may"
            )
        return PullError(f"the hub answered with {status}; try again later")
    reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | LocalEntryNotFoundError):
        return PullError(f"{hub_id} could not be fetched whole: {reason}; what has come whole is kept")
    return PullError(f"the hub cannot be reached: {reason}")


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / (1 << 20):.2f} MiB"


@click.command("pull", short_help="Fetch a model from the hub and verify every file.")
@click.argument("model")
@click.option("--revision", help="A branch, a tag or a commit [main].")
@click.option(
    "--quant",
    "quantization",
    help="Of several GGUF files, the one of this quantisation, such as Q4_K_M, or of this name.",
)
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), help="A directory [the hub's cache].")
@click.option("--json", "as_json", is_flag=True, help="Say what came as one JSON object.")
def command(model: str, revision: str | None, quantization: str | None, to: Path | None, as_json: bool) -> None:
    """Fetch MODEL (OWNER/NAME) from the hub and verify every file; then it is served as --model OWNER/NAME."""
    from rich.console import Console

    try:
        pulled = pull(model, revision, to, quantization, Console(stderr=True))
    except PullError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if as_json:
        click.echo(msgspec.json.encode(pulled))
    else:
        commit = pulled.commit[:12]
        click.echo(f"{model} at {commit}: {pulled.files} files, {_shown(pulled.bytes)}, verified, in {pulled.path}")
        click.echo(f"Serve it: penstock serve --model {pulled.source}")
