"""DiskIndex: which records are on disk, as far as is known, and which go first for room."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mlxserve.disk.files import FoundFile


@dataclass(slots=True)
class DiskIndex:
    """Records by file, and those of one identity by name. Sizes in bytes."""

    files: dict[Path, FoundFile] = field(default_factory=dict)
    names: dict[bytes, int] = field(default_factory=dict)  # one identity's, with their sizes
    num_bytes: int = 0  # of that identity
    total: int = 0

    def add(self, file: FoundFile, name: bytes | None) -> None:
        """`name`: None for a record of another identity."""
        self.remove(file.path, name)
        self.files[file.path] = file
        self.total += file.size
        if name is not None:
            self.names[name] = file.size
            self.num_bytes += file.size

    def remove(self, path: Path, name: bytes | None) -> None:
        """Forget a record; nothing happens if it is not known."""
        if (old := self.files.pop(path, None)) is not None:
            self.total -= old.size
            if name is not None:
                self.num_bytes -= self.names.pop(name)

    def least_used(self, num_bytes: int) -> list[Path]:
        """The least recently used records, with at least `num_bytes` together; or all records."""
        found: list[Path] = []
        for file in sorted(self.files.values(), key=lambda each: each.used):
            if num_bytes <= 0:
                break
            num_bytes -= file.size
            found.append(file.path)
        return found
