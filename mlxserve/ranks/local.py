"""LocalRanks: the other ranks of an engine on this machine, as child processes of rank 0.

For tests, and to try a split out: they share one machine's memory bandwidth, so nothing gets faster.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from mlxserve.ranks.environment import HOSTFILE, MASTER_ADDR, MASTER_PORT, RANK
from mlxserve.system.machine import free_ports

log = logging.getLogger("mlxserve.ranks")

_HOST = "127.0.0.1"
_PREFIX = "mlxserve-hosts-"  # prefix of the file with the ranks' addresses
_END_SECONDS = 5.0  # for all of them together
_COMMAND = (sys.executable, "-m", "mlxserve.ranks")


class LocalRanks:
    """Child processes of rank 0. End them with `end` or `kill`; they also end when rank 0 does."""

    def __init__(self, processes: Iterable[subprocess.Popen[bytes]], hostfile: Path) -> None:
        self._processes = list(processes)
        self._hostfile = hostfile

    @classmethod
    def start(cls, size: int, options: Mapping[str, object]) -> LocalRanks:
        """Make this process rank 0 of `size`, by its environment, and start the others.

        options: of the engine, as they are given to EngineConfig
        """
        port, *of_ring = free_ports(size + 1)
        handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump([[f"{_HOST}:{each}"] for each in of_ring], file)
        shared = {HOSTFILE: name, MASTER_ADDR: _HOST, MASTER_PORT: str(port)}
        os.environ |= {RANK: "0", **shared}
        processes = []
        for rank in range(1, size):
            environment = {**os.environ, RANK: str(rank), **_threads(size)}
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, env=environment)
            assert process.stdin is not None
            process.stdin.write(json.dumps(options).encode())
            process.stdin.close()
            processes.append(process)
        log.warning(
            "All %d ranks run on this machine, where they share its memory bandwidth: nothing gets "
            "faster. Use hostfile for several machines.",
            size,
        )
        return cls(processes, Path(name))

    def end(self) -> None:
        """Wait for ranks that were asked to end, and kill the rest. Idempotent."""
        deadline = time.monotonic() + _END_SECONDS
        for process in tuple(self._processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("Process %d of a rank did not end, and is killed.", process.pid)
        self.kill()

    def kill(self) -> None:
        """Kill all ranks: one may be stopped, or wait in a collective for ever. Idempotent."""
        for process in tuple(self._processes):
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()
        self._hostfile.unlink(missing_ok=True)
        for name in (RANK, HOSTFILE, MASTER_ADDR, MASTER_PORT):
            os.environ.pop(name, None)


def remove_hostfile() -> None:
    """Remove the file that rank 0 wrote in `LocalRanks.start`, if any.

    A worker does so before it ends unasked: rank 0 may be gone, and without the worker it ends as
    well. Raises nothing, so that nothing keeps the process.
    """
    file = Path(os.environ.get(HOSTFILE, ""))
    with contextlib.suppress(OSError):
        if file.name.startswith(_PREFIX) and file.parent == Path(tempfile.gettempdir()):
            file.unlink(missing_ok=True)


def _threads(size: int) -> dict[str, str]:
    """Limit a BLAS's threads, so that ranks do not compete for cores."""
    number = str(max(1, (os.cpu_count() or 1) // size))
    return {name: os.environ.get(name, number) for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS")}
