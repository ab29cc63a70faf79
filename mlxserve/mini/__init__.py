"""The model that comes with the package: a few million weights, and what made them.

`model_path()` is all that the server needs. Everything else here (the generator of conversations,
the tokenizer's and the network's training, the evaluation) runs under `python -m mlxserve.mini`
and is imported only there. Importing this module needs the standard library alone.
"""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "mlxserve-mini"


def model_path() -> Path:
    """The folder of the packaged model, in the layout that `mlx_lm.load` reads."""
    return Path(__file__).parent / "model"
