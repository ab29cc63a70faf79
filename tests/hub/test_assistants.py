"""Assistants among the models on this machine: known for what they are, and refused as models that answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.catalog import Origin, entry_of
from mlxserve.hub.files import find_model
from mlxserve.hub.unsupported_formats import describe_kind
from mlxserve.model.load import load
from tests.assistants import write_assistant


@pytest.fixture
def folder(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return write_assistant(tmp_path / "assistant", model_folder("gemma4_text"))


def test_an_assistant_is_listed_for_drafts_and_keeps_no_cache(folder: Path) -> None:
    entry = entry_of("a", Origin.FOLDER, folder)
    assert entry is not None
    assert entry.purpose == "draft"
    assert entry.draft_size(2) == entry.kv_size(2) == entry.window_size(2) == 0
    assert entry.weight_size > 0


def test_an_assistant_answers_nothing_alone(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"is an assistant of Gemma 4.*--draft-model"):
        load(find_model(str(folder)), is_metal=False, memory_limit=1 << 30)
    assert describe_kind({"model_type": "gemma4"}) is None
