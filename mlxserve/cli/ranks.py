"""Runs this command as several ranks, and again after one has failed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mlxserve.cli.streams import print_error, print_safe
from mlxserve.core.errors import InvalidConfig
from mlxserve.ranks.environment import LENDER

if TYPE_CHECKING:
    from mlxserve.cli.lent_listener import ListenerLender

STOP = b"stop\n"
RANKS_ENDED = 70  # exit code, so that a service manager starts them again
# Of MLX: mlx.launch does not hand on this machine's to others, and ranks should not differ in it.
_HANDED_ON = ("MLX_METAL_FAST_SYNCH",)
_FIRST_SECONDS, _MAX_SECONDS = 1.0, 30.0  # before ranks start again
_HEALTHY_SECONDS = 60.0  # after which a failure is not one of several in a row
_TICK = 0.1  # seconds between looks for a signal
_RETRY = {"retry-after": "5"}  # seconds; a guess of how long a model loads


class RankProcesses:
    """Runs commands that start ranks, one after the other, and ends them on signals.

    A signal ends mlx.launch at once and leaves its ranks behind. So this process takes the signals, and writes
    `stop` to the command's stdin, which mlx.launch passes on to all ranks. The next signal kills the ranks of
    this machine, and so does the first if `stop` is None; the others end without them.
    """

    def __init__(self, stop: bytes | None = None) -> None:
        self._stop = stop
        self._num_signals = 0
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)

    @property
    def is_stopped(self) -> bool:
        """True once a signal has come."""
        return self._num_signals > 0

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Run a command to its end, and return its exit code. Raises InvalidConfig.

        environment: variables beside those of this process
        """
        try:
            # In a group of its own: a terminal sends Ctrl-C to all of this process's group.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                process_group=0,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise InvalidConfig(f"{command[0]} cannot be started: {error}.") from error
        if self._num_signals:
            os.killpg(process.pid, signal.SIGKILL)
        self._process = process
        code = process.wait()
        self._process = None
        assert process.stdin is not None
        process.stdin.close()
        return code

    def sleep(self, seconds: float) -> bool:
        """Sleep; False if a signal has come."""
        end = time.monotonic() + seconds
        while not self._num_signals and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _TICK))
        return not self._num_signals

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._process is None:
            return
        if self._stop is not None and self._num_signals == 1:
            _say(self._process, self._stop)
        else:
            os.killpg(self._process.pid, signal.SIGKILL)


class BackOff:
    """Decides how long to wait after a failure, and when to give up."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self.num_failures = 0  # in a row

    def seconds_after(self, ready_seconds: float) -> float | None:
        """Count a failure; return the seconds to wait, or None to give up.

        ready_seconds: for which the ranks were ready before
        """
        is_first = ready_seconds >= _HEALTHY_SECONDS
        self.num_failures = 1 if is_first else self.num_failures + 1
        if self.num_failures > self._max_failures:
            return None
        return min(_FIRST_SECONDS * 2.0 ** (self.num_failures - 1), _MAX_SECONDS)


def run_again(
    processes: RankProcesses,
    lender: ListenerLender,
    start: Callable[[], int],
    back_off: BackOff,
    advice: str,
) -> int:
    """Run ranks until they end in order, and again after each failure; return the exit code.

    Ranks that have not been ready once are not started again: their failure is no accident.

    start: runs the ranks to their end, and returns their exit code
    advice: what to do after failures in a row, as a sentence
    """
    from mlxserve.api.errors import ApiError

    while True:
        code = start()
        if processes.is_stopped or lender.has_ended:
            return 0
        if not lender.was_ready:
            return code
        seconds = back_off.seconds_after(lender.pop_ready_seconds())
        if seconds is None:
            if back_off.num_failures > 1:
                print_error(
                    f"the ranks have failed {back_off.num_failures} times in a row. {advice}"
                )
            else:
                print_error("the ranks have ended by themselves.")
            return RANKS_ENDED
        reason = "A rank has failed, and all ranks start again"
        lender.refuse(
            ApiError(503, f"{reason}. Try again in a moment.", code="restarting", headers=_RETRY)
        )
        print_safe(f"{reason} in {seconds:g} s.", to=sys.stderr)
        if not processes.sleep(seconds):
            return 0


def run_by_launcher(hostfile: str, backend: str, port: int) -> int | None:
    """Run this command with mlx.launch on every machine of `hostfile`.

    Returns the exit code of mlx.launch; None if a signal ended it.

    `port`: the first one of the ring. Raises InvalidConfig.
    """
    processes = RankProcesses()
    code = processes.run(launcher_command(hostfile, backend, port))
    return None if processes.is_stopped else code


def launcher_command(
    hostfile: str, backend: str, port: int, lender: Path | None = None
) -> list[str]:
    """The command that runs this one on every machine of `hostfile`. Raises InvalidConfig.

    port: the first one of the ring
    lender: where rank 0, if it is on this machine, gets its listener
    """
    if not Path(hostfile).is_file():
        raise InvalidConfig(f"hostfile={hostfile} does not exist.", option="hostfile")
    program = shutil.which("mlx.launch") or str(Path(sys.executable).with_name("mlx.launch"))
    chosen = [] if backend == "any" else ["--backend", backend]
    for name in _HANDED_ON:
        if (value := os.environ.get(name)) is not None:
            chosen += ["--env", f"{name}={value}"]
    if lender is not None:
        chosen += ["--env", f"{LENDER}={lender}"]
    launcher = [program, "--hostfile", hostfile, "--starting-port", str(port), *chosen, "--"]
    return [*launcher, *own_command()]


def own_command() -> list[str]:
    """This process's command."""
    return [sys.executable, "-m", "mlxserve", *sys.argv[1:]]


def _say(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has just ended
        process.stdin.write(text)
        process.stdin.flush()
