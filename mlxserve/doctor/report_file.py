"""The report file: one JSON file about this machine, to attach to an issue.

    {"report": "mlxserve doctor", "version": 1, "created": ..., "model": ...,
     "findings": [{"name", "value", "grade"}], "figures": [{"name", "unit", "ours", "mlx_lm",
     "absent"}], "chosen": {...}, "is_complete": true}

It holds no secret and names nobody: the home folder is written as `~`, the user's name elsewhere in a
path as `USER`, and of the environment only mlx's limits are read.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxserve.core.errors import InvalidConfig
from mlxserve.doctor.finding import Finding
from mlxserve.doctor.measurement import Measurement

VERSION = 1


class ReportFile:
    """The report, rewritten with every addition: an interrupted run leaves a valid file."""

    def __init__(self, path: Path, model: str) -> None:
        """Raises InvalidConfig if the file cannot be written, as do the other methods."""
        self._path = path
        self._report: dict[str, Any] = {
            "report": "mlxserve doctor",
            "version": VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": model,
            "is_complete": False,
            "findings": [],
            "figures": [],
            "chosen": {},
        }
        self._write()

    def add(self, item: Finding | Measurement) -> None:
        kind = "findings" if isinstance(item, Finding) else "figures"
        self._report[kind].append(asdict(item))
        self._write()

    def complete(self, chosen: dict[str, Any]) -> None:
        """Add the engine's choices, and mark the report as complete."""
        self._report |= {"chosen": chosen, "is_complete": True}
        self._write()

    def _write(self) -> None:
        text = json.dumps(anonymous(self._report), indent=1, ensure_ascii=False)
        try:
            self._path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidConfig(
                f"--report {self._path}: {error.strerror}. Name a file in a folder that exists, "
                "where there is space."
            ) from error


def anonymous(value: Any) -> Any:
    """Replace the home folder and the user's name in every string of the value."""
    if isinstance(value, str):
        return _anonymous_text(value)
    if isinstance(value, dict):
        return {anonymous(key): anonymous(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [anonymous(item) for item in value]
    return value


def _anonymous_text(text: str) -> str:
    home = Path.home()
    # macOS shows some folders by two names, of which one is a link.
    for folder in sorted({str(home), os.path.realpath(home)}, key=len, reverse=True):
        if len(folder) > 1:
            text = re.sub(rf"{re.escape(folder)}(?![\w.-])", "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A number without a name.
        return text
    return re.sub(rf"(?<=[/\\]){re.escape(user)}(?![\w.-])", "USER", text)
