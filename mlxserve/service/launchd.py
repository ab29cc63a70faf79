"""Launchd: a launch agent on macOS, started at login by the user's own session."""

from __future__ import annotations

import os
import plistlib
import re
import time
from pathlib import Path

from mlxserve.service.manager import (
    ServiceState,
    ServiceUnavailable,
    command,
    make_log_folder,
    must,
    reason,
    write_unit,
)
from mlxserve.service.unit import ServiceUnit

LABEL = "org.mlxserve.server"
_FIELD = re.compile(r"^\t(state|pid|runs|last exit code) = (.*)$", re.MULTILINE)
# Launchctl's "Input/output error": the old service has not gone yet.
_BUSY = 5
_GONE_SECONDS = 30.0
_TICK = 0.2


class Launchd:
    """The user's graphical session, through `launchctl`."""

    @property
    def unit_file(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def install(self, unit: ServiceUnit) -> None:
        _require_session()
        make_log_folder(unit.log)
        write_unit(self.unit_file, plist_of(unit))
        command("launchctl", "bootout", _service())  # fails if it is not there
        must("launchctl", "enable", _service())
        self._bootstrap()

    def uninstall(self) -> None:
        if not self.unit_file.exists():
            return
        _require_session()
        command("launchctl", "bootout", _service())
        self.unit_file.unlink(missing_ok=True)

    def state(self) -> ServiceState:
        _require_session()
        done = command("launchctl", "print", _service())
        if done.returncode:
            return ServiceState(False, "not loaded")
        # The first of each name: nested blocks repeat some.
        fields = dict(reversed(_FIELD.findall(done.stdout)))
        text = fields.get("state", "unknown")
        if "pid" in fields:
            text += f", process {fields['pid']}"
        if fields.get("runs", "1") not in ("0", "1"):
            text += f", started {fields['runs']} times"
        if fields.get("last exit code", "0")[:1] not in ("0", "("):
            text += f", last exit code {fields['last exit code']}"
        return ServiceState(fields.get("state") == "running", text)

    def _bootstrap(self) -> None:
        """Load the agent once the previous instance has gone: bootout does not wait for it."""
        deadline = time.monotonic() + _GONE_SECONDS
        arguments = ("launchctl", "bootstrap", _session(), str(self.unit_file))
        while (done := command(*arguments)).returncode == _BUSY and time.monotonic() < deadline:
            time.sleep(_TICK)
        if done.returncode:
            raise ServiceUnavailable(
                f"The agent {self.unit_file} was written, but launchd refuses it: {reason(done)}."
            )


def plist_of(unit: ServiceUnit) -> bytes:
    """Return the agent's property list. Raises InvalidConfig for control characters."""
    unit.check_texts()
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(unit.command),
            "EnvironmentVariables": dict(unit.environment),
            "WorkingDirectory": str(Path.home()),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": unit.stop_seconds,
            "ProcessType": "Interactive",  # others get less of the processor and the disk
            "StandardOutPath": str(unit.log),
            "StandardErrorPath": str(unit.log),
        }
    )


def _session() -> str:
    return f"gui/{os.getuid()}"


def _service() -> str:
    return f"{_session()}/{LABEL}"


def _require_session() -> None:
    """Raises ServiceUnavailable if the user has no graphical session, as over ssh alone."""
    done = command("launchctl", "print", _session())
    if done.returncode:
        raise ServiceUnavailable(
            f"You have no graphical session on this Mac ({reason(done)}), so nothing was changed. Log "
            "in on its screen once, and try again."
        )
