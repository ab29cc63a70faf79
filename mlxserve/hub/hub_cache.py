"""huggingface_hub's download folder, read without importing it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def hub_cache() -> Path:
    """Return the folder, from huggingface_hub's environment variables."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"
    )
    return Path(home).expanduser() / "hub"


def repository_folder(repository: str) -> Path:
    """Return the folder of a repository, which need not exist."""
    return hub_cache() / f"models--{repository.replace('/', '--')}"


def repositories() -> Iterator[str]:
    """Names of the cached repositories."""
    for folder in sorted(hub_cache().glob("models--*--*")):
        yield folder.name.removeprefix("models--").replace("--", "/", 1)


def snapshots(repository: str) -> list[Path]:
    """Folders of a repository's cached versions, newest first."""
    revisions = (repository_folder(repository) / "snapshots").glob("*")
    folders = [path for path in revisions if path.is_dir()]
    return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)
