"""The identity of a chat file, by which programs find out that they share their chats.

A random token inside tells one file from another, and its place on the disk tells it from a copy.
"""

from __future__ import annotations

import hashlib
import secrets

from mlxserve.history.chat_file import StoreError
from mlxserve.history.store import Store

_TOKEN = "store"  # setting: a text that no other file has


def identity_of(store: Store) -> str:
    """Return what names the file of these chats on this machine.

    Empty in memory, and if the file cannot be written: such chats are shared with nobody.
    """
    if store.file is None:
        return ""
    try:
        if store.setting(_TOKEN) is None:
            store.set_setting(_TOKEN, secrets.token_hex(8))
        place = store.file.stat()
    except (OSError, StoreError):
        return ""
    named = f"{store.setting(_TOKEN)} {place.st_dev} {place.st_ino}"
    return hashlib.sha256(named.encode()).hexdigest()[:16]
