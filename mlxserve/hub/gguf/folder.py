"""Caches a GGUF header as a model folder without weights: configuration and tokenizer.

Everything that reads a model folder reads this one, and a tokenizer is converted once: a vocabulary
of 262,144 tokens without merges takes seconds. The folder's name is the digest of the header, so
another file has another folder.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.gguf.config import architecture, generation_config, model_config
from mlxserve.hub.gguf.reader import Header
from mlxserve.hub.gguf.tokenizer import build_tokenizer, tokenizer_config
from mlxserve.system.files import make_marked_folder

_LAYOUT = "4"  # version of the written files; another one makes every folder anew


def model_folder(header: Header) -> Path:
    """Return the cached folder, creating it if needed. Raises UnsupportedModel."""
    folder = gguf_home() / f"{header.digest}-{_LAYOUT}-{version('transformers')}"
    if folder.is_dir():
        return folder
    config = model_config(header)
    tokenizer = build_tokenizer(header, architecture(header))
    files = {
        "config.json": config,
        "generation_config.json": generation_config(header),
        "tokenizer_config.json": tokenizer_config(header),
    }
    try:
        make_marked_folder(folder.parent)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
        try:
            tokenizer.save(str(made / "tokenizer.json"))
            for name, content in files.items():
                (made / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
            _rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise UnsupportedModel(
            f"The tokenizer of the GGUF file cannot be written to {folder.parent}: {error}. Make room "
            "there, or set XDG_CACHE_HOME to another folder."
        ) from error
    return folder


def _rename(made: Path, folder: Path) -> None:
    """Move a finished folder into place unless another process was first. Raises OSError."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def gguf_home() -> Path:
    """Return the folder that caches folders made from GGUF files."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mlxserve", "gguf")
