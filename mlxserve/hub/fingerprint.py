"""A model's fingerprint: a digest of its files' contents, independent of folder and times.

The configuration and the tokenizer count whole. Weights are too large for that: their names, sizes
and headers count, and samples of their numbers, so that a fine-tune of the same shapes is another
model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mlxserve.system.files import MAX_TEXT, open_regular, read_file

_LAYOUT = b"1"  # version of the hashed content; another one makes every model another one
_TOKENIZER = ("tokenizer*.json", "tokenizer.model", "vocab.*", "merges.txt", "*.tiktoken")
_LENGTH_SIZE = 8  # bytes, before a safetensors header
_MAX_HEADER = 100 << 20  # the bound of safetensors itself
# The rest of a GGUF header is in the configuration and the tokenizer.
_GGUF_HEADER = 1 << 16
_NUM_SAMPLES, _SAMPLE_SIZE = 16, 4096  # samples of each weight file


def fingerprint(folder: Path, config: Mapping[str, Any], weights: Sequence[Path]) -> str:
    """Return 32 hex digits over the tokenizer and samples of the weights.

    Raises OSError, ValueError.
    """
    digest = blake2b(_LAYOUT, digest_size=16)

    def add(*parts: bytes) -> None:
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)

    add(json.dumps(config, sort_keys=True).encode())
    names = {file for pattern in _TOKENIZER for file in folder.glob(pattern)}
    for file in sorted(names):
        add(file.name.encode(), read_file(file, MAX_TEXT))
    for file in weights:
        add(file.name.encode(), *_parts(file))
    return digest.hexdigest()


def _parts(file: Path) -> list[bytes]:
    """Size, header and samples of a weight file."""
    with open_regular(file) as content:
        size = os.fstat(content.fileno()).st_size
        length = content.read(_LENGTH_SIZE)
        most = _GGUF_HEADER if length.startswith(b"GGUF") else _MAX_HEADER
        header = content.read(min(int.from_bytes(length, "little"), most))
        parts = [size.to_bytes(8, "little"), length, header]
        first = content.tell()
        for number in range(_NUM_SAMPLES):
            content.seek(first + (size - first) * number // _NUM_SAMPLES)
            parts.append(content.read(_SAMPLE_SIZE))
    return parts
