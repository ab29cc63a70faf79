"""How many operations a step's graph has that a GPU is given to compute, by layer.

Views are none. Each kernel that is recorded is one, and so is each op of `mx.fast` (`single_ops`). A lower
bound: MLX also copies where an op does not take a view.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

_OPERATION = re.compile(r'\[label ="(\w+)", shape=rectangle\]')
_VIEWS = frozenset(
    {
        *("AsStrided", "Broadcast", "ExpandDims", "Flatten", "Full", "Reshape", "Slice", "Split"),
        *("Squeeze", "Transpose", "Unflatten"),
    }
)


def dispatches(outputs: Sequence[mx.array]) -> Counter[str]:
    """Operations of the graph of these arrays by their names, without views."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        names = _OPERATION.findall(file.read_text(encoding="utf-8"))
    return Counter(name for name in names if name not in _VIEWS)


def of_a_layer(few: Callable[[], mx.array], more: Callable[[], mx.array]) -> Counter[str]:
    """What a model has with one layer more: `more` than `few`."""
    return dispatches([more()]) - dispatches([few()])
