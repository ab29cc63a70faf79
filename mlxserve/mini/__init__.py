"""The model that comes with the package: a few million weights in `model/`.

`model_path()` is all that the server needs; `training/` is how the model was made. Importing this
module needs the standard library alone.
"""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "mlxserve-mini"


def model_path() -> Path:
    """The folder of the packaged model, in the layout that `mlx_lm.load` reads."""
    return Path(__file__).parent / "model"
