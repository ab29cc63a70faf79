"""The watchdog's other process: kills a server whose Python is stuck, and the watchdog with it.

    server ── a byte per check ──▶ stdin; its end ends this process

It counts its own ticks without a byte, and none while the server is stopped. So a server that was
paused, together with this process or alone, has all its time again. It imports only small modules
that load fast: it lives as long as the server.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

WRITE_STACKS = signal.SIGUSR2  # faulthandler writes them without the interpreter's lock
_TICK = 1.0  # seconds
_WRITE_SECONDS = 1.0  # for the stacks


def main(pid: int, seconds: float) -> None:
    silence = 0.0
    while silence < seconds:
        readable, _, _ = select.select([0], [], [], _TICK)
        if not readable:
            silence = 0.0 if _is_stopped(pid) else silence + _TICK
        elif os.read(0, 4096):
            silence = 0.0
        else:
            return
    print(
        f"mlxserve: a call has held Python's lock for {seconds:g} seconds (--watchdog-seconds); the "
        "process is killed. Its stacks:",
        file=sys.stderr,
        flush=True,
    )
    os.kill(pid, WRITE_STACKS)
    time.sleep(_WRITE_SECONDS)
    os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """True if the process is stopped, by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2]
    except OSError:  # macOS
        state = subprocess.run(
            ["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
    return state.strip()[:1] in ("T", "t")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
