"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Page faults of writing 16 MB again and again, in a process whose malloc was asked to keep memory.
_SCRIPT = """
import ctypes, resource, sys
from mlxserve.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.PyDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = libc.memset.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def write():
    block = libc.malloc(16 << 20)
    libc.memset(block, 1, 16 << 20)
    libc.free(block)
write()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    write()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, how], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_memory_that_was_freed_is_not_fetched_from_the_kernel_again() -> None:
    assert faults("kept") < 100 < faults("given back")
