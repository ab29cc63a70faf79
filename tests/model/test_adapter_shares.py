"""A rank by heads takes of an adapter what it has of each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.nn.layers.distributed import AllToShardedLinear
from mlx_lm.utils import load_model

from metal_kernels.reading import read
from mlxserve.model import adapter_shares
from mlxserve.model.adapter_shares import Share, sizes_of
from mlxserve.model.split_by_heads import split_by_heads
from tests import heads
from tests.conftest import build_model


class Place(NamedTuple):
    """A rank as mlx-lm's `shard` asks for it."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


class Group(NamedTuple):
    mx_group: Place
    size: int


def matrices(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that adapters may change."""
    return {
        path: each for path, each in model.named_modules() if sizes_of(each) or is_divided(each)
    }


def is_divided(layer: nn.Module) -> bool:
    return type(layer).__module__ == AllToShardedLinear.__module__


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "size"),
    [("llama", 2), ("llama", 4), ("qwen2", 2), ("qwen3_moe", 2), ("gpt_oss", 2), ("qwen3_5", 2)],
)
def test_shares_are_what_shard_has_left(kind: str, size: int, rank: int, tmp_path: Path) -> None:
    if kind == "qwen3_5":
        model, _ = load_model(heads.write(tmp_path / "model", kind))
    else:
        model, _ = build_model(kind)
    whole = {path: module.weight for path, module in matrices(model).items()}
    group: Any = Group(Place(rank, size), size)
    split_by_heads(model, group, "m", kind)
    shares = adapter_shares.shares_of(model, group, "m", whole)
    assert any(share.inputs is not None for share in shares.of.values())
    assert any(share.outputs is not None for share in shares.of.values())
    for path, module in matrices(model).items():
        wanted = whole[path]
        # (input, rank) and (rank, output) of an adapter that is the layer's own matrix.
        ones = mx.eye(wanted.shape[-1])
        a, b = shares.of.get(path, Share()).of(ones, wanted.swapaxes(-1, -2))
        assert np.array_equal(read(a @ b), read(module.weight.swapaxes(-1, -2))), path
