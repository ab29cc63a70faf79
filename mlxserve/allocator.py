"""How glibc's malloc, with which mlx's CPU backend takes every array, treats what is freed.

By default it returns large blocks to the kernel at once, and the next operation's result comes
page by page, zeroed: an addition over 12 MB takes 11 ms that way and 2 ms in memory that was
kept, attention of 512 rows over 512 positions 100 ms and 48 (2-core x86, one thread).
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h, and the bytes that we set them to. Blocks below the first are taken from
# what was freed (32 MiB is the most glibc allows), and freed memory is kept up to the second.
_PARAMETERS = {"M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 256 << 20)}


def keep_freed_memory() -> bool:
    """Whether this process's malloc keeps freed memory now; another libc than glibc has its own way."""
    mallopt = getattr(ctypes.PyDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(number, value) == 1 for number, value in _PARAMETERS.values())
