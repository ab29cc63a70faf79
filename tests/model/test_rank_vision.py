"""Vision of a divided model: rank 0 checks it with the first layers, and every rank sees or none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from metal_kernels.reading import read
from mlxserve.hub.files import ModelFiles, find_model
from mlxserve.model import rank_vision
from mlxserve.model.attention import choose_attention
from mlxserve.model.load import LoadedModel, load, read_model
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.rank_vision import num_first_layers, vision_of_ranks
from mlxserve.model.shared_features import RemoteVision, SharedFeatures
from mlxserve.model.shown_pictures import Features
from mlxserve.model.vision import Vision
from mlxserve.model.vision_check import NoVision
from tests.model.small_vision import write_vision_model


class OneAfterTheOther:
    """Two ranks in one process: what rank 0 sends is kept until rank 1 takes part."""

    def __init__(self, rank: int, sent: list[Any]) -> None:
        self.rank, self.size, self.split = rank, 2, Split.HEADS
        self.is_lead = rank == 0
        self._sent = sent

    def _from_lead(self, value: Any) -> Any:
        if not self.is_lead:
            return self._sent.pop(0)
        self._sent.append(value)
        return value

    def from_lead(self, numbers: Sequence[int]) -> list[int]:
        found: list[int] = self._from_lead(list(numbers))
        assert len(found) == len(numbers)
        return found

    def all_min(self, number: int) -> int:
        return int(self._from_lead(number))

    def share(self, array: mx.array) -> mx.array:
        found: mx.array = self._from_lead(array)
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = write_vision_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")
    return find_model(str(folder))


def on_rank(rank: int, sent: list[Any], files: ModelFiles, limit: int = 1 << 32) -> Any:
    loaded = load(files, is_metal=False, memory_limit=1 << 32)
    group = cast("RankGroup", OneAfterTheOther(rank, sent))
    divided: LoadedModel = replace(loaded, group=group)
    choose = partial(choose_attention, "cpu", may_fuse=False)
    return vision_of_ranks(files, divided, choose, is_metal=False, memory_limit=limit)


@pytest.mark.slow
def test_rank_0_sees_and_the_others_learn_how(files: ModelFiles) -> None:
    sent: list[Any] = []
    first = on_rank(0, sent, files)
    other = on_rank(1, sent, files)
    assert isinstance(first, Vision)
    assert isinstance(other, RemoteVision)
    assert sent == []
    assert first.planned_nbytes(100) > other.planned_nbytes(100) > other.planned_nbytes(10) > 0


def test_if_rank_0_does_not_see_no_rank_does(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_vision, "check_vision", lambda *_: 1 / 0)
    sent: list[Any] = []
    with pytest.raises(NoVision, match="qwen3_vl model cannot be served: ZeroDivisionError"):
        on_rank(0, sent, files)
    with pytest.raises(NoVision, match="rank 0 does not see"):
        on_rank(1, sent, files)
    assert sent == []


def test_layers_for_which_rank_0_has_no_memory_are_refused(files: ModelFiles) -> None:
    size = load(files, is_metal=False, memory_limit=1 << 32).weight_size
    with pytest.raises(NoVision, match=r"3 whole layers, which need 0\.0 GiB beside its part, and"):
        on_rank(0, [], files, limit=size)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("qwen3_vl", 3),  # features are added after two
        ("qwen3_5", 2),  # the second attends
        ("gemma3", 2),  # the second sees everything
        ("mistral3", 1),
    ],
)
def test_the_first_layers_have_one_of_each_kind(kind: str, count: int, tmp_path: Path) -> None:
    files = find_model(str(write_vision_model(tmp_path, kind)))
    model, config = read_model(files, is_metal=False)
    assert num_first_layers(model, config) == count
    rank_vision.keep_first_layers(model, count)
    names = [name for name, _ in tree_flatten(model.parameters()) if f".layers.{count}." in name]
    assert names == []
    assert len(model.make_cache() if hasattr(model, "make_cache") else model.layers) == count


def test_layers_that_share_keys_are_refused(tmp_path: Path) -> None:
    files = find_model(str(write_vision_model(tmp_path, "gemma4")))
    model, config = read_model(files, is_metal=False)
    with pytest.raises(ValueError, match="its layers share keys, and rank 0 checks images with"):
        num_first_layers(model, config)


def test_features_of_rank_0_are_those_of_all() -> None:
    sent: list[Any] = []
    features = Features(mx.random.normal((3, 8)), (mx.random.normal((3, 8)),))
    groups = [cast("RankGroup", OneAfterTheOther(rank, sent)) for rank in range(2)]
    ways = [SharedFeatures(group, 8, mx.float32, 1) for group in groups]
    for found in (ways[0].share(features, 3), ways[1].share(None, 3)):
        assert (read(found.rows) == read(features.rows)).all()
        assert [read(each).tolist() for each in found.deep] == [
            read(each).tolist() for each in features.deep
        ]
