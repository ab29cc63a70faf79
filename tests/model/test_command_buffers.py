"""Commits: which steps are evaluated while their layers are called, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import long_chunks
from metal_kernels.long_chunks import CopiedChunks
from metal_kernels.reading import DeviceError
from metal_kernels.x86.backend import X86Backend
from mlxserve.cache.kv import KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step_rows import rows_kept
from mlxserve.model import command_buffers as commits
from mlxserve.model.batch import Batch
from mlxserve.model.command_buffers import Commits
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.rank_group import RankGroup
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

PAGE = 16


class Device:
    """Notes what is begun and what is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[mx.array] = []
        self.waited: list[mx.array] = []
        self.error: Exception | None = None
        monkeypatch.setattr(mx, "async_eval", self.begun.append)
        monkeypatch.setattr(commits, "evaluate", self._wait)

    def _wait(self, array: mx.array) -> None:
        self.waited.append(array)
        if self.error is not None:
            raise self.error


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def layers(number: int) -> list[mx.array]:
    return [mx.array(at) for at in range(number)]


def call(after_layer: Callable[[mx.array], None] | None, keys: list[mx.array]) -> None:
    assert after_layer is not None
    for array in keys:
        after_layer(array)


def numbers(arrays: list[mx.array]) -> list[int]:
    return [int(array) for array in arrays]


def test_each_layer_of_a_long_chunk_is_begun_and_the_oldest_is_waited_for(device: Device) -> None:
    call(Commits(3 * 512).of_step(512, 0, 0), layers(6))
    assert numbers(device.begun) == [0, 1, 2, 3, 4, 5]
    assert numbers(device.waited) == [0, 1, 2], "three layers are under way at the end"


def test_layers_of_few_rows_are_begun_together(device: Device) -> None:
    call(Commits(512).of_step(100, 0, 0), layers(7))
    assert numbers(device.begun) == [2, 5]
    assert numbers(device.waited) == [2], "600 rows"


def test_what_a_step_left_under_way_counts_in_the_next(device: Device) -> None:
    both = Commits(2 * 512)
    call(both.of_step(512, 0, 0), layers(2))
    call(both.of_step(512, 0, 0), layers(1))
    assert numbers(device.waited) == [0]


def test_rows_that_wait_for_a_commit_end_with_their_step(device: Device) -> None:
    both = Commits(512)
    call(both.of_step(200, 0, 0), layers(1))
    call(both.of_step(200, 0, 0), layers(1))
    assert device.begun == []


def test_steps_of_decodes_are_left_to_mlx_unless_their_contexts_are_very_long() -> None:
    assert Commits(512).of_step(64, 64, 64 * 1_000) is None
    assert Commits(512).of_step(64, 64, 64 * 8_000) is not None
    assert rows_kept(64, 64, 64 * 1_000) == 0
    assert rows_kept(65, 64, 0) == 65


def test_after_a_failure_of_the_device_nothing_of_it_is_waited_for_again(device: Device) -> None:
    both = Commits(512)
    device.error = DeviceError("the device failed")
    with pytest.raises(DeviceError):
        call(both.of_step(512, 0, 0), layers(2))
    device.error = None
    device.waited.clear()
    call(both.of_step(512, 0, 0), layers(1))
    assert device.waited == []


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[Any, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


def logits(loaded: LoadedModel, spans: list[tuple[int, int]]) -> np.ndarray:
    """Of (start, rows) chunks, one a sequence."""
    kv = KVPool(loaded.layers, 64 * len(spans), PAGE, X86Backend())
    runner = ModelRunner(loaded, kv)
    chunks = [
        Chunk(
            LiveRequest(Request(str(at), [7] * (start + rows), SamplingParams())),
            start,
            rows,
            as_page_table(range(64 * at, 64 * at + 64)),
            samples=True,
        )
        for at, (start, rows) in enumerate(spans)
    ]
    batch = Batch.from_chunks(chunks, PAGE)
    return np.array(runner.logits(batch, mx.array(batch.tokens)))


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("of_ranks", [False, True])
def test_a_step_with_a_prompt_is_evaluated_layer_by_layer_and_computes_the_same(
    of_ranks: bool, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a rank's part: macOS ends a command buffer that waits for other ranks too long."""
    if of_ranks:
        loaded = replace(loaded, group=cast(RankGroup, object()))
    begun: list[mx.array] = []
    real = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda keys: (begun.append(keys), real(keys)))
    found = logits(loaded, [(3, 1), (0, 300)])
    assert len(begun) == len(loaded.layers)
    begun.clear()
    logits(loaded, [(3, 1), (9, 1)])
    assert begun == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxserve.system.machine.is_metal", lambda: False)
        assert (logits(loaded, [(3, 1), (0, 300)]) == found).all()
    assert begun == []


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "chosen", "copied"),
    [
        (64, mx.float16, {}, 512),
        (64, mx.float32, {}, 0),
        (192, mx.float16, {}, 0),
        (192, mx.float16, {(192, mx.float16): CopiedChunks(256, unfused_heads=4)}, 512 + 338),
    ],
    ids=str,
)
def test_positions_that_are_copied_count_as_rows_and_no_others(
    head_dim: int,
    dtype: mx.Dtype,
    chosen: dict[Any, CopiedChunks],
    copied: int,
    build_model: Callable[..., tuple[Any, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk of 300 rows counts the room of the 340 positions that it sees, a short one nothing.

    Unfused, it counts 9 bytes for each row of a position as well: 512 * 300 * 9 / 4096.
    """
    monkeypatch.setattr(long_chunks, "timed_choices", chosen)
    counted: list[int] = []
    real = Commits.of_step

    def of_step(self: Commits, *step: int) -> Callable[[mx.array], None] | None:
        counted.append(step[3])
        return real(self, *step)

    monkeypatch.setattr(Commits, "of_step", of_step)
    model, config = build_model("llama", head_dim=head_dim, num_hidden_layers=1)
    model.set_dtype(dtype)
    logits(prepare(model, config, "one layer"), [(40, 300), (490, 10)])
    assert counted == [copied]
