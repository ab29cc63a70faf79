"""Weights are kept once they are whole. tests/tui/test_download.py downloads over HTTP."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

from mlxserve.core.errors import ModelNotFound
from mlxserve.hub.download import fetch_weights

WEIGHTS = b"0123456789"
ETAG = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the weights of a repository with one file of them are kept."""
    card = SimpleNamespace(sha="c", siblings=[SimpleNamespace(rfilename="model.safetensors")])

    def send(url: str, file: BinaryIO, *, resume_size: int, **_: Any) -> None:
        file.write(WEIGHTS[resume_size:])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_: card)
    monkeypatch.setattr(
        huggingface_hub,
        "get_hf_file_metadata",
        lambda _: SimpleNamespace(etag=ETAG, size=len(WEIGHTS)),
    )
    monkeypatch.setattr(file_download, "http_get", send)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path / "models--some--model" / "blobs"


def test_a_download_goes_on_where_it_was_interrupted(blobs: Path) -> None:
    blobs.mkdir(parents=True)
    (blobs / f"{ETAG}.part").write_bytes(WEIGHTS[:4])
    fetch_weights("some/model")
    assert [(file.name, file.read_bytes()) for file in blobs.iterdir()] == [(ETAG, WEIGHTS)]


def test_weights_that_arrive_damaged_are_not_kept(blobs: Path) -> None:
    blobs.mkdir(parents=True)
    (blobs / f"{ETAG}.part").write_bytes(b"xxxx")
    with pytest.raises(ModelNotFound, match="arrived damaged"):
        fetch_weights("some/model")
    assert list(blobs.iterdir()) == []
