"""The tensors of a safetensors file as views of its bytes, which are read when they are used.

For whoever reads policies for as long as it lives: the library's own reader (0.8.0) loses two integers with each tensor
and each slice. Files are written by the library. Not here: whether the bytes are a policy's (protocol/policy.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from protocol.errors import PolicyError
from protocol.policy import read_safetensors

_DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class TensorFile:
    """Raises PolicyError for a file that is no safetensors file, OSError for one that cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places = {place.name: place for place in read_safetensors(path)}
        # What is written to a tensor stays in memory; nothing should be.
        self._bytes = np.memmap(path, np.uint8, "c").view(np.ndarray)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def tensor(self, name: str) -> Tensor:
        """On the CPU; valid for as long as anything holds it. Raises PolicyError where its type is not known."""
        place = self._places[name]
        dtype = _DTYPES.get(place.dtype)
        if dtype is None or dtype.itemsize * int(np.prod(place.shape, dtype=np.int64)) != place.end - place.begin:
            raise PolicyError(f"{self._path}: tensor {name} of type {place.dtype} and shape {place.shape} does not fit")
        return torch.from_numpy(self._bytes[place.begin : place.end]).view(dtype).reshape(place.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises OSError when the file cannot be written, which the library has an exception of its own for."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        system = re.search(r"\(os error (\d+)\)", str(error))
        if system is None:
            raise
        raise OSError(int(system[1]), os.strerror(int(system[1])), str(path)) from error
