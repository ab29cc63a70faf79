"""Says how to add packages to this installation, whichever way it was installed.

mlxserve is installed from a checkout, as a tool of uv or into a virtual environment, which may have no pip: the
usual `pip install 'mlxserve[mcp]'` would fail, or install into another Python.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

_NAME = "mlxserve"
_RECEIPT = "uv-receipt.toml"  # in the environment of a tool of uv


def extra_command(extra: str) -> str:
    """Return the command that adds an extra, such as `documents`, to this installation."""
    origin = _origin()
    folder = _folder(origin)
    tool = _tool_extras()
    extras = ",".join(sorted({extra, *(tool or ())}))
    requirement = _quoted(f"{_NAME if folder is None else folder}[{extras}]")
    if tool is not None:
        return f"uv tool install --reinstall {requirement}"
    is_editable = bool(origin.get("dir_info", {}).get("editable"))
    return f"{_installer()} {'-e ' if is_editable else ''}{requirement}"


def package_command(*requirements: str, flags: str = "") -> str:
    """Return the command that installs packages next to mlxserve."""
    words = [*filter(None, [flags]), *map(shlex.quote, requirements)]
    return f"{_installer()} {' '.join(words)}"


def _installer() -> str:
    python = _quoted(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def _quoted(path: str) -> str:
    """Quote for a shell, with ~ for the user's folder: errors reach others, whom its name does not concern."""
    home = f"{Path.home()}/"
    if path.startswith(home):
        return f"~/{shlex.quote(path.removeprefix(home))}"
    return shlex.quote(path)


def _origin() -> Mapping[str, Any]:
    """Return what pip or uv have written about where mlxserve came from; empty for an index."""
    try:
        text = distribution(_NAME).read_text("direct_url.json")
        origin: Mapping[str, Any] = json.loads(text or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    return origin


def _folder(origin: Mapping[str, Any]) -> str | None:
    """Return the checkout; None if mlxserve came from elsewhere or the checkout is gone."""
    address = urlparse(str(origin.get("url", "")))
    folder = unquote(address.path)
    return folder if address.scheme == "file" and Path(folder).is_dir() else None


def _tool_extras() -> tuple[str, ...] | None:
    """Return the extras with which uv has installed this tool; None if it is not a tool of uv."""
    try:
        receipt = tomllib.loads((Path(sys.prefix) / _RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wanted = receipt.get("tool", {}).get("requirements", [])
    return next((tuple(each.get("extras", ())) for each in wanted if each.get("name") == _NAME), ())
