"""Keeps the text of the owner's key in memory, in the place of own-key.json."""

from __future__ import annotations

from mlxserve.api.access.keys import Key, digest_of


class KeptSecret:
    """The name and the text of the owner's key; empty without one."""

    def __init__(self) -> None:
        self.name = ""
        self.secret = ""

    def fits(self, key: Key) -> bool:
        return digest_of(self.secret) == key.sha256

    def keep(self, name: str, secret: str) -> None:
        self.name, self.secret = name, secret

    def forget(self) -> None:
        self.name = self.secret = ""
