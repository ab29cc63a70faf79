"""The folder that keeps what was compiled, so that a second run compiles nothing.

Shared libraries are loaded from it, so it must belong to the user alone. Files appear in it by
renaming a finished temporary one: concurrent processes may do the same work twice, and none ever
sees half a file. It may be deleted at any time when no process uses it.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.emulator.errors import CacheNotUsable

VARIABLE = "METAL_EMULATOR_CACHE"


def cache_folder() -> Path:
    """The folder, created for this user alone. Raises CacheNotUsable if others could write it."""
    folder = Path(os.environ.get(VARIABLE) or _default_folder())
    advice = f"set {VARIABLE} to a folder of your own"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        message = f"cannot keep compiled kernels in {folder} ({error.strerror}); {advice}"
        raise CacheNotUsable(message) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CacheNotUsable(
            f"{folder} is not private: compiled kernels are loaded from it, so no other user may "
            f"write there; remove it, or `chmod 700` it if you trust what is in it, or {advice}"
        )
    return folder


def _default_folder() -> Path:
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "metal-emulator"


def digest(*parts: str | bytes) -> str:
    """A name for this content."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:32]


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder inside the cache for unfinished files, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache_folder()) as folder:
        yield Path(folder)


def publish_text(text: str, target: Path) -> None:
    """Make a file with this text visible under its name, in one step."""
    with workspace() as folder:
        (folder / target.name).write_text(text)
        publish(folder / target.name, target)


def publish(finished: Path, target: Path) -> None:
    """Make a finished file of a workspace visible under its final name, in one step."""
    os.replace(finished, target)
