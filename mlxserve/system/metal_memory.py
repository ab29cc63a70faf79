"""MetalMemory: the wired and the cached memory of mlx on Metal.

Both limits are the process's, and several models may be loaded. So each model has a share, and the
limits are the sums of all shares:

    wired    weights, states, pages that have memory, and a step; at most the working set, and what
             other programs had left when this process began
    freed    a step, whose arrays the next one uses again

By default mlx wires nothing, and macOS takes memory back from a model that pauses. Others measured,
wired and not, 63 and 318 ms for a decode after 1.2 s (llama.cpp#10119), and 31 and 0.7 tokens/s of
a model that nearly fills the machine (osaurus-ai/vmlx-swift#418).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import WeakSet

from mlxserve.core.errors import InvalidConfig
from mlxserve.system import machine
from mlxserve.system.device_memory import DeviceMemory

log = logging.getLogger("mlxserve.memory")

_GIB = 1 << 30


class Growing(Protocol):
    """A pool: its current bytes, and a callback for their changes."""

    on_resized: Callable[[int], None]

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MetalLimits:
    """The limits in bytes that mlx has."""

    wired: int
    freed: int


class ModelShare:
    """The memory of one model. It ends with the pools that it follows."""

    def __init__(self, fixed: int, step: int, wired: int | None, apply: Callable[[], None]) -> None:
        self.step = step
        self.wired = wired
        self._fixed = fixed
        self._pools: list[int] = []
        self._apply = apply

    @property
    def resident(self) -> int:
        return self._fixed + self.step + sum(self._pools)

    def follow(self, *pools: Growing) -> None:
        """Count these pools, now and whenever their arrays change."""
        for pool in pools:
            # The pool keeps the share, and the share no pool: a ring would keep the arrays.
            pool.on_resized = partial(self._set, len(self._pools))
            self._pools.append(pool.nbytes)
        self._apply()
        if self.wired is None:
            log.info("Weights, cache and a step stay resident: %.2f GiB", self.resident / _GIB)

    def _set(self, index: int, nbytes: int) -> None:
        if self._pools[index] != nbytes:
            self._pools[index] = nbytes
            self._apply()


class MetalMemory:
    """The shares of all models of a process. Thread-safe."""

    def __init__(self) -> None:
        self._shares: WeakSet[ModelShare] = WeakSet()
        self._lock = threading.RLock()
        self._base = 0  # bytes that may be wired by default
        self._limits: MetalLimits | None = None  # None where mlx has its own
        self._freed_before = 0  # mlx's own limit

    @property
    def limits(self) -> MetalLimits | None:
        return self._limits

    def add(self, fixed: int, step: int, wired_limit: float | None = None) -> ModelShare:
        """Add the share of a model that was just loaded.

        fixed: bytes of weights and states
        step: bytes that a step takes beside them
        wired_limit: GiB that the user has chosen to wire, of all models together

        Raises InvalidConfig if macOS does not allow this limit.
        """
        most = machine.working_set()
        taken = machine.wired_at_start()
        self._base = DeviceMemory(machine.total_memory(), most, taken).base
        wired = None if wired_limit is None else int(wired_limit * _GIB)
        if wired is not None and wired > most:
            raise InvalidConfig(
                f"wired_limit={wired_limit:.1f} GiB, but macOS lets this GPU keep "
                f"{most / _GIB:.1f} GiB resident. Lower it, or raise the system's limit "
                "(sysctl iogpu.wired_limit_mb).",
                option="wired_limit",
            )
        share = ModelShare(fixed, step, wired, self.apply)
        with self._lock:
            self._shares.add(share)
        self.apply()
        return share

    def apply(self) -> None:
        """Set mlx's limits to the sum of the current shares.

        Called after an unload once the arrays are free: beyond its limit mlx unwires any array,
        also another model's.
        """
        with self._lock:
            shares = list(self._shares)
            wanted = _limits_of(shares, self._base)
            if wanted != self._limits:
                self._set(wanted)

    def _set(self, limits: MetalLimits | None) -> None:
        import mlx.core as mx

        freed = self._freed_before if limits is None else limits.freed
        before = int(mx.set_cache_limit(freed))
        if self._limits is None:
            self._freed_before = before
        mx.set_wired_limit(0 if limits is None else limits.wired)
        self._limits = limits
        if limits is not None:
            log.debug(
                "mlx keeps %.2f GiB resident, and %.2f GiB of freed arrays",
                limits.wired / _GIB,
                limits.freed / _GIB,
            )


def _limits_of(shares: list[ModelShare], base: int) -> MetalLimits | None:
    """Sum the shares; None without a model.

    What other programs have wired does not bound a limit that the user has chosen.
    """
    if not shares:
        return None
    chosen = [share.wired for share in shares if share.wired is not None]
    wired = max(chosen) if chosen else min(base, sum(share.resident for share in shares))
    return MetalLimits(wired, sum(share.step for share in shares))


METAL_MEMORY = MetalMemory()
