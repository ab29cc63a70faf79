"""The memory that the device leaves for models, as the server and `mlxserve models` count it.

    total      ├──────────────────────────────────────────────────────────┤
    taken                                                          ├──────┤  wired by other programs
    base       ├───────────────────────────────────────────┤  the working set, or what is left
    limit      ├─────────────────────────────────────┤        weights, cache and a step
    reserve                                          ├─────┤  a tenth, at most 1 GiB

macOS has taken its share already: the working set is two thirds of the memory of a small Mac. So
the reserve is an amount and not a share: what is beside weights and cache is given back under
pressure (`engine/memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_RESERVE = 1 << 30
# MLX gives freed arrays back, and allocates them anew, while more than this share of the working
# set is in use (`gc_limit_` of its metal/allocator.cpp).
_FREED_IS_KEPT_BELOW = 0.95


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory that the models of a process may take, in bytes.

    nbytes: weights, caches and steps together
    unkept: the part of `nbytes` in which MLX keeps no freed arrays
    total: the machine's memory, with which the rows grow that a step has under way
    """

    nbytes: int
    unkept: int = 0
    total: int = 0


def beside_cache(step: int, unkept: int) -> int:
    """Bytes that weights and cache leave free for a step of `step` bytes at its peak.

    Half of it lies below the mark from which on MLX keeps no freed arrays, so that decodes use
    theirs again.

    unkept: as in MemoryLimit
    """
    return max(step, step // 2 + unkept)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Sizes of the machine's memory, in bytes.

    total: maximum that this process may have resident
    working_set: maximum that the device recommends to use
    taken: wired by other programs when this process began
    is_metal: whether MLX's allocator of Metal serves it
    """

    total: int
    working_set: int
    taken: int = 0
    is_metal: bool = False

    @property
    def base(self) -> int:
        """The working set, as far as other programs have left it."""
        return max(0, min(self.working_set, self.total - self.taken))

    @property
    def reserve(self) -> int:
        return min(self.base // 10, _MAX_RESERVE)

    def limit(self, utilization: float | None = None) -> MemoryLimit:
        """Return the memory that models may take.

        utilization: the user's share of the working set; None leaves the reserve free
        """
        if utilization is not None:
            return MemoryLimit(int(self.working_set * utilization), total=self.total)
        nbytes = self.base - self.reserve
        mark = int(self.working_set * _FREED_IS_KEPT_BELOW) if self.is_metal else nbytes
        return MemoryLimit(nbytes, max(0, nbytes - mark), self.total)

    def share(self, used: int) -> float:
        """The share of the base that is in use, 0 to 1, as if the reserve were a tenth of it.

        All that may be planned is 0.9; a byte of the reserve counts the more the smaller the
        reserve is.
        """
        planned = self.base - self.reserve
        if used <= planned:
            return 0.9 * used / max(1, planned)
        return 1 - 0.1 * (self.base - used) / max(1, self.reserve)
