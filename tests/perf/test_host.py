"""The host's time per step is measured on whole steps of both contenders."""

from __future__ import annotations

from itertools import product

import pytest

from mlxserve.model.step_graphs import TIMES_BEFORE
from tests.perf import host, host_states
from tests.perf.recording_factory import single_ops

pytestmark = pytest.mark.instruments

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 640,
}
SMALL = {**host.GEOMETRIES["qwen3"], **_SIZES}
WINDOWED = {**host.GEOMETRIES["gemma3_text"], **_SIZES, "num_hidden_layers": 7}


@pytest.fixture(autouse=True)
def small_models(
    on_a_cpu: None,  # a Mac evaluates a step with a prompt while it is built: its graph is gone
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "GEOMETRIES", {"qwen3": SMALL, "gemma3_text": WINDOWED})
    monkeypatch.setattr(host, "DRAFTED_LAYERS", 2)
    layers = {"num_hidden_layers": 4, "mlp_only_layers": [0, 1, 2, 3]}
    monkeypatch.setattr(host_states, "GEOMETRY", {**host_states.GEOMETRY, **layers})


def test_every_step_is_built_by_both_and_a_ratio_is_taken() -> None:
    report = host.bench_host(decodes=[1, 2], chunk=40, rounds=2, steps=1)
    names = [figure.name for figure in report.figures if "dispatches" not in figure.name]
    for kind, step in product(("qwen3", "gemma3_text"), ("1 decodes", "2 decodes", "chunk of 40")):
        assert [name for name in names if name.startswith(kind) and step in name][1:] == [
            f"{kind}, {step}: mlx-lm",
            f"{kind}, {step}: ratio",
        ]
    assert all(value > 0 for figure in report.figures for value in figure.values)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_step_calls_a_writing_and_two_reading_kernels_per_layer(kind: str) -> None:
    model = host.Model.of(kind)
    with single_ops():
        contenders = model.decoding(2)
        contenders.ours()
        assert contenders.factory.num_calls == 3 * len(model.paged.layers)


@pytest.mark.usefixtures("compiled")
def test_a_step_that_verifies_a_draft_is_recorded_as_one_without() -> None:
    """So it takes no call of Python for a layer; `python -m tests.perf host` has the ratio of their times."""
    drafted, plain = host.Model.of("qwen3", num_layers=2).verifying(3)
    with single_ops():
        for contenders in (drafted, plain):
            for _ in range(TIMES_BEFORE + 2):
                contenders.ours()
            calls = contenders.factory.num_calls
            contenders.ours()
            assert contenders.factory.num_calls == calls
    [ratio] = host.draft_figures(2, 2)
    assert len(ratio.values) == 2
    assert min(ratio.values) > 0


def test_recurrent_layers_are_measured_beside_attention() -> None:
    figures = list(host_states.figures([1, 2], 3, rounds=2, steps=2))
    assert [figure.name for figure in figures][:9] == [
        f"3 recurrent and 1 attention layers, {step}: {what}"
        for step in ("1 decodes", "2 decodes", "chunk of 3")
        for what in ("ours", "mlx-lm", "ratio")
    ]
    assert all(value > 0 for figure in figures for value in figure.values)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("who", "in_decodes"), [("ours", 12), ("ours, not fused", 19)])
def test_a_fused_layer_is_seven_dispatches_shorter(who: str, in_decodes: int) -> None:
    found = host.layer_dispatches("qwen3", lambda model: model.decoding(2), who)
    assert found.total() == in_decodes, found


@pytest.mark.usefixtures("compiled")
def test_a_fused_layer_of_a_long_chunk_has_no_more_dispatches_than_mlx_lms() -> None:
    ours, theirs = (
        host.layer_dispatches("qwen3", lambda model: model.prefilling(300), who)
        for who in ("ours", "mlx-lm")
    )
    assert ours.total() == 12, ours
    assert ours.total() < theirs.total(), theirs


def test_layers_beside_recurrent_ones_have_fewer_dispatches_than_mlx_lms() -> None:
    found = {
        (kind, who): host_states.layer_dispatches(kind, 300, who)
        for kind in host_states.LAYERS
        for who in ("ours", "mlx-lm")
    }
    for kind in host_states.LAYERS:
        ours, theirs = found[kind, "ours"], found[kind, "mlx-lm"]
        assert ours.total() < theirs.total(), (ours, theirs)
