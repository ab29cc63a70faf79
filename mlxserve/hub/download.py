"""Resumable download of weight files: an interrupted download resumes where it stopped.

huggingface_hub (2.x) discards a file that it did not finish, and a weight file has gigabytes. So
each weight file is downloaded here first, into huggingface_hub's cache and under the name that it
looks for; huggingface_hub then finds it there.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from mlxserve.core.errors import ModelNotFound

_WEIGHTS = ("model*.safetensors",)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch_weights(repository: str, patterns: Sequence[str] = _WEIGHTS) -> None:
    """Download the weight files that are missing.

    Raises ModelNotFound, OSError or huggingface_hub's errors.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import repo_folder_name

    try:
        card: Any = HfApi().model_info(repository)
    except (HfHubHTTPError, HTTPError, OSError):
        # Offline, or no such model: the caller's next request reports which.
        return
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    for file in card.siblings or ():
        is_there = (folder / "snapshots" / card.sha / file.rfilename).exists()
        is_wanted = any(fnmatch(file.rfilename, pattern) for pattern in patterns)
        if is_wanted and not is_there:
            _fetch(repository, card.sha, file.rfilename, folder / "blobs")


def _fetch(repository: str, commit: str, name: str, blobs: Path) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, name, revision=commit)
    metadata = get_hf_file_metadata(url)
    if metadata.etag is None or (blobs / metadata.etag).exists():
        return
    blobs.mkdir(parents=True, exist_ok=True)
    part = blobs / f"{metadata.etag}.part"
    with part.open("ab") as file:
        # Another process may be downloading the same file.
        fcntl.flock(file, fcntl.LOCK_EX)
        if (blobs / metadata.etag).exists():
            return
        _resume(url, file, metadata.size)
    if _SHA256.fullmatch(metadata.etag) and _digest(part) != metadata.etag:
        part.unlink()
        raise ModelNotFound(f"{name} of {repository} arrived damaged. Download it again.")
    part.replace(blobs / metadata.etag)


def _resume(url: str, file: BinaryIO, size: int | None) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    http_get(url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=size)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
