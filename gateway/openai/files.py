"""Files in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Storable = r"^[^\x00]*$"
"""What a store may be asked for: PostgreSQL has no NUL."""
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
"""What a client may upload a file for; of those we act on ``batch`` alone, the others are kept."""

UploadStatus = Literal["pending", "completed", "cancelled", "expired"]


class FileExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What OpenAI's files have not."""

    sha256: str


class FileBody(msgspec.Struct, frozen=True, kw_only=True):
    """A file; times in Unix seconds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: str | None = None
    penstock: FileExtras


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of files."""

    object: str = "list"
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class FileQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What a list of files takes."""

    after: Annotated[str, Meta(max_length=256, pattern=Storable)] | None = None
    """The last file of the page before."""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    """By the time of making."""
    purpose: Annotated[str, Meta(max_length=64, pattern=Storable)] | None = None


class ExpiresAfter(msgspec.Struct, frozen=True):
    """When a file goes by itself."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class FileTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload says of its file."""

    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileUpload(FileTerms, frozen=True, kw_only=True):
    """The parts of an upload; those of ``expires_after`` are ``expires_after[anchor]`` and
    ``expires_after[seconds]``."""

    file: bytes


class UploadRequest(FileTerms, frozen=True, kw_only=True):
    """A file that is to come in parts."""

    bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    filename: Annotated[str, Meta(min_length=1, max_length=255, pattern=Storable)]
    mime_type: Annotated[str, Meta(min_length=1, max_length=255)]
    """What a file is served as does not depend on it."""


class UploadPartForm(msgspec.Struct, frozen=True, kw_only=True):
    """The one field that brings a part."""

    data: bytes


class UploadPartBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "upload.part"
    created_at: int
    upload_id: str


MAX_PARTS = 10_000
"""Of one upload."""


class UploadCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """That all parts are there. ``md5``: of the whole file, in hexadecimal digits."""

    part_ids: Annotated[list[str], Meta(max_length=MAX_PARTS)]
    md5: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


class UploadBody(msgspec.Struct, frozen=True, kw_only=True):
    """An upload; times in Unix seconds."""

    id: str
    object: str = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: UploadStatus
    file: FileBody | None = None
