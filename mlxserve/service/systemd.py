"""Systemd: a user unit on Linux, started at login by the user's own service manager."""

from __future__ import annotations

import os
import re
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

NAME = "mlxserve.service"
_SYSTEMCTL = ("systemctl", "--user")
_UNIT = """\
[Unit]
Description=mlxserve, a local inference server
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
ExecStart={command}
WorkingDirectory=~
{environment}Restart=on-failure
RestartSec=5
KillMode=mixed
TimeoutStopSec={stop_seconds}
StandardOutput=append:{log}
StandardError=append:{log}

[Install]
WantedBy=default.target
"""


class Systemd:
    """The user's instance, through `systemctl --user`."""

    @property
    def unit_file(self) -> Path:
        base = os.environ.get("XDG_CONFIG_HOME")
        return Path(base or Path.home() / ".config", "systemd", "user", NAME)

    def install(self, unit: ServiceUnit) -> None:
        _require_session()
        make_log_folder(unit.log)
        write_unit(self.unit_file, unit_text(unit).encode())
        must(*_SYSTEMCTL, "daemon-reload")
        must(*_SYSTEMCTL, "enable", NAME)
        must(*_SYSTEMCTL, "restart", NAME)

    def uninstall(self) -> None:
        if not self.unit_file.exists():
            return
        _require_session()
        must(*_SYSTEMCTL, "disable", "--now", NAME)
        self.unit_file.unlink(missing_ok=True)
        must(*_SYSTEMCTL, "daemon-reload")
        # Fails if it has not failed.
        command(*_SYSTEMCTL, "reset-failed", NAME)

    def state(self) -> ServiceState:
        _require_session()
        names = "ActiveState,SubState,MainPID,NRestarts,ExecMainStatus"
        shown = must(*_SYSTEMCTL, "show", NAME, "--property", names)
        fields = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        state = fields.get("ActiveState", "unknown")
        text = f"{state} ({fields.get('SubState', 'unknown')})"
        if fields.get("MainPID", "0") != "0":
            text += f", process {fields['MainPID']}"
        if fields.get("NRestarts", "0") != "0":
            text += f", restarted {fields['NRestarts']} times"
        if fields.get("ExecMainStatus", "0") != "0":
            text += f", last exit code {fields['ExecMainStatus']}"
        return ServiceState(state == "active", text)


def unit_text(unit: ServiceUnit) -> str:
    """Return the text of the unit file. Raises InvalidConfig for a text that would end its line."""
    unit.check_texts()
    variables = sorted(unit.environment.items())
    return _UNIT.format(
        command=" ".join(map(_argument, unit.command)),
        environment="".join(f"Environment={_quoted(f'{n}={value}')}\n" for n, value in variables),
        stop_seconds=unit.stop_seconds,
        log=str(unit.log).replace("%", "%%"),
    )


def _argument(text: str) -> str:
    """Quote a word of ExecStart, where `$` has a meaning as well."""
    return _quoted(text.replace("$", "$$"))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if re.fullmatch(r"[A-Za-z0-9_./:=,@+%$-]+", escaped) else f'"{escaped}"'


def _require_session() -> None:
    """Raises ServiceUnavailable without the user's service manager, as in a container."""
    done = command(*_SYSTEMCTL, "show-environment")
    if done.returncode:
        raise ServiceUnavailable(
            f"Your user's systemd cannot be reached ({reason(done)}), so nothing was changed. Log in "
            "to a session of your own, not with su or sudo, or run `loginctl enable-linger`."
        )
