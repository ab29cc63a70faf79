"""The folder of the disk cache, and its default size."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

DEFAULT_BYTES = 8 << 30
_LARGEST_SHARE = 0.1  # share of the free disk space


def disk_folder(configured: str | None) -> Path:
    """Return the configured folder, or mlxserve/pages in the user's cache folder."""
    if configured:
        return Path(configured).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mlxserve", "pages")


def default_bytes(folder: Path) -> int:
    """8 GiB, or a tenth of the free space on the folder's disk if that is less."""
    there = next((parent for parent in (folder, *folder.parents) if parent.exists()), None)
    if there is None:
        return DEFAULT_BYTES
    return min(DEFAULT_BYTES, int(shutil.disk_usage(there).free * _LARGEST_SHARE))
