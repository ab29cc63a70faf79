"""Rows of drafts are computed together where a trial finds the same bits and a faster step."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta

from metal_kernels.replay import DeltaRows, PlainReplay, Readout, Rows, Spans
from mlxserve.cache.kv import Backends
from mlxserve.model import replay_choice
from mlxserve.model.draft_rows import DraftRows
from mlxserve.model.load import LoadedModel, prepare
from tests.emulated import emulated_backend
from tests.model import coverage
from tests.model.small_models import build

PAGE = 16
Seconds = Callable[[LoadedModel, Backends, int], float]


class AsDefined(PlainReplay):
    """Computes each row as mlx-lm does on a CPU, and counts."""

    num_calls = 0

    def states(self, rows: Rows, state: mx.array, spans: Spans) -> mx.array:
        assert isinstance(rows, DeltaRows)
        return mx.stack([self._run(rows, rows.k, state, span)[1] for span in spans.table])

    def outputs(self, rows: Rows, readout: Readout, state: mx.array, spans: Spans) -> mx.array:
        assert isinstance(rows, DeltaRows)
        self.num_calls += 1
        return mx.concatenate([self._run(rows, *readout, state, span)[0] for span in spans.table])

    def _run(
        self, rows: DeltaRows, q: mx.array, state: mx.array, span: tuple[int, int, int]
    ) -> tuple[mx.array, mx.array]:
        index, first, count = span
        held, outputs = state[index : index + 1], []
        for row in range(first, first + count):
            one = [each[row : row + 1][None] for each in (q, rows.k, rows.v, rows.g, rows.beta)]
            output, held = inspect.unwrap(gated_delta.gated_delta_ops)(*one, held)
            outputs.append(output[0])
        return (mx.concatenate(outputs) if outputs else q[:0]), held[0]


class Shifted(AsDefined):
    """Is off by the last bit."""

    def outputs(self, rows: Rows, readout: Readout, state: mx.array, spans: Spans) -> mx.array:
        return super().outputs(rows, readout, state, spans) * (1 + 2**-23)


class Forgetful(AsDefined):
    """Keeps a state that no row has changed."""

    def states(self, rows: Rows, state: mx.array, spans: Spans) -> mx.array:
        return mx.stack([state[index] for index, _, _ in spans.table])


def small(name: str) -> LoadedModel:
    mx.random.seed(5)
    model, config = build(name, coverage.rows("mlx-lm")[name]["config"])
    return prepare(model, config, name)


def tried(
    monkeypatch: pytest.MonkeyPatch, name: str, ops: PlainReplay, seconds: Seconds
) -> LoadedModel:
    backend = emulated_backend()
    backend.replay = ops  # type: ignore[assignment]  # another implementation of the same ops
    monkeypatch.setattr(replay_choice, "KVPool", lambda layers, pages, size, _: _plain(layers, pages, size))  # fmt: skip
    return replay_choice.with_replay(small(name), [backend], PAGE, seconds)


def _plain(layers: Any, num_pages: int, page_size: int) -> Any:
    from metal_kernels.choice import select_backend
    from mlxserve.cache.kv import KVPool

    return KVPool(layers, num_pages, page_size, select_backend("cpu"))


def is_faster(loaded: LoadedModel, *_: Any) -> float:
    return 2.0 if loaded.replay is None else 1.0


def test_rows_together_are_taken_where_they_are_the_same_and_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ops = AsDefined()
    with caplog.at_level(logging.INFO, "mlxserve.replay"):
        assert tried(monkeypatch, "qwen3_next", ops, is_faster).replay is ops
    assert (
        "rows of drafts are one call of recurrent layers: 1000.0 instead of 2000.0 ms"
        in caplog.text
    )
    assert ops.num_calls > 2


@pytest.mark.parametrize(
    ("ops", "why"),
    [
        (Shifted(), "a row has other bits than alone"),
        (Forgetful(), "a row has other bits than alone"),
        (PlainReplay(), "has no kernel"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_other_bits_and_errors_are_not_taken(
    ops: PlainReplay,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def outputs(*_: Any) -> mx.array:
        raise ValueError("has no kernel")

    if type(ops) is PlainReplay:
        monkeypatch.setattr(ops, "outputs", outputs)
    with caplog.at_level(logging.INFO, "mlxserve.replay"):
        assert tried(monkeypatch, "qwen3_next", ops, is_faster).replay is None
    assert why in caplog.text


def test_other_logits_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A convolution alone has no bits to compare; its wrong rows show in the logits."""
    right = DraftRows.windows
    monkeypatch.setattr(DraftRows, "windows", lambda *each: right(*each)[::-1])
    with caplog.at_level(logging.INFO, "mlxserve.replay"):
        assert tried(monkeypatch, "lfm2", PlainReplay(), is_faster).replay is None
    assert "logits differ by" in caplog.text


def test_a_slower_step_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlxserve.replay"):
        assert tried(monkeypatch, "lfm2", PlainReplay(), lambda *_: 1.0).replay is None
    assert "a step would take 1000.0 instead of 1000.0 ms" in caplog.text


def test_a_state_of_another_kind_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlxserve.replay"):
        assert tried(monkeypatch, "mamba", PlainReplay(), is_faster).replay is None
    assert "1 of 2 states" in caplog.text


def test_nothing_is_tried_without_kernels_or_states(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_draft_rows(_: object) -> None:
        raise AssertionError("tried")

    monkeypatch.setattr(replay_choice, "use_draft_rows", use_draft_rows)
    from metal_kernels.choice import select_backend

    metal, plain = emulated_backend(), select_backend("cpu")
    model = small("lfm2")
    for backends in ([], [plain], [metal, plain], plain):
        assert replay_choice.with_replay(model, backends, PAGE) is model
    dense = small("qwen2")
    assert replay_choice.with_replay(dense, metal, PAGE) is dense
    with pytest.raises(AssertionError, match="tried"):
        replay_choice.with_replay(model, metal, PAGE)
