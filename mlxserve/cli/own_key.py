"""The owner's key, which our own commands send to this user's servers once other keys exist.

    ~/.config/mlxserve/own-key.json   {"name": "owner", "key": "mlxserve-…"}      readable by its owner only

It is made with the first other key, and again wherever the file holds none that `keys.json` knows as the
owner's. MLXSERVE_API_KEY in the environment goes before it, and is sent to every server. The key of the
file is sent only to addresses at which a server of this user runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mlxserve.api.access.keys import Key, KeyFile, digest_of, usual_file
from mlxserve.cli.running_servers import running_servers
from mlxserve.cli.streams import print_safe
from mlxserve.core.config import config_home
from mlxserve.core.errors import InvalidConfig
from mlxserve.system.files import make_own_folder, read_own_json, replace_file

_MAX_BYTES = 1 << 16


def own_key_file() -> Path:
    return config_home() / "own-key.json"


class OwnKey:
    """The file that stores the owner's key."""

    def read(self) -> tuple[str, str] | None:
        """Return (name, text) of the key; None if it cannot be read."""
        try:
            content = read_own_json(own_key_file(), _MAX_BYTES)
        except (OSError, ValueError):
            return None
        name, key = content.get("name"), content.get("key")
        return (name, key) if isinstance(name, str) and isinstance(key, str) else None

    def fits(self, key: Key) -> bool:
        kept = self.read()
        return kept is not None and digest_of(kept[1]) == key.sha256

    def keep(self, name: str, secret: str) -> None:
        try:
            make_own_folder(own_key_file().parent)
            replace_file(own_key_file(), json.dumps({"name": name, "key": secret}).encode())
        except OSError as error:
            raise InvalidConfig(f"The key cannot be kept in {own_key_file()}: {error}") from error

    def forget(self) -> None:
        with suppress(OSError):
            own_key_file().unlink()


def usual_keys() -> KeyFile:
    """Return the default key file, which also holds the owner's key."""
    return KeyFile(usual_file(), OwnKey())


def note(words: str) -> None:
    """Print on stderr: stdout is for a command's result."""
    print_safe(words, to=sys.stderr)


def owner_key(tell: Callable[[str], None] = note) -> str | None:
    """Return the text of the owner's key; None if there are no keys. Raises InvalidConfig.

    Earlier versions stored the first key here that was made for anybody. It is replaced, and `tell`
    is called.
    """
    file, own = usual_keys(), OwnKey()
    keys = file.read()
    if not keys:
        return None
    before = own.read()
    if not any(key.is_owner and own.fits(key) for key in keys):
        file.renew_owner()
        tell(_replaced(before[0] if before else None))
    kept = own.read()
    return None if kept is None else kept[1]


def _replaced(name: str | None) -> str:
    if name is None:
        return "Our own commands on this machine have a key of their own now, with the scope admin."
    return (
        "Our own commands on this machine have a key of their own now, with the scope admin; the key "
        f"{name!r} belongs to whoever you gave it to, with the chats that were made with it."
    )


def has_key() -> bool:
    """True if there is a key for this user's servers that need one. Raises InvalidConfig."""
    return bool(os.environ.get("MLXSERVE_API_KEY")) or owner_key() is not None


def key_for(url: str, tell: Callable[[str], None] = note) -> str | None:
    """Return the key for the server at this address; None if it has none. Raises InvalidConfig."""
    if key := os.environ.get("MLXSERVE_API_KEY"):
        return key
    is_ours = url in [server.url for server in running_servers()]
    return owner_key(tell) if is_ours else None
