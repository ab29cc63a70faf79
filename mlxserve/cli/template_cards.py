"""What chat templates take, kept in `~/.mlxserve/templates.json`.

Finding it out imports transformers and renders probes in a helper process: more than a second of CPU
each time. A card holds as long as the files of the model and the versions of what reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

from mlxserve.core.config import data_home
from mlxserve.core.version import __version__
from mlxserve.system.files import make_marked_folder, read_own_json, replace_file

Card: TypeAlias = dict[str, Any]

FILE_NAME = "templates.json"
MAX_KEPT = 100  # cards
_MAX_BYTES = 4 << 20
_WEIGHTS = (".safetensors", ".npz", ".bin")  # which have no template


def kept_card(place: Path, read: Callable[[], Card | None]) -> Card | None:
    """Return the card of a model's template; `read` finds it out if it is not kept.

    place: the model's folder, or its GGUF file
    """
    file, key = data_home() / FILE_NAME, _fingerprint(place)
    kept = _kept(file)
    if key in kept:
        card = kept[key]["card"]
        return None if card is None else dict(card)
    found = read()
    newest = dict([*kept.items(), (key, {"card": found})][-MAX_KEPT:])
    # Without the file the next call reads it again.
    with contextlib.suppress(OSError, ValueError):
        make_marked_folder(file.parent)
        replace_file(file, json.dumps(newest).encode())
    return found


def _kept(file: Path) -> dict[str, Card]:
    try:
        content = read_own_json(file, _MAX_BYTES)
    except (OSError, ValueError):
        return {}
    return {
        key: entry for key, entry in content.items() if isinstance(entry, dict) and "card" in entry
    }


def _fingerprint(place: Path) -> str:
    """Return a digest of the files that say what the template is, without reading them."""
    files = [place] if place.is_file() else sorted(place.iterdir())
    parts = [str(place.resolve()), __version__, *map(_version, ("transformers", "mlx-lm"))]
    for file in files:
        if file.suffix not in _WEIGHTS and file.is_file():
            state = file.stat()
            parts.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
