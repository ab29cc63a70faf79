"""Runs a command as several ranks: mlx.launch starts it again on every machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from mlxserve.core.errors import InvalidConfig

STOP = b"stop\n"
# Of MLX: mlx.launch does not hand on this machine's to others, and ranks should not differ in it.
_HANDED_ON = ("MLX_METAL_FAST_SYNCH",)


def run_by_launcher(
    hostfile: str, backend: str, port: int, stop: bytes | None = None
) -> int | None:
    """Run this command with mlx.launch on every machine of `hostfile`.

    Returns the exit code of mlx.launch; None if a signal ended it. A signal ends mlx.launch at once and leaves its ranks behind.
    So this process takes the signals, and writes `stop` to the stdin of mlx.launch, which passes it
    on to all ranks. The next signal kills the ranks of this machine, and so does the first if
    `stop` is None; the others end without them.

    `port`: the first one of the ring. Raises InvalidConfig.
    """
    if not Path(hostfile).is_file():
        raise InvalidConfig(f"hostfile={hostfile} does not exist.", option="hostfile")
    command = _launcher_command(hostfile, backend, port)
    launched: list[subprocess.Popen[bytes]] = []
    num_signals = 0

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        for process in launched:
            if stop is not None and num_signals == 1:
                _say(process, stop)
            else:
                os.killpg(process.pid, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    try:
        # In a group of its own: a terminal sends Ctrl-C to all of this process's group.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
    except OSError as error:
        raise InvalidConfig(f"{command[0]} cannot be started: {error}.") from error
    if num_signals:
        os.killpg(process.pid, signal.SIGKILL)
    launched.append(process)
    code = process.wait()
    launched.clear()
    assert process.stdin is not None
    process.stdin.close()
    return None if num_signals else code


def _launcher_command(hostfile: str, backend: str, port: int) -> list[str]:
    program = shutil.which("mlx.launch") or str(Path(sys.executable).with_name("mlx.launch"))
    chosen = [] if backend == "any" else ["--backend", backend]
    for name in _HANDED_ON:
        if (value := os.environ.get(name)) is not None:
            chosen += ["--env", f"{name}={value}"]
    launcher = [program, "--hostfile", hostfile, "--starting-port", str(port), *chosen, "--"]
    return [*launcher, sys.executable, "-m", "mlxserve", *sys.argv[1:]]


def _say(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has just ended
        process.stdin.write(text)
        process.stdin.flush()
