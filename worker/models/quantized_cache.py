"""Quantised weights on disk, so that a model is rounded once and not at each start.

Owns one directory for each model and way to quantise it, and for each rank where several compute one, in the user's
cache: a file for each matrix that was rounded, as it was asked for or to be read at all, and a list of all matrices. It
is written beside its place and put there by one rename, and whatever is not as it should be is made anew: nothing here
keeps a model from being loaded. What is not used for long goes. Matrices that are taken from their files as they are,
codes or floats, stay there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from policies.gguf import parts_of
from worker.models.forms import Form, Fp8, Int4, Int8, Plain
from worker.models.quantize import quantized
from worker.models.shard import Part, Shard
from worker.models.sources import FileSource, Source
from worker.user_cache import user_cache

log = logging.getLogger(__name__)

VERSION = 3
"""Of the files, and of how quantize.py and fitting.py round."""
LEAST_PARAMETERS = 16_000_000
"""Smaller models are rounded in less time than files take to look up."""
DAY_S = 86_400.0
UNUSED_DAYS = 90
"""What no start has read for so long goes when something else is written."""
_LIST = "matrices.json"
"""Its time is that of the last start that found it."""
_DENSE = ".kv_b_proj"
"""Ends the names of matrices that are folded into others as they are, and never multiplied by themselves."""
_FORMS = {"int8": Int8, "int4": Int4, "fp8": Fp8}
_Sizes = dict[str, int | None]
"""By a matrix's name, of its file in bytes; None: it was not rounded, and has none."""


class QuantizingSource(Source):
    """A Source over another, whose plain matrices are ``kind`` ("none": as they are), from the cache where it has
    them."""

    def __init__(self, source: FileSource, name: str, kind: str) -> None:
        """``name``: as ``name_of`` has it before and after the source's files are opened; where it is empty nothing is
        read from the disk, or written there."""
        self._source, self._kind = source, kind
        self._found: Path | None = None
        self._scratch: Path | None = None
        self._sizes: _Sizes = {}
        """Of what is found, or was made so far."""
        self._place: Path | None = None
        if not name:
            return
        try:
            self._place = user_cache() / name
            sizes = _whole(self._place) if self._place.exists() else None
            if sizes is not None:
                self._found, self._sizes = self._place, sizes
            else:
                shutil.rmtree(self._place, ignore_errors=True)
                self._begin()
        except OSError as error:
            log.info("quantised weights are not kept on disk: %s", error)

    def paths(self, others: list[Path]) -> list[Path]:
        """Of the files that its matrices come from, in the order in which they were asked for; ``others``: those of
        the source."""
        if self._found is None:
            return others
        kept = [self._found / f"{name}.safetensors" for name, size in self._sizes.items() if size is not None]
        return kept if len(kept) == len(self._sizes) else [*kept, *others]

    def tensor(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source."""
        return self._source.tensor(name, shape, part, dtype)

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:
        """See Source."""
        if name.endswith(_DENSE):
            return self._source.matrix(name, shape, part)
        form = self._read(name, _shape_of(shape, part))
        if form is not None:
            self._source.skip(name, shape)
            return form
        return self._kept(name, self._source.matrix(name, shape, part))

    def eight(self, name: str, form: Form, dtype: torch.dtype) -> Form:
        """See Source. From the next start on this is what ``matrix`` gives."""
        rounded = self._source.eight(name, form, dtype)
        if isinstance(rounded, Int8):
            self._write(name, rounded)
        return rounded

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Form:
        """See Source."""
        form = self._read(name, _shape_of(shape, part))
        return form or self._kept(name, self._source.tied(name, shape, table, part))

    def experts(
        self, name: str, shape: tuple[int, int, int], outputs: Tensor, part: Part | None = None
    ) -> Iterator[Form]:
        """See Source."""
        num_experts, num_inputs, _ = shape
        if part is not None and part.columns is not None and part.dim == 1:
            num_inputs = len(part.columns)
        made, num_made = None, 0
        for expert in range(num_experts):
            of_one = f"{name}.{expert}"
            form = self._read(of_one, (len(outputs), num_inputs))
            if form is None:
                made = made or self._source.experts(name, shape, outputs, part)
                form = self._kept(of_one, next(islice(made, expert - num_made, None)))
                num_made = expert + 1
            yield form
        if made is None:
            self._source.skip(name, shape)

    def finish(self) -> None:
        """All matrices have been taken: where they were made anew, they are put in their place."""
        if self._scratch is None or self._place is None or not any(self._sizes.values()):
            return
        try:
            if self._place.exists():
                return  # another worker was faster, with the same, which others may be reading by now
            (self._scratch / _LIST).write_text(json.dumps(self._sizes))
            # Of the same files as they were before, or of what could not be used.
            for old in self._place.parent.glob(self._place.name.rpartition("-")[0] + "-*"):
                shutil.rmtree(old, ignore_errors=True)
            self._scratch.rename(self._place)
            self._scratch = None
        except OSError as error:
            log.info("quantised weights are not kept on disk: %s", error)

    def __enter__(self) -> QuantizingSource:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing half-written stays."""
        self._abandon()

    def _abandon(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _begin(self) -> None:
        assert self._place is not None
        for left in self._place.parent.glob(".making-*"):
            with contextlib.suppress(FileNotFoundError):  # put in its place meanwhile
                if time.time() - left.stat().st_mtime > DAY_S:  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
        for unused in self._place.parent.glob(f"weights-*/{_LIST}"):
            with contextlib.suppress(FileNotFoundError):  # another start was faster
                days = (time.time() - unused.stat().st_mtime) / DAY_S
                if days > UNUSED_DAYS:
                    log.info("quantised weights in %s go, for nobody has used them for %d days", unused.parent, days)
                    shutil.rmtree(unused.parent, ignore_errors=True)
        self._scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=self._place.parent))

    def _read(self, name: str, shape: tuple[int, int]) -> Form | None:
        if self._found is None or self._sizes.get(name, 0) is None:
            return None
        try:
            form = _form_of(self._found / f"{name}.safetensors")
            if form.shape != shape:
                raise ValueError(f"{name} is of another shape")
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            log.info(
                "quantised weights in %s cannot be used and are made anew at the next start: %s", self._found, error
            )
            shutil.rmtree(self._found, ignore_errors=True)
            self._found = None
            return None
        return form.to(self._source.device)

    def _kept(self, name: str, form: Form) -> Form:
        """Rounded, and written where that, or reading it, took time."""
        rounded = form if self._kind == "none" else quantized(form, self._kind)
        if isinstance(rounded, Plain) or (rounded is form and name not in self._source.rounded):
            self._sizes[name] = None
            return rounded
        self._write(name, rounded)
        return rounded

    def _write(self, name: str, form: Int8 | Int4 | Fp8) -> None:
        if self._scratch is None:
            return
        path = self._scratch / f"{name}.safetensors"
        parts = {part: getattr(form, part) for part in ("codes", "scales", "offsets") if hasattr(form, part)}
        header = {"form": type(form).__name__.lower(), "group": str(getattr(form, "group", 0))}
        try:
            save_file({part: tensor.contiguous().cpu() for part, tensor in parts.items()}, path, metadata=header)
            self._sizes[name] = path.stat().st_size
        except (OSError, SafetensorError) as error:
            log.info("quantised weights are not kept on disk: %s", error)
            self._abandon()


def _shape_of(whole: tuple[int, int], part: Part | None) -> tuple[int, int]:
    if part is None:
        return whole
    return sum(map(len, part.rows)), whole[1] if part.columns is None else len(part.columns)


def name_of(model: Path, kind: str, dtype: torch.dtype, shard: Shard) -> str:
    """Of the place for a model as its files are now, which is said behind the last hyphen; empty where they cannot be
    looked at. ``dtype``: what plain matrices are in before they are rounded; ``shard``: whose parts of them are asked
    for."""
    try:
        return _name(model, kind, dtype, shard)
    except OSError as error:
        log.info("quantised weights are not kept on disk: %s", error)
        return ""


def _name(model: Path, kind: str, dtype: torch.dtype, shard: Shard) -> str:
    """Raises OSError."""
    # In the hub's cache a GGUF's parts are links to files of other names.
    parts, model = [part.resolve() for part in parts_of(model)], model.resolve()
    digest = hashlib.sha256(repr((VERSION, str(dtype))).encode())
    files = sorted(model.glob("*.safetensors")) + sorted(model.glob("*.json")) if model.is_dir() else parts
    for path in files:
        status = path.stat()
        # Files that are unpacked, or copied with their times, may be as large and as old as those that they replace;
        # when the system last wrote to one, nobody can set.
        times = status.st_mtime_ns, status.st_ctime_ns
        digest.update(repr((path.name, str(path.resolve()), status.st_size, *times)).encode())
    place = hashlib.sha256(os.fsencode(model)).hexdigest()
    layout = shard.layout
    rank = f"rank{shard.rank}of{layout.tensor}x{layout.pipeline}-" if layout.num_ranks > 1 else ""
    return f"weights-{kind}-{str(dtype).removeprefix('torch.')}-{rank}{place[:16]}-{digest.hexdigest()[:16]}"


def _whole(place: Path) -> _Sizes | None:
    """What its list says; None where a file is not as it says."""
    try:
        sizes: _Sizes = json.loads((place / _LIST).read_text())
        kept = {place / f"{name}.safetensors": size for name, size in sizes.items() if size is not None}
        wrong = [path.name for path, size in kept.items() if path.stat().st_size != size]
    except (OSError, ValueError, AttributeError) as error:
        wrong = [str(error)]
    if wrong:
        log.info("quantised weights in %s cannot be used and are made anew: %s", place, wrong[0])
        return None
    with contextlib.suppress(OSError):  # it may be read and no more
        os.utime(place / _LIST)
    return sizes


def _form_of(path: Path) -> Form:
    """Raises OSError, SafetensorError, ValueError, KeyError."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if header["form"] == "int4":
        return Int4(parts["codes"], parts["scales"], parts["offsets"], int(header["group"]))
    kind = _FORMS[header["form"]]
    assert kind is Int8 or kind is Fp8
    return kind(parts["codes"], parts["scales"])
