"""Reads a GGUF file's header: its metadata and where its tensors are. Never imports mlx.

    [ "GGUF" ][ version ][ num_tensors ][ num_values ][ key, type, value ... ][ name, dims, type, offset ... ]
    [ padding to the alignment ][ data of the tensors ... ]

Nothing in the file is trusted: every count is compared with the bytes that are left before anything is
allocated for it, and every tensor must lie inside the file. `gguf.GGUFReader` is not used because it
follows any count, and takes seconds for a large vocabulary.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

from mlxserve.core.errors import UnsupportedModel
from mlxserve.system.files import open_regular

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_STRING = 1 << 24  # bytes
# Bound of all arrays together: the largest vocabularies have 262,144 tokens, with a score and a type
# each, and twice the merges. An item takes up to 64 bytes.
_MAX_ITEMS = 1 << 22
_MAX_TENSORS = 1 << 18
_MAX_DIMENSIONS = 4
_MAX_SHARDS = 1000
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_U32, _U64 = Struct("<I"), Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor in its file.

    shape   rows first, as in mlx; the last dimension is the one that blocks divide
    kind    of its blocks, as llama.cpp calls it (Q4_K)
    offset  bytes from the start of `file`
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    metadata  by llama.cpp's keys; arrays of strings as lists
    digest    of the header's bytes
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    digest: str

    def without_vocabulary(self) -> Header:
        """Return the header without lists, which only the tokenizer needs."""
        short = {key: value for key, value in self.metadata.items() if not isinstance(value, list)}
        return replace(self, metadata=short)


def is_gguf(file: Path) -> bool:
    """True if this is a regular file that begins with GGUF's magic bytes."""
    try:
        with open_regular(file) as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(file: Path) -> Header:
    """Read the header of a file, or the joined headers of all files of a split model.

    Any of the files may be named. Raises UnsupportedModel for a file that is not GGUF, is damaged
    or cannot be read.
    """
    header = _read_one(file)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count in (0, 1):
        return header
    match = _SHARD.fullmatch(file.name)
    if match is None or int(match[2]) != count or count > _MAX_SHARDS:
        raise UnsupportedModel(
            f"{file.name} is one of {count} files of a model, and its name does not end in "
            f"-00001-of-{count:05}.gguf. Give all of them the names that they were published with."
        )
    files = [
        file.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    if missing := [file.name for file in files if not file.exists()]:
        raise UnsupportedModel(
            f"{len(missing)} of the model's {count} files are not in {file.parent}: "
            f"{', '.join(missing[:3])}. Download them as well."
        )
    return _joined([_read_one(file) for file in files])


def _joined(headers: list[Header]) -> Header:
    """Join the headers of a split model, whose first file has the metadata.

    Raises UnsupportedModel.
    """
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        if twice := sorted(tensors.keys() & header.tensors.keys()):
            raise UnsupportedModel(
                f"Two of the model's files have a tensor {twice[0]}, so they are not of one model. "
                "Download them again."
            )
        tensors |= header.tensors
    digest = blake2b(
        "".join(header.digest for header in headers).encode(), digest_size=16
    ).hexdigest()
    return Header(headers[0].metadata, tensors, digest)


def _read_one(file: Path) -> Header:
    try:
        with open_regular(file) as opened:
            if os.fstat(opened.fileno()).st_size < len(MAGIC):
                raise ValueError("it is empty")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data), file)
    except OSError as error:
        raise UnsupportedModel(f"{file.name} cannot be read: {error}") from error
    except ValueError as error:
        raise UnsupportedModel(
            f"{file.name} is damaged or forged: {error}. Download it again from a trusted source."
        ) from error


class _Cursor:
    """Reads forward, and raises ValueError at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.num_items = 0  # of arrays
        self.at = 0
        self.end = len(data)

    def values(self, layout: Struct) -> tuple[Any, ...]:
        at = self.at
        self.at += layout.size
        if self.at > self.end:
            raise ValueError("it ends in the middle of its header")
        return layout.unpack_from(self.data, at)

    def number(self, layout: Struct) -> int:
        return int(self.values(layout)[0])

    def string(self) -> str:
        size = self.number(_U64)
        if size > min(_MAX_STRING, self.end - self.at):
            raise ValueError(f"a string claims to be {size} bytes long")
        at = self.at
        self.at += size
        # Some files have pieces of characters as tokens.
        return self.data[at : self.at].decode("utf-8", errors="replace")


def _parse(cursor: _Cursor, file: Path) -> Header:
    if cursor.data[:4] != MAGIC:
        raise ValueError("it does not begin as a GGUF file does")
    cursor.at = 4
    version = cursor.number(_U32)
    if version not in _VERSIONS:
        raise ValueError(
            f"version {version & 0xFFFF or version >> 16} of the format is not supported"
        )
    num_tensors, num_values = cursor.number(_U64), cursor.number(_U64)
    if num_tensors > _MAX_TENSORS or num_values > _MAX_TENSORS:
        raise ValueError(f"it claims to have {num_tensors} tensors and {num_values} values")
    metadata = _metadata(cursor, num_values)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment % 8:
        raise ValueError(f"general.alignment is {alignment!r:.40}")
    entries = [_entry(cursor) for _ in range(num_tensors)]
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"it has two tensors named {name!r}")
        if offset % alignment:
            raise ValueError(f"{name!r} is not aligned")
        nbytes = _nbytes(name, shape, kind)
        if start + offset + nbytes > cursor.end:
            raise ValueError(f"{name!r} reaches beyond its end; the file may be incomplete")
        tensors[name] = TensorInfo(name, shape, kind, file, start + offset, nbytes)
    _refuse_overlaps(tensors.values())
    digest = blake2b(cursor.data[: cursor.at], digest_size=16).hexdigest()
    return Header(metadata, tensors, digest)


def _metadata(cursor: _Cursor, num_values: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"it has two values for {key[:80]!r}")
        metadata[key] = _value(cursor, cursor.number(_U32), key)
    return metadata


def _refuse_overlaps(tensors: Iterable[TensorInfo]) -> None:
    """Raises ValueError if two tensors have bytes in common."""
    in_order = sorted(tensors, key=lambda each: each.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.nbytes > after.offset:
            raise ValueError(f"{before.name!r} and {after.name!r} overlap")


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind in _SCALARS:
        return cursor.values(Struct("<" + _SCALARS[kind]))[0]
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        raise ValueError(f"{key[:80]!r} has the unknown type {kind}")
    item, count = cursor.number(_U32), cursor.number(_U64)
    cursor.num_items += count
    if cursor.num_items > _MAX_ITEMS:
        raise ValueError(f"its lists up to {key[:80]!r} claim to have {cursor.num_items} items")
    if item in _SCALARS:
        return list(cursor.values(Struct(f"<{count}{_SCALARS[item]}")))
    if item != _STRING:
        raise ValueError(f"{key[:80]!r} is an array of the unknown type {item}")
    return [cursor.string() for _ in range(count)]


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.string()[:200]
    num_dimensions = cursor.number(_U32)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has {num_dimensions} dimensions")
    shape = cursor.values(Struct(f"<{num_dimensions}Q"))[::-1]
    if not 0 < prod(shape) < 1 << 48:
        raise ValueError(f"{name!r} has the shape {shape}")
    kind = cursor.number(_U32)
    if kind not in _kinds():
        raise ValueError(f"{name!r} has blocks of the unknown type {kind}")
    return name, shape, _kinds()[kind], cursor.number(_U64)


def _nbytes(name: str, shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor. Raises ValueError if its rows are not whole blocks."""
    num_values, nbytes = block_size(kind)
    if shape[-1] % num_values:
        raise ValueError(f"the rows of {name!r} are not whole blocks of {kind}")
    return prod(shape) // num_values * nbytes


def block_size(kind: str) -> tuple[int, int]:
    """Number of values and of bytes in a block."""
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


_names: dict[int, str] = {}


def _kinds() -> dict[int, str]:
    if not _names:
        import gguf

        _names.update({kind.value: kind.name for kind in gguf.GGML_QUANT_SIZES})
    return _names
