"""The API key that our own commands send to this user's servers, so that they go on once keys exist.

    ~/.config/mlxserve/own-key.json   {"name": "laptop", "key": "mlxserve-…"}      readable by its owner only

MLXSERVE_API_KEY in the environment goes before it, and is sent to every server. The key of the file is
sent only to addresses at which a server of this user runs.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from mlxserve.cli.running_servers import running_servers
from mlxserve.config import config_home
from mlxserve.errors import InvalidConfig
from mlxserve.files import make_own_folder, read_own_json, replace_file

_MAX_BYTES = 1 << 16


def own_key_file() -> Path:
    return config_home() / "own-key.json"


def own_key() -> tuple[str, str] | None:
    """(name, text) of the key in the file; None if there is none that can be read."""
    try:
        content = read_own_json(own_key_file(), _MAX_BYTES)
    except (OSError, ValueError):
        return None
    name, key = content.get("name"), content.get("key")
    return (name, key) if isinstance(name, str) and isinstance(key, str) else None


def keep_own_key(name: str, key: str) -> None:
    """Write the file. Raises InvalidConfig."""
    try:
        make_own_folder(own_key_file().parent)
        replace_file(own_key_file(), json.dumps({"name": name, "key": key}).encode())
    except OSError as error:
        raise InvalidConfig(f"The key cannot be kept in {own_key_file()}: {error}") from error


def forget_own_key() -> None:
    with suppress(OSError):
        own_key_file().unlink()


def has_key() -> bool:
    """Whether there is a key for servers of this user that need one."""
    return bool(os.environ.get("MLXSERVE_API_KEY")) or own_key() is not None


def key_for(url: str) -> str | None:
    """The key to send to the server at this address; None if there is none for it."""
    if key := os.environ.get("MLXSERVE_API_KEY"):
        return key
    kept = own_key()
    if kept is None or url not in [server.url for server in running_servers()]:
        return None
    return kept[1]
