"""The terminal's folder: `$MLXSERVE_HOME`, or `~/.mlxserve`. Readable by the owner only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mlxserve.system.files import make_marked_folder

MAX_LOGS = 10


@dataclass(frozen=True, slots=True)
class Home:
    folder: Path

    @classmethod
    def from_environment(cls) -> Home:
        folder = os.environ.get("MLXSERVE_HOME")
        return cls(Path(os.path.expanduser(folder)) if folder else Path.home() / ".mlxserve")

    @property
    def chats(self) -> Path:
        return self.folder / "chat.sqlite"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def presets(self) -> Path:
        return self.folder / "presets.toml"

    @property
    def exports(self) -> Path:
        return self.folder / "exports"

    def create(self) -> None:
        """Create the folders, readable by their owner only. Raises OSError."""
        make_marked_folder(self.logs)

    def new_log(self, name: str) -> Path:
        """Create an empty log file and remove all but the newest `MAX_LOGS`. Raises OSError."""
        self.create()
        path = self.logs / name
        os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        logs = sorted(self.logs.glob("*.log"), key=lambda log: log.stat().st_mtime)
        for old in logs[:-MAX_LOGS]:
            old.unlink(missing_ok=True)
        return path
