"""Validates the headers of weight files before mlx reads any data. Never imports mlx.

A safetensors file is 8 bytes of length, a JSON header of that length, then data. mlx maps the file
and trusts its header, so the header is compared with the file first: tensors must be contiguous,
each as long as its shape and type require, and end at the end of the file.

    [ length ][ {"w": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}, ...} ][ data ... ]
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from mlxserve.core.errors import UnsupportedModel
from mlxserve.system.files import open_regular

MAX_HEADER = 100 * 2**20  # bytes; the format's limit
MAX_DIMENSIONS = 16
_LENGTH = struct.Struct("<Q")
_BYTES = {  # bytes per element
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    start: int
    end: int


def check_weights(file: Path, name: str) -> None:
    """Raises UnsupportedModel for a file whose header does not describe it."""
    read_shapes(file, name)


def read_shapes(file: Path, name: str) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape. Raises UnsupportedModel if the header contradicts the file."""
    try:
        return {tensor.name: tensor.shape for tensor in _checked(file)}
    except OSError as error:
        raise UnsupportedModel(f"{name}: {file.name} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(
            f"{name} cannot be loaded: {file.name} is damaged or forged: {error}. Download it "
            "again from a trusted source."
        ) from error


def _checked(file: Path) -> list[_Tensor]:
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        first = opened.read(_LENGTH.size)
        if len(first) < _LENGTH.size:
            raise ValueError("it has no header")
        [length] = _LENGTH.unpack(first)
        if length > min(MAX_HEADER, size - _LENGTH.size):
            raise ValueError(f"its header claims to be {length} bytes long")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    end = 0
    tensors = sorted(_tensors(header), key=lambda tensor: (tensor.start, tensor.end))
    for tensor in tensors:
        if tensor.start != end:
            raise ValueError(
                f"{tensor.name[:100]!r} does not start where the tensor before it ends"
            )
        end = tensor.end
    if end != size - _LENGTH.size - length:
        raise ValueError(f"its tensors end at byte {end} of {size - _LENGTH.size - length}")
    return tensors


def _tensors(header: dict[str, Any]) -> Iterator[_Tensor]:
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        name = key[:100]
        if not isinstance(entry, dict):
            raise ValueError(f"the entry of {name!r} is not an object")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"the shape of {name!r} is not a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"the offsets of {name!r} are not two sizes")
        element = _BYTES.get(str(entry.get("dtype")))
        if element is None:
            raise ValueError(f"{name!r} has the unknown type {str(entry.get('dtype'))[:40]!r}")
        if offsets[1] - offsets[0] != prod(shape) * element:
            raise ValueError(f"the length of {name!r} does not match its shape and type")
        yield _Tensor(key, tuple(shape), *offsets)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )
