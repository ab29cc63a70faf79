"""What llama.cpp's converter does to tensors: the inverse of each action of the product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from mlxserve.hub.gguf import actions
from mlxserve.hub.gguf.actions import size
from tests.hub.gguf.files import Array, in_pairs

Config = Mapping[str, Any]


def _pairs(each: actions.SwapPairs, array: Array, config: Config) -> Array:
    heads = size(each.heads, config)
    rows = len(array) if each.width is None else heads * size(each.width, config)
    return np.concatenate([in_pairs(array[:rows], heads), array[rows:]])


def _minus(each: actions.Plus, array: Array, _: Config) -> Array:
    return array - np.float32(each.number)


def _exponential(_: actions.NegativeLog, array: Array, __: Config) -> Array:
    return -np.exp(array)


def _apart(each: actions.Interleave, array: Array, config: Config) -> Array:
    groups = size(each.groups, config)
    sizes = [size(part, config) // groups for part in each.sizes]
    grouped = array.reshape(groups, -1, *array.shape[1:])
    parts = np.split(grouped, list(accumulate(sizes[:-1])), axis=1)
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def _tiled(each: actions.GroupHeads, array: Array, config: Config) -> Array:
    groups, heads = size(each.groups, config), size(each.heads, config)
    array = np.moveaxis(array, each.axis, 0)
    start = sum(size(part, config) for part in each.first)
    moved = array[start:].reshape(groups, heads // groups, -1, *array.shape[1:]).swapaxes(0, 1)
    array = np.concatenate([array[:start], moved.reshape(array[start:].shape)])
    return np.moveaxis(array, 0, each.axis)


INVERSES: Mapping[type, Callable[[Any, Array, Config], Array]] = {
    actions.SwapPairs: _pairs,
    actions.Plus: _minus,
    actions.NegativeLog: _exponential,
    actions.Interleave: _apart,
    actions.GroupHeads: _tiled,
}


def undone(array: Array, path: tuple[actions.Action, ...], config: Config) -> Array:
    """A parameter as the file has it. A part (`actions.TensorPart`) stays one: `small_files` joins them."""
    for action in reversed(path):
        if not isinstance(action, actions.TensorPart):
            array = INVERSES[type(action)](action, array, config)
    return array
