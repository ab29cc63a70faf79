"""ServiceUnit: the command, environment and log of the service."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxserve.core.errors import InvalidConfig

# Folders and files that a login shell may set and a service manager does not know. No keys: units
# can be read by other users, and so can the environment of what they run.
_CARRIED = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "MLXSERVE_BLAS",
    "MLXSERVE_CONFIG",
    "MLXSERVE_HOME",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
)
# Seconds after the drain, when the server ends by itself.
_STOP_MARGIN = 15.0


@dataclass(frozen=True, slots=True)
class ServiceUnit:
    """A service to install.

    command: the program and its arguments
    environment: variables it is started with
    log: file that its output is appended to
    stop_seconds: how long it may take to stop before it is killed
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    stop_seconds: int

    @classmethod
    def from_flags(cls, flags: Sequence[str], drain_seconds: float) -> ServiceUnit:
        """Unit of `mlxserve serve` with these flags.

        Raises InvalidConfig for control characters.
        """
        command = (sys.executable, "-m", "mlxserve", "serve", *flags)
        environment = {name: value for name in _CARRIED if (value := os.environ.get(name))}
        unit = cls(command, environment, log_file(), int(drain_seconds + _STOP_MARGIN))
        unit.check_texts()
        return unit

    def check_texts(self) -> None:
        """Raises InvalidConfig for a text that would end its line of a unit file, or start another."""
        for text in (*self.command, *self.environment, *self.environment.values(), str(self.log)):
            if not text.isprintable():
                raise InvalidConfig(
                    f"{text!r:.80} cannot be part of a service: it is not printable."
                )


def log_file() -> Path:
    """Return the file that the service's output is appended to."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Logs" / "mlxserve" / "service.log"
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base or Path.home() / ".local" / "state", "mlxserve", "service.log")


def last_lines(file: Path, count: int) -> list[str]:
    """Return the end of a log; empty without one."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - count * 1_000))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
