"""Choices about tools, in memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class KeptSettings(dict[str, str]):
    async def setting(self, name: str) -> str | None:
        return self.get(name)

    async def set_setting(self, name: str, value: str) -> None:
        self[name] = value


def scripted(*arguments: str, **fields: Any) -> dict[str, Any]:
    """The scripted server's entry."""
    return python("-m", "tests.mcp.scripted_server", *arguments, **fields)


def python(*arguments: str, **fields: Any) -> dict[str, Any]:
    folder = str(Path(__file__).parents[3])
    return {"command": sys.executable, "args": [*arguments], "cwd": folder, **fields}


def write_servers(file: Path, servers: Mapping[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"mcpServers": servers}))
    return file
