"""The model that comes with the package, for demonstrations and tests. Standard library only."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "mlxserve-mini"


def model_path() -> Path:
    """The folder of the packaged model, in the layout that `mlx_lm.load` reads."""
    return Path(__file__).parents[1] / "mini" / "model"
