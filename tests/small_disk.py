"""A small disk, which a module of the tests fills in a process of its own."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_IN_A_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
_MOUNT = 'mount -t tmpfs -o size={size} tmpfs "$0"'
_PIECE = 1 << 16


def run_on_small_disk(folder: Path, size: str, module: str, *args: object) -> list[str]:
    """Run `python -m module folder *args` with a disk of `size` at `folder`. Returns the lines it prints.

    Skips where a disk cannot be mounted.
    """
    mount = _MOUNT.format(size=size)
    if shutil.which("unshare") is None or _run(mount, folder).returncode:
        pytest.skip("a small disk cannot be mounted here")
    done = _run(f'{mount} && exec "$@"', folder, sys.executable, "-m", module, folder, *args)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.splitlines()


def _run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_IN_A_NAMESPACE, script, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=_ROOT,
        check=False,
    )


def fill(folder: Path) -> None:
    """Fill the disk to its last byte with a file, `filled`."""
    with (folder / "filled").open("ab", buffering=0) as file:
        size = _PIECE
        while size:
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            size //= 2
    assert os.statvfs(folder).f_bavail == 0
