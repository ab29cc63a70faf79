"""Zeros that take no memory and no time until something is written to them.

`mx.zeros` writes every byte: 1 GiB takes 0.7 s of a quiet 2-core x86 box, 1.3 s of a busy one, and
all of it is resident from then on, although most of a KV pool stays unused for a long time. Linux
takes a process's memory back with MADV_DONTNEED: the next read finds zeros, and a page of memory
becomes resident when it is first written. mlx has no array of such memory, but it fills an array
from a file, which may be a Python object: ours "reads" by giving the array's memory back.

A thread of mlx reads, and needs the interpreter to let go of that object. A process that ends at that
moment dies ("terminate called without an active exception"), so we wait until it has.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import math
import mmap
import os
import struct
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO, cast

import mlx.core as mx

# Below this mx.zeros is as fast.
_SMALLEST = 1 << 20  # bytes

# mlx's reading thread lets go of the file after it has said that the array is read.
_LET_GO_SECONDS = 1.0
_POLL_SECONDS = 0.0001

# As safetensors names them.
_DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.int8: "I8"}


def lazy_zeros(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """As `mx.zeros`; on Linux, on a CPU, with memory taken page by page on first use.

    Raises MemoryError if the system refuses the addresses, as under `ulimit -v`.
    """
    size = math.prod(shape) * dtype.size
    is_possible = sys.platform == "linux" and mx.default_device() == mx.cpu and dtype in _DTYPES
    if not is_possible or size < _SMALLEST:
        return mx.zeros(shape, dtype)
    file = _Zeros(shape, dtype, size)
    num_references = sys.getrefcount(file)
    try:
        zeros = cast(dict[str, mx.array], mx.load(cast(BinaryIO, file), format="safetensors"))
        mx.eval(zeros)
    except RuntimeError as error:  # its text is the traceback of `readinto`
        if file.refusal is None:
            raise
        raise file.refusal from error
    deadline = time.monotonic() + _LET_GO_SECONDS
    while sys.getrefcount(file) > num_references and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return zeros["zeros"]


class _Zeros(io.RawIOBase):
    """A safetensors file of one array of zeros."""

    def __init__(self, shape: Sequence[int], dtype: mx.Dtype, size: int) -> None:
        entry = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [0, size]}
        text = json.dumps({"zeros": entry}).encode()
        self._header = struct.pack("<Q", len(text)) + text
        self._size = len(self._header) + size
        self._at = 0
        self.refusal: MemoryError | None = None  # what `readinto` raised

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # mlx's only way
        """Fill the buffer, which is either part of the header or all after it."""
        begin = self._at
        self._at += len(buffer)
        if begin < len(self._header):
            buffer[:] = self._header[begin : self._at]
        else:
            try:
                _give_back(buffer)
            except MemoryError as error:
                self.refusal = error
                raise
        return len(buffer)


def _give_back(buffer: memoryview) -> None:
    """Zero the buffer; give its whole memory pages back to Linux. Raises MemoryError."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if start < mmap.PAGESIZE:  # mlx passes on the null that malloc returned
        raise MemoryError(f"{len(buffer)} bytes cannot be allocated")
    stop = start + len(buffer)
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = stop // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, stop - last)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(first, last - first, mmap.MADV_DONTNEED) != 0:
        number = ctypes.get_errno()
        raise MemoryError(f"madvise failed: {errno.errorcode.get(number)}")
