"""The cache of several ranks grows in pieces: each rank one of its own layers between two steps."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import mlx.nn as nn
import pytest

from metal_kernels.choice import select_backend
from mlxserve.cache.kv import KVPool
from mlxserve.cache.window_kv import WindowKV, pools_of
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.rank_group import RankGroup
from mlxserve.model.runner import ModelRunner
from mlxserve.ranks.follower import Follower
from mlxserve.ranks.lead import Lead
from mlxserve.ranks.wire import Channel, FrameKind, RankFrame
from mlxserve.ranks.worker import RankWorker


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    """Two layers with a window, and two without."""
    types = ["sliding_attention", "full_attention"] * 2
    return prepare(*build_model("gpt_oss", num_hidden_layers=4, layer_types=types), "tiny")


def _pools(loaded: LoadedModel) -> tuple[KVPool, WindowKV]:
    return pools_of(loaded.layers, select_backend("cpu"), 16, (9, 9), (3, 3))


class _Told:
    """What rank 1 was told, until rank 0 closes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def frames(self) -> Iterator[RankFrame]:
        while (frame := self._channel.receive()).kind is not FrameKind.CLOSE:
            yield frame


def _no_group() -> RankGroup:
    raise AssertionError("the ranks do not meet in this test")


def test_each_rank_grows_a_layer_at_a_time_ahead_of_need(loaded: LoadedModel) -> None:
    (kv, windows), (kv_1, windows_1) = _pools(loaded), _pools(loaded)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        lead = Lead({1: Channel(here)}, timeout=60, join_group=_no_group)
        runner = ModelRunner(loaded, kv, workers=lead, windows=windows)
        follower, group = cast(Follower, _Told(Channel(there))), cast(RankGroup, None)
        worker = RankWorker(group, follower, loaded, kv_1, windows=windows_1)
        runner.back_ahead("pages", 5)
        runner.back_ahead("windows", 6)
        lead.close()
        worker.run()
    for pool, num_pages in ((kv, 5), (kv_1, 5), (windows.kv, 6), (windows_1.kv, 6)):
        assert (_pages_of(pool), pool.num_backed) == ([num_pages, 3], 3)


def _pages_of(pool: KVPool) -> list[int]:
    """For which each layer has memory."""
    keys = pool.arrays()[: len(pool.specs)]
    return [
        array.size // (pool.page_size * spec.kv_heads * spec.row_widths[0])
        for array, spec in zip(keys, pool.specs, strict=True)
    ]
