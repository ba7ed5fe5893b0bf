"""Large files of the hub, one after another, each going on where an earlier attempt ended, in this process or another.

huggingface_hub throws away what it has of a file when it is interrupted; here that is kept beside the place where the
library looks for the whole, which it then finds there. A file takes its place when its SHA-256 is what the hub says.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CHUNK_BYTES = 8 << 20
PART = ".penstock-part"
"""Behind the name of what is there only in part."""


class PullError(Exception):
    """The model cannot be had; the message is one sentence for the operator."""


class File(NamedTuple):
    """As the hub has it."""

    name: str
    num_bytes: int
    sha256: str
    """Of a large one; empty where there is only ``git_hash``."""
    git_hash: str


def fetch_large(hub_id: str, commit: str, file: File, to: Path | None) -> None:
    """Into the hub's cache, or a directory, unless it is there. Raises PullError, and what huggingface_hub raises."""
    from huggingface_hub import constants, get_token, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name

    if to is None:
        blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub_id, repo_type="model") / "blobs"
        target = blobs / file.sha256
    else:
        target = to / file.name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    token = get_token()
    part = target.with_name(target.name + PART)
    with part.open("ab") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PullError(f"another process is fetching {file.name}") from None
        if opened.tell() > file.num_bytes:
            opened.truncate(0)
        http_get(
            hf_hub_url(hub_id, file.name, revision=commit),
            opened,
            resume_size=min(opened.seek(0, os.SEEK_END), file.num_bytes),
            headers={"authorization": f"Bearer {token}"} if token else {},
            expected_size=file.num_bytes,
            displayed_filename=file.name,
        )
        opened.flush()
        os.fsync(opened.fileno())
        if digest_of(part, file, lambda num_bytes: None) != file.sha256:
            part.unlink()
            what = "its hash is another one than on the hub; it was removed, so pull it again"
            raise PullError(f"{file.name} is not what it should be: {what}")
        part.replace(target)


def digest_of(path: Path, file: File, advance: Callable[[int], object]) -> str:
    """As the hub says it: SHA-256, or Git's hash of the content. ``advance`` hears of bytes that were read."""
    num_bytes = path.stat().st_size
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)
    with path.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
