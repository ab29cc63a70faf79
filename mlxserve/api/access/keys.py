"""API keys, the file that stores them, and the ring that looks them up.

A generated key is 256 random bits, so the file stores plain SHA-256 digests: a salt or a slow hash
would only make guessing harder, and nothing can be guessed. A key's text is shown once.

    {"keys": [{"name": "laptop", "scope": "user", "created": "2026-01-31", "sha256": "…",
               "max_requests": null, "requests_per_minute": null, "models": []}, …], "owner": "owner"}

The owner's key, named by "owner", belongs to the user who runs the servers. It exists as long as other keys
do, has no limits, and reaches what requests without a key reach while there are no keys. Earlier versions
read it as one more key of the scope admin.

A running server reads the file again when it changes. While the file is unreadable or open to other
users, none of its keys is accepted.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from mlxserve.core.config import config_home
from mlxserve.core.errors import InvalidConfig
from mlxserve.system.files import make_own_folder, open_regular, own_json, read_opened, replace_file

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_BYTES = 1 << 20  # of a key file, which the event loop reads: about 5,000 keys
_PREFIX = "mlxserve-"  # lets scanners for leaked secrets recognise a key
OWNER = "owner"  # the name of the owner's key


class Scope(StrEnum):
    USER = "user"  # may send requests, and see its own
    ADMIN = "admin"  # may see and change what belongs to any key
    METRICS = "metrics"  # may only read what monitoring polls, of all keys together


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One API key.

    max_requests, requests_per_minute: None means the server's limit
    models: names of the models that it may use; () for all
    """

    name: str
    sha256: str
    scope: Scope = Scope.USER
    created: str = ""
    max_requests: int | None = None
    requests_per_minute: int | None = None
    models: tuple[str, ...] = ()
    is_owner: bool = False

    @classmethod
    def from_secret(cls, secret: str, scope: Scope) -> Key:
        """Build a key that is not from a key file."""
        digest = digest_of(secret)
        return cls(name=digest[:16], sha256=digest, scope=scope)

    @property
    def id(self) -> str:
        """The id that owns the key's chats, pages, prefixes and responses.

        A new key with the name of a revoked one has another id. Empty for the owner's key, as for
        requests without a key.
        """
        if self.is_owner:
            return ""
        return self.name if self.sha256.startswith(self.name) else f"{self.name}-{self.sha256[:16]}"


def usual_file() -> Path:
    """The default key file."""
    return config_home() / "keys.json"


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class OwnSecret(Protocol):
    """Keeps the text of the owner's key for the owner's commands."""

    def fits(self, key: Key) -> bool:
        """True if the stored text is that of this key."""

    def keep(self, name: str, secret: str) -> None:
        """Store the key's name and text. Raises InvalidConfig."""

    def forget(self) -> None: ...


class KeyFile:
    """The keys of `mlxserve key`, in a file that only its owner can read."""

    def __init__(self, path: Path, own: OwnSecret | None = None) -> None:
        """own: stores the owner's key, which is created with the first other key; None creates none."""
        self.path = path
        self._own = own

    def read(self) -> tuple[Key, ...]:
        """Read the keys; () without a file.

        Raises InvalidConfig if the file is damaged or open to other users.
        """
        try:
            with open_regular(self.path) as file:
                mode = os.fstat(file.fileno()).st_mode
                content = own_json(read_opened(file, _MAX_BYTES))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"The key file {self.path} cannot be read: {error}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidConfig(
                f"The key file {self.path} can be read by other users. Restrict it: chmod 600 {self.path}"
            )
        try:
            return tuple(_key(entry, content.get("owner")) for entry in content["keys"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidConfig(f"The key file {self.path} is damaged: {error!r}") from error

    def create(
        self,
        name: str,
        scope: Scope,
        *,
        max_requests: int | None = None,
        requests_per_minute: int | None = None,
        models: Sequence[str] = (),
    ) -> str:
        """Add a key and return its text, which is not stored. Raises InvalidConfig."""
        if not _NAME.fullmatch(name):
            raise InvalidConfig(
                f"The name {name[:80]!r} is not valid: use 1 to 64 letters, digits, dots, dashes or "
                "underscores."
            )
        if name.casefold() == OWNER:
            raise InvalidConfig(
                f"The name {name!r} is reserved for your own key, which is made with the first other "
                "key. Choose another name."
            )
        secret = _new_secret()
        key = Key(
            name=name,
            sha256=digest_of(secret),
            scope=scope,
            created=_today(),
            max_requests=max_requests,
            requests_per_minute=requests_per_minute,
            models=tuple(models),
        )
        with self._locked():
            keys = self.read()
            if any(known.name == name for known in keys):
                raise InvalidConfig(
                    f"There is already a key named {name!r}; revoke it or choose another name."
                )
            self._write((*keys, key))
        return secret

    def revoke(self, name: str) -> None:
        """Remove a key; a running server refuses it at once.

        The owner's key is replaced if there are others. Raises InvalidConfig for an unknown name.
        """
        with self._locked():
            keys = self.read()
            rest = tuple(key for key in keys if key.name != name)
            if len(rest) == len(keys):
                known = ", ".join(key.name for key in keys) or "none"
                raise InvalidConfig(f"There is no key named {name[:80]!r}; known: {known}.")
            self._write(rest)

    def renew_owner(self) -> None:
        """Create the owner's key if other keys exist and its text is not stored. Raises InvalidConfig."""
        with self._locked():
            self._write(self.read())

    def version(self) -> tuple[int, ...] | None:
        """A value that changes when the file does; None without a file."""
        try:
            state = self.path.stat()
        except OSError:
            return None
        return state.st_ino, state.st_mtime_ns, state.st_size, state.st_mode

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder: one writer at a time."""
        try:
            make_own_folder(self.path.parent)
            folder = os.open(self.path.parent, os.O_RDONLY)
        except OSError as error:
            raise InvalidConfig(f"The folder of {self.path} cannot be used: {error}") from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _with_owner(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Return the keys with the owner's, which exists as long as others do."""
        others = [key for key in keys if not key.is_owner]
        if self._own is None:
            return keys if others else ()
        if not others:
            self._own.forget()
            return ()
        if kept := [key for key in keys if key.is_owner and self._own.fits(key)]:
            return (*kept, *others)
        name, secret = _free_name(others), _new_secret()
        self._own.keep(name, secret)
        owner = Key(
            name=name,
            sha256=digest_of(secret),
            scope=Scope.ADMIN,
            created=_today(),
            is_owner=True,
        )
        return (owner, *others)

    def _write(self, keys: Sequence[Key]) -> None:
        """Write the file atomically: a reader sees the old one or the new one."""
        keys = self._with_owner(keys)
        owner = [("owner", key.name) for key in keys if key.is_owner]
        content = {"keys": [_entry(key) for key in keys], **dict(owner)}
        text = json.dumps(content, indent=2) + "\n"
        if len(text) > _MAX_BYTES:
            raise InvalidConfig(f"{self.path} has no room for another key. Revoke some.")
        try:
            replace_file(self.path, text.encode(), is_synced=True)
        except OSError as error:
            raise InvalidConfig(f"The key file {self.path} cannot be written: {error}") from error


def _new_secret() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _free_name(others: Sequence[Key]) -> str:
    """Return a free name for the owner's key: earlier versions did not reserve OWNER."""
    taken = {key.name.casefold() for key in others}
    names = (OWNER, *(f"{OWNER}-{number}" for number in range(2, len(others) + 3)))
    return next(name for name in names if name not in taken)


def _entry(key: Key) -> dict[str, Any]:
    return {name: value for name, value in asdict(key).items() if name != "is_owner"}


def _key(entry: dict[str, Any], owner: Any) -> Key:
    models = entry.get("models", [])
    if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
        raise ValueError("the models of an entry are not a list of names")
    scope, is_owner = Scope(entry["scope"]), entry["name"] == owner
    key = Key(**{**entry, "scope": scope, "models": tuple(models), "is_owner": is_owner})
    if not _NAME.fullmatch(key.name) or not _DIGEST.fullmatch(key.sha256):
        raise ValueError(f"an entry has an invalid name or digest: {key.name!r}")
    for limit in (key.max_requests, key.requests_per_minute):
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"a limit of {key.name!r} is not a whole number above 0")
    if key.is_owner and key.scope is not Scope.ADMIN:
        raise ValueError(f"the owner's key {key.name!r} does not have the scope admin")
    return key


class Keyring:
    """All valid keys: fixed ones from the options, and those of a file."""

    def __init__(
        self,
        fixed: Sequence[Key] = (),
        file: KeyFile | None = None,
        *,
        stays_locked: bool = False,
    ) -> None:
        """Read the key file.

        stays_locked: require a key even after the last one was revoked

        Raises InvalidConfig if the file is damaged or open to other users.
        """
        self._stays_locked = stays_locked
        self._fixed = tuple(fixed)
        self._file = file
        self._version = file.version() if file else None
        self._filed = file.read() if file else ()
        self._last_read = self._filed
        self._is_locked = bool(self._fixed or self._filed)
        self._on_revoked: list[Callable[[Key], None]] = []

    @property
    def is_locked(self) -> bool:
        """True if requests need a key. Removing the last key unlocks the ring; a lost file does not."""
        self.refresh()
        return self._is_locked

    @property
    def num_keys(self) -> int:
        """Number of valid keys."""
        self.refresh()
        return len(self._fixed) + len(self._filed)

    @property
    def owner(self) -> Key | None:
        """The owner's key; None if there is none."""
        self.refresh()
        return next((key for key in self._filed if key.is_owner), None)

    def on_revoked(self, tell: Callable[[Key], None]) -> None:
        """Call `tell` with each key that disappears from the file.

        The owner's key ends with the last other one, and its requests need no key from then on:
        that revokes nothing. An unreadable or untrusted file revokes nothing either: its keys are
        refused until it can be read.
        """
        self._on_revoked.append(tell)

    def has(self, key_id: str) -> bool:
        """True if the key with this id is valid."""
        self.refresh()
        return any(key.id == key_id for key in (*self._fixed, *self._filed))

    def find(self, secret: str) -> Key | None:
        """Return the key with this text, or None. Compares all keys in constant time."""
        self.refresh()
        digest = digest_of(secret)
        match = None
        for key in (*self._fixed, *self._filed):
            if hmac.compare_digest(digest, key.sha256):
                match = key
        return match

    def refresh(self) -> None:
        """Reload the file if it has changed."""
        if self._file is None or (version := self._file.version()) == self._version:
            return
        self._version = version
        was_locked = self._is_locked
        self._filed, self._is_locked = (), True  # until the file has been read
        try:
            self._filed = self._file.read()
        except InvalidConfig as error:
            logger.error("The keys of the key file are not accepted: %s", error)
            return
        stays_locked = was_locked and (self._stays_locked or version is None)
        self._is_locked = bool(self._fixed or self._filed) or stays_locked
        logger.info("Read the key file again: %d keys.", len(self._filed))
        valid = {key.sha256 for key in (*self._fixed, *self._filed)}
        revoked = [
            key
            for key in self._last_read
            if key.sha256 not in valid and (self._is_locked or not key.is_owner)
        ]
        self._last_read = self._filed
        for key in revoked:
            for tell in self._on_revoked:
                tell(key)
