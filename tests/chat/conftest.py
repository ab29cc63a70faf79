"""A chat over a small model, for the tests of one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxserve.build import build_text_model
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig


@pytest.fixture(scope="module")
def chat(model_folder: Callable[[str], Path]) -> Iterator[TextModel]:
    built = build_text_model(
        EngineConfig().with_options(
            model=str(model_folder("llama")), num_pages=64, page_size=16, disable_log_stats=True
        )
    )
    yield built
    built.close()
