"""ServiceManager: the system's program that starts services at login and restarts failed ones."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlxserve.core.errors import MlxServeError
from mlxserve.service.unit import ServiceUnit

_SECONDS = 60.0  # a command waits for the old server to stop


class ServiceUnavailable(MlxServeError):
    """The service manager is missing or refuses."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """The service's state. `text` is the manager's report, with its process and its last exit."""

    is_running: bool
    text: str


class ServiceManager(Protocol):
    """A service manager. Methods raise ServiceUnavailable."""

    @property
    def unit_file(self) -> Path: ...

    def install(self, unit: ServiceUnit) -> None:
        """Write the unit and start it, or restart it."""

    def uninstall(self) -> None:
        """Stop the service and remove its unit, if there is one."""

    def state(self) -> ServiceState: ...


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the manager's program. Raises ServiceUnavailable if it is missing or hangs."""
    if shutil.which(arguments[0]) is None:
        raise ServiceUnavailable(
            f"There is no `{arguments[0]}` on this machine, so nothing was changed. Let another "
            "supervisor run `mlxserve serve`."
        )
    try:
        return subprocess.run(
            arguments, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceUnavailable(f"`{' '.join(arguments)}` failed: {error}") from error


def must(*arguments: str) -> str:
    """Run a command and return its output. Raises ServiceUnavailable with its error."""
    done = command(*arguments)
    if done.returncode:
        raise ServiceUnavailable(
            f"`{' '.join(arguments)}` failed: {reason(done)}. See `mlxserve service status`."
        )
    return done.stdout


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return a failed command's message, on one line."""
    said = " ".join((done.stderr or done.stdout).split()).rstrip(".")
    return said[:300] or f"exit code {done.returncode}"


def write_unit(file: Path, content: bytes) -> None:
    """Write the unit atomically. Raises ServiceUnavailable."""
    new = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(content)
        new.replace(file)
    except OSError as error:
        raise ServiceUnavailable(f"The unit {file} cannot be written: {error}") from error


def make_log_folder(log: Path) -> None:
    """Create the log's folder. Raises ServiceUnavailable."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ServiceUnavailable(f"The log {log} cannot be written: {error}") from error
