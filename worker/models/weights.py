"""A checkpoint's tensors, by name, from safetensors files that are mapped rather than read.

Owns finding the files and saying what is wrong with them; what the tensors mean is the loader's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sources import content
from worker.models.errors import ModelError
from worker.models.shard import Part

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HARMLESS = ("rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Endings of buffers that old checkpoints carry and every loader recomputes."""


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError."""
    try:
        value = json.loads(content(path).decode())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:  # the second also where a number has too many digits
        raise ModelError(f"{path} cannot be read: {_flat(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


class Checkpoint:
    """The tensors of a directory in Hugging Face layout; ``take`` hands each out once, ``finish`` names what nobody
    took.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ModelError."""
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        """Of the tensors not yet taken."""
        self.num_bytes_taken = 0
        """Of all tensors and parts handed out, as the files hold them."""
        try:
            self._index()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def paths(self) -> list[Path]:
        """Of its files, in the order of their names."""
        return [self._directory / name for name in sorted(self._files)]

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Part | None = None,
        dtypes: tuple[torch.dtype, ...] = FLOATS,
    ) -> Tensor:
        """The tensor, or its part, mapped from its file, in one of these types. Raises ModelError."""
        tensor = self._checked(name, (shape,), dtypes, part is not None)
        if part is not None:
            tensor = part.of(tensor)
        self._file_of.pop(name)
        self.num_bytes_taken += tensor.nbytes
        return tensor

    def take_one_of(
        self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...] = FLOATS
    ) -> Tensor:
        """A tensor that is written in more than one shape. Raises ModelError."""
        tensor = self._checked(name, shapes, dtypes, False)
        self._file_of.pop(name)
        self.num_bytes_taken += tensor.nbytes
        return tensor

    def peek(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that stays to be taken. Raises ModelError."""
        return self._checked(name, (shape,), FLOATS, False)

    def _checked(
        self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], as_slice: bool
    ) -> Tensor:
        file_name = self._file_of.get(name)
        if file_name is None:
            raise ModelError(f"{self._directory} has no tensor {name}")
        try:
            file = self._files[file_name]
            # A slice is no copy: what of the file is in no part is never read and takes no memory.
            tensor: Tensor = file.get_slice(name)[...] if as_slice else file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"tensor {name} of {self._directory / file_name} cannot be read: {_flat(error)}") from None
        if tensor.dtype not in dtypes:
            wanted = "a floating type" if dtypes == FLOATS else _name(dtypes[0])
            raise ModelError(f"tensor {name} of {self._directory / file_name} is {_name(tensor.dtype)}, not {wanted}")
        if tuple(tensor.shape) not in shapes:
            raise ModelError(
                f"tensor {name} of {self._directory / file_name} is {_dims(tensor.shape)}, not {_dims(shapes[0])}"
            )
        return tensor

    def drop(self, name: str) -> None:
        """This tensor is known and not needed."""
        self._file_of.pop(name, None)

    def drop_where(self, needless: Callable[[str], bool]) -> None:
        """The same for all that are so."""
        self._file_of = {name: file for name, file in self._file_of.items() if not needless(name)}

    def keep(self, prefix: str, name: str) -> None:
        """Tensors of other parts of a larger model are known and not needed."""
        self._file_of = {key: file for key, file in self._file_of.items() if key == name or key.startswith(prefix)}

    def finish(self) -> None:
        """Raises ModelError where tensors are left that no part of the decoder wanted: it would not be the model that
        was saved.
        """
        left = sorted(name for name in self._file_of if not name.endswith(_HARMLESS))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(f"{self._directory} holds tensor {left[0]}{more}, which this architecture does not use")

    def _index(self) -> None:
        index_path = self._named("model.safetensors.index.json")
        whole_path = self._named("model.safetensors")
        if index_path.exists():
            weight_map = read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ModelError(f"{index_path} has no weight_map of tensor names to file names")
            for file_name in sorted(set(weight_map.values())):
                if Path(file_name).name != file_name:
                    raise ModelError(f"{index_path} names a file outside its directory: {file_name}")
                held = set(self._open(file_name))
                missing = sorted(name for name, file in weight_map.items() if file == file_name and name not in held)
                if missing:
                    raise ModelError(
                        f"{self._directory / file_name} lacks tensor {missing[0]}, which {index_path.name} places there"
                    )
            self._file_of = dict(weight_map)
        elif whole_path.exists():
            self._file_of = dict.fromkeys(self._open(whole_path.name), whole_path.name)
        else:
            others = sorted(
                path.name for path in self._directory.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf")
            )
            found = f" ({others[0]} is not a safetensors file)" if others else ""
            raise ModelError(f"{self._directory} has neither model.safetensors nor model.safetensors.index.json{found}")

    def _named(self, name: str) -> Path:
        """Of this name, or the only one that ends so: old GPTQ files are called after their bits and groups."""
        path = self._directory / name
        others = [] if path.exists() else list(self._directory.glob(f"*{name.removeprefix('model')}"))
        return others[0] if len(others) == 1 else path

    def _open(self, file_name: str) -> list[str]:
        path = self._directory / file_name
        try:
            if not path.is_file():
                raise ModelError(f"{path} is missing")
            self._files[file_name] = self._stack.enter_context(safe_open(path, framework="pt"))
            return list(self._files[file_name].keys())
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{path} is not a whole safetensors file: {_flat(error)}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(shape: tuple[int, ...] | torch.Size) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _flat(error: BaseException) -> str:
    """The first line of an error, for one sentence."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
