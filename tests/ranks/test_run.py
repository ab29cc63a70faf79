"""What rank 0 refuses before any other rank is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.files import find_model
from mlxserve.ranks.local import LocalRanks
from mlxserve.ranks.run import connect


def test_more_ranks_than_layers_are_refused_by_the_config_alone(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(LocalRanks, "start")
    config = EngineConfig().with_options(pipeline_parallel_size=9)
    with pytest.raises(UnsupportedModel, match="3 layers, fewer than pipeline_parallel_size=9"):
        connect(config, find_model(str(model_folder("llama"))))
