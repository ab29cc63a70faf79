"""The model in the package, for demonstrations and tests. Uses the standard library only."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "mlxserve-mini"


def model_path() -> Path:
    """Return the folder of the included model, in the layout that `mlx_lm.load` reads."""
    return Path(__file__).parents[1] / "mini" / "model"
