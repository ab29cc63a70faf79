"""Packages of npm: beside the programs on the PATH, or installed for all of the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SECONDS = 120


def package_folder(*packages: str) -> Path:
    """Return the folder of these packages. Skips the test where they are not installed."""
    missing = f"npm has not installed {' '.join(packages)} beside the programs on the PATH"
    if shutil.which("npm") is None:
        pytest.skip(missing)
    folders = [Path(entry).parent for entry in os.environ["PATH"].split(os.pathsep)]
    root = subprocess.run(
        ["npm", "root", "--global"], capture_output=True, text=True, check=True
    ).stdout
    for folder in (*folders, Path(root.strip())):
        if all((folder / package).is_dir() for package in packages):
            return folder
    pytest.skip(missing)


def run_node(arguments: list[str], variables: Mapping[str, str] | None = None) -> Any:
    """Return the JSON that a script prints."""
    ended = subprocess.run(
        ["node", *arguments],
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2_000:]
    return json.loads(ended.stdout)
