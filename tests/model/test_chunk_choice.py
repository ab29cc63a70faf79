"""What was timed for a model's chunks is kept for this chip and these versions, and used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels import cooperative_tiles, long_chunks
from metal_kernels.chunk_trial import ROWS
from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.long_chunks import CopiedChunks, copying
from metal_kernels.metal import MetalBackend
from metal_kernels.speeds import TimedAttention
from metal_kernels.step_ways import StepWay
from mlxserve.model import chunk_choice
from mlxserve.model.bidirectional import Bidirectional
from mlxserve.model.chunk_choice import choose_chunks, kept_times
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.vision import Vision

BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]


class Timer:
    """Chunks by copies take `copies` seconds, by copies unfused half as long, by tiles one.

    By cooperative tensors they take 0.9 seconds.
    """

    def __init__(self, copies: float) -> None:
        self._copies = copies
        self.timed: list[TimedAttention] = []

    def __call__(self, _backend: MetalBackend, what: TimedAttention) -> float:
        self.timed.append(what)
        if what.is_cooperative:
            return 0.9
        if what.by_blocks:
            return self._copies / 2
        return self._copies if what.by_copies else 1.0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a Mac whose process has timed nothing yet."""
    monkeypatch.setattr(chunk_choice, "data_home", lambda: tmp_path)
    monkeypatch.setattr(chunk_choice, "has_metal", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M4"})
    begin_process(monkeypatch)
    return tmp_path / "chunk-times.json"


def begin_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chunks, "timed_choices", {})
    monkeypatch.setattr(cooperative_tiles, "timed_rows", {})


@pytest.fixture(scope="module")
def loaded(build_model: BuildModel) -> LoadedModel:
    """Layers with a window and without."""
    model, config = build_model("gemma3_text", head_dim=64)
    model.set_dtype(mx.bfloat16)
    return prepare(model, config, "tiny")


def no_kernel(_spec: KernelSpec, _source: str) -> Kernel:
    pytest.fail("no kernel is made")


METAL = MetalBackend(no_kernel)


def choose(loaded: LoadedModel, copies: float = 0.5, backend: MetalBackend = METAL) -> Timer:
    timer = Timer(copies)
    choose_chunks(loaded, [backend] * len(loaded.layers), timer)
    return timer


def test_the_layer_that_sees_most_is_timed_once_on_a_machine(
    loaded: LoadedModel,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mlxserve")
    first = choose(loaded)
    assert {(what.head_dim, what.dtype) for what in first.timed} == {(64, mx.bfloat16)}
    [spec] = {(s.kv_heads, s.key_dim) for s in loaded.layers}
    assert {(what.kv_heads, what.head_dim) for what in first.timed} == {spec}
    assert {what.context for what in first.timed} == {min(4096, loaded.context.longest)}
    assert copying(64, mx.bfloat16) == CopiedChunks(32)
    assert "by copies from 32 rows on: 32, 64, 128, 256 rows take 1000.00 and 500.00" in caplog.text
    begin_process(monkeypatch)
    assert choose(loaded, copies=2.0).timed == []
    assert copying(64, mx.bfloat16) == CopiedChunks(32)
    assert file.is_file()


def test_tiles_that_are_faster_take_all_chunks(loaded: LoadedModel, file: Path) -> None:
    choose(loaded, copies=2.0)
    assert copying(64, mx.bfloat16) is None


def test_pools_in_8_bits_are_timed_for_themselves(
    loaded: LoadedModel, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxserve")
    choose(loaded)
    assert "loaded before" not in caplog.text
    in_8_bits = choose(loaded.in_8_bits(), copies=2.0)
    assert copying(64, mx.bfloat16) == CopiedChunks(32)
    assert "the choice is that of a model loaded before" in caplog.text
    assert in_8_bits.timed
    assert all(what.is_quantised for what in in_8_bits.timed)
    assert len(kept_times().all()) == 2


def test_a_layer_that_mlx_computes_unfused_is_kept_and_used_with_its_query_heads(
    build_model: BuildModel,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Query heads of the layers, for whose scores memory is planned."""
    caplog.set_level(logging.INFO, "mlxserve")
    model, config = build_model("llama", head_dim=256)
    model.set_dtype(mx.float16)
    loaded = prepare(model, config, "wide heads")
    num_heads = config["num_attention_heads"]
    assert num_heads > loaded.layers[0].kv_heads
    timed = choose(loaded).timed
    assert [what.by_blocks for what in timed] == [False, False, True] * len(ROWS)
    assert copying(256, mx.float16) == CopiedChunks(32, unfused_heads=num_heads)
    assert (
        "copies from 32 rows on, unfused: 32, 64, 128, 256 rows take 1000.00, 500.00 and 250.00"
        in caplog.text
    )
    begin_process(monkeypatch)
    assert choose(loaded, copies=3.0).timed == []
    assert copying(256, mx.float16) == CopiedChunks(32, unfused_heads=num_heads)


def test_cooperative_tensors_are_timed_after_their_trial_which_each_load_repeats(
    loaded: LoadedModel,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Times that are kept choose no kernel that would be wrong by now."""
    caplog.set_level(logging.INFO, "mlxserve")
    reasons: list[str | None] = [None, "its results differ", None]
    monkeypatch.setattr(chunk_choice, "why_not_cooperative", lambda *_, **__: reasons.pop(0))
    assert [what.is_cooperative for what in choose(loaded, copies=2.0).timed] == [
        False,
        False,
        True,
    ] * len(ROWS)
    assert cooperative_tiles.first_rows(64, mx.bfloat16) == 32
    assert copying(64, mx.bfloat16) is None
    assert "the tile kernel, cooperative tensors from 32 rows on without copies: 32," in caplog.text
    for first in (None, 32):
        begin_process(monkeypatch)
        assert choose(loaded).timed == []
        assert cooperative_tiles.first_rows(64, mx.bfloat16) == first
    assert caplog.text.count("without cooperative tensors: its results differ") == 1
    begin_process(monkeypatch)
    reasons.append("there are no neural accelerators")
    file.unlink()
    assert not any(what.is_cooperative for what in choose(loaded).timed)
    assert cooperative_tiles.first_rows(64, mx.bfloat16) is None


def test_a_text_that_fails_for_a_later_model_is_used_for_none(
    loaded: LoadedModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was timed for a model before would compute the other's chunks by it."""
    monkeypatch.setattr(chunk_choice, "why_not_cooperative", lambda *_, **__: None)
    choose(loaded, copies=2.0)
    assert cooperative_tiles.first_rows(64, mx.bfloat16) == 32
    monkeypatch.setattr(chunk_choice, "why_not_cooperative", lambda *_, **__: "it differs")
    choose(loaded.in_8_bits(), copies=2.0)
    assert cooperative_tiles.first_rows(64, mx.bfloat16) is None


def test_images_that_attend_in_both_directions_are_tried(
    loaded: LoadedModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def trial(_backend: MetalBackend, _what: TimedAttention, *, has_ends: bool) -> str:
        tried.append(has_ends)
        return "not here"

    monkeypatch.setattr(chunk_choice, "why_not_cooperative", trial)
    for bidirectional in (None, Bidirectional.ALL_LAYERS):
        vision = SimpleNamespace(bidirectional=bidirectional)
        choose(replace(loaded, vision=cast(Vision, vision)))
    choose(loaded)
    assert tried == [False, True, False]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"of": 3}',
        '{"of": null, "shapes": {"a": [[1, 2]]}}',
        '{"of": null, "shapes": {"of two ways, as once": [[64, [1.0, 0.5]], [256, [4.0, 3.0]]]}}',
        '{"of": null, "shapes": {"without rows": []}}',
        '{"of": null, "shapes": {"from 64 rows on": [[64, [1, 2, null, null]], [128, [1, 2, null, null]], '
        "[256, [1, 2, null, null]]]}}",
    ],
)
def test_a_broken_file_is_measured_again(loaded: LoadedModel, file: Path, content: str) -> None:
    choose(loaded)
    kept = json.loads(file.read_text())
    file.write_text(content.replace("null", json.dumps(kept["of"])))
    assert kept_times().all() == {}
    assert choose(loaded).timed
    assert json.loads(file.read_text()) == kept


@pytest.mark.parametrize("changed", ["chip", "mlx"])
def test_another_chip_or_mlx_is_measured_anew(
    changed: str, loaded: LoadedModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(loaded)
    begin_process(monkeypatch)
    if changed == "chip":
        monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M5"})
    else:
        monkeypatch.setattr(chunk_choice, "version", lambda _package: "0.40.0")
    assert choose(loaded, copies=2.0).timed
    assert copying(64, mx.bfloat16) is None


def test_nothing_is_timed_where_it_would_mean_nothing(
    loaded: LoadedModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(replace(loaded, by_sequence=True)).timed == []
    for way in (StepWay.GATHERED, StepWay.BLOCKS):
        without = MetalBackend(no_kernel, without=frozenset([way]))
        assert choose(loaded, backend=without).timed == []
    monkeypatch.setattr(chunk_choice, "has_metal", lambda: False)
    assert choose(loaded).timed == []
    assert not file.exists()


def test_a_folder_that_cannot_be_written_is_no_failure(
    loaded: LoadedModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.joinpath("file").touch()
    monkeypatch.setattr(chunk_choice, "data_home", lambda: file.parent / "file")
    assert choose(loaded).timed
    assert copying(64, mx.bfloat16) == CopiedChunks(32)
