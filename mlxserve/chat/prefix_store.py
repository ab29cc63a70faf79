"""PrefixStore: named prefixes, which survive a restart.

    named ──▶ computed, or read from disk ──▶ its pages are pinned
      ▲                                            │
      └────────── the file, at the next start ◀────┘

A name is known as soon as the file is read; its pages follow. The file has tokens and a digest of
the salt, so it does not reveal the salt.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlxserve.core.errors import UnknownPrefix
from mlxserve.system.files import read_own_json, replace_file

log = logging.getLogger("mlxserve.prefixes")

PREFIX_FILE = "prefixes.json"  # in the folder of a model's pages
_FILES = "prefixes*.json*"  # also those of adapters, and damaged ones that were kept aside
_VERSION = 1
_MAX_BYTES = 64 << 20  # of the file, about ten million tokens


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """The tokens of a named prefix. Their pages are pinned under the request that computed them."""

    token_ids: tuple[int, ...]
    salt: bytes  # salt of its pages, a digest
    client: str = ""  # client that added it
    max_share: float = 1.0  # maximum fraction of the pages of prefixes for this client
    request_id: str | None = None  # None if its pages were not computed since the start


def prefix_files(folder: Path) -> list[Path]:
    """All prefix files in the folder of a model's pages."""
    return sorted(file for file in folder.glob(_FILES) if file.is_file())


class PrefixStore:
    """Prefixes by name. Thread-safe."""

    def __init__(self, file: Path | None = None) -> None:
        """file: where to store them; None for this process only. A damaged file is renamed."""
        self._file = file
        self._lock = threading.Lock()
        self._prefixes = dict(_read(file)) if file is not None else {}

    def sizes(self) -> dict[str, int]:
        """Number of tokens of each prefix, by name."""
        with self._lock:
            return {name: len(prefix.token_ids) for name, prefix in self._prefixes.items()}

    def of_salt(self, salt: bytes) -> list[tuple[int, ...]]:
        """The token ids of the prefixes whose pages have this salt."""
        with self._lock:
            return [each.token_ids for each in self._prefixes.values() if each.salt == salt]

    def find(self, name: str) -> NamedPrefix:
        """Return a prefix. Raises UnknownPrefix."""
        with self._lock:
            return self._find(name)

    def put(self, name: str, prefix: NamedPrefix) -> NamedPrefix | None:
        """Name a prefix, and return the one that had the name before."""
        with self._lock:
            old, self._prefixes[name] = self._prefixes.get(name), prefix
            self._write(name, prefix)
            return old

    def remove(self, name: str) -> NamedPrefix:
        """Remove a prefix and return it. Raises UnknownPrefix."""
        with self._lock:
            old = self._find(name)
            del self._prefixes[name]
            self._write(name, None)
            return old

    def missing(self) -> list[tuple[str, NamedPrefix]]:
        """The prefixes whose pages were not computed since the start."""
        with self._lock:
            return [item for item in self._prefixes.items() if item[1].request_id is None]

    def computed(self, name: str, prefix: NamedPrefix, request_id: str) -> bool:
        """Mark a missing prefix as computed. False if it was removed or replaced meanwhile."""
        with self._lock:
            if self._prefixes.get(name) is not prefix:
                return False
            self._prefixes[name] = replace(prefix, request_id=request_id)
            return True

    def _find(self, name: str) -> NamedPrefix:
        prefix = self._prefixes.get(name)
        if prefix is None:
            raise UnknownPrefix.named(name, self._prefixes)
        return prefix

    def _write(self, name: str, prefix: NamedPrefix | None) -> None:
        """Change one name in the file, which another server of this model may have changed as well.

        The file is replaced atomically. A failed write is logged.
        """
        if self._file is None:
            return
        saved = dict(_read(self._file))
        saved.pop(name, None)
        if prefix is not None:
            saved[name] = prefix
        entries = {each: _entry(prefix) for each, prefix in saved.items()}
        text = json.dumps({"version": _VERSION, "prefixes": entries})
        try:
            if len(text) > _MAX_BYTES:
                raise OSError(f"they have more than {_MAX_BYTES} bytes")
            replace_file(self._file, text.encode())
        except OSError as error:
            log.warning("Named prefixes are lost at the end of this process: %s", error)


def _entry(prefix: NamedPrefix) -> dict[str, Any]:
    content = asdict(prefix)
    del content["request_id"]
    return {**content, "salt": prefix.salt.hex()}


def _read(file: Path) -> Iterator[tuple[str, NamedPrefix]]:
    try:
        content = read_own_json(file, _MAX_BYTES)
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']}")
        prefixes = [(str(name), _prefix(entry)) for name, entry in content["prefixes"].items()]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        log.warning("Named prefixes of before cannot be read from %s: %s", file, error)
        _set_aside(file)
        return
    yield from prefixes


def _prefix(entry: dict[str, Any]) -> NamedPrefix:
    """Read an entry. Raises ValueError, KeyError, TypeError, OverflowError."""
    token_ids = tuple(array("i", entry["token_ids"]))
    if not token_ids or min(token_ids) < 0:
        raise ValueError("a prefix has no tokens")
    salt, share = bytes.fromhex(entry["salt"]), float(entry["max_share"])
    return NamedPrefix(token_ids, salt, str(entry["client"]), share)


def _set_aside(file: Path) -> None:
    try:
        os.replace(file, file.with_name(f"{file.name}.damaged"))
    except OSError as error:
        log.debug("%s cannot be renamed: %s", file, error)
