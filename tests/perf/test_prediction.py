"""Predicted steps follow from bytes, instructions and dispatches, and say that nobody measured them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.geometries import QWEN3_8B, QWEN3_32B
from tests.perf import instructions
from tests.perf.cli import app
from tests.perf.prediction import (
    CHIPS,
    MAX_ERROR,
    MODELS,
    PUBLISHED,
    QWEN3_0_6B,
    AttentionCosts,
    Chip,
    decode_step,
    prefill_chunk,
)

pytestmark = [
    pytest.mark.instruments,
    pytest.mark.usefixtures("compiled", "on_a_cpu"),  # compiled functions are one dispatch
]

SLOW = AttentionCosts(lambda _group, _is_quantised: 30.0, lambda _is_quantised: 16.0)
FAST = AttentionCosts(lambda _group, _is_quantised: 10.0, lambda _is_quantised: 12.0)
M4_PRO = next(chip for chip in CHIPS if chip.name == "M4 Pro")
M5 = next(chip for chip in CHIPS if chip.name == "M5")


def test_thirty_instructions_a_head_meet_the_memory_at_eight_heads() -> None:
    """On an M4 Pro, whose memory reaches 0.84 of its figure; twice that in 8 bits."""
    ratios = []
    for is_quantised in (False, True):
        step = decode_step(M4_PRO, QWEN3_32B, 8192, SLOW, is_quantised=is_quantised)
        ratios.append(step.arithmetic / step.keys)
    assert ratios[0] == pytest.approx(0.85, abs=0.02)
    assert ratios[1] == pytest.approx(1.65, abs=0.03)
    fast = decode_step(M4_PRO, QWEN3_32B, 8192, FAST, is_quantised=True)
    assert not fast.is_bound_by_arithmetic


def test_small_models_on_large_chips_spend_a_third_of_a_step_on_dispatches() -> None:
    ultra = max(CHIPS, key=lambda chip: chip.bandwidth)
    step = decode_step(ultra, QWEN3_0_6B, 1024, FAST)
    assert step.dispatches > step.seconds / 3
    large = decode_step(ultra, QWEN3_32B, 1024, FAST)
    assert large.dispatches < large.weights / 10


def test_the_dispatches_of_a_layer_are_those_of_the_step_that_is_built() -> None:
    """Fused layers have fewer, which the table before and now shows."""
    before, now = (
        decode_step(M4_PRO, QWEN3_8B, 1024, replace(FAST, built_by=who)).dispatches
        for who in ("ours, not fused", "ours")
    )
    assert before - now == pytest.approx(7 * QWEN3_8B.num_layers * 1.3e-6)


def test_published_decodes_are_computed_within_15_percent_or_named() -> None:
    """Which are not: those of 4B models, which others measured slower than memory and dispatches explain."""
    errors = {f"{each.chip.name}, {each.model.name}": each.error for each in PUBLISHED}
    assert all(abs(each.error) < 0.05 for each in PUBLISHED if each.is_fitted)
    missed = {name for name, error in errors.items() if abs(error) > MAX_ERROR}
    assert missed == {"M3 Pro, Qwen3-4B", "M4 Max, Qwen3-4B"}, errors


def test_a_batch_reads_the_weights_once() -> None:
    alone, together = (decode_step(M4_PRO, QWEN3_8B, 8192, FAST, batch=n) for n in (1, 8))
    assert together.weights == alone.weights
    assert together.keys == 8 * alone.keys
    assert together.arithmetic == 8 * alone.arithmetic


def test_a_chunk_is_copied_where_memory_allows_and_only_then_uses_matrix_units() -> None:
    context = 65_536
    small: Chip = replace(M5, memory=1)
    copied, by_tiles = (prefill_chunk(chip, QWEN3_8B, context, FAST) for chip in (M5, small))
    assert copied.weights == by_tiles.weights
    assert by_tiles.arithmetic > 2.5 * copied.arithmetic
    assert prefill_chunk(M5, QWEN3_8B, context, SLOW) == copied
    assert prefill_chunk(small, QWEN3_8B, context, SLOW).arithmetic > by_tiles.arithmetic


def test_the_command_shows_every_chip_and_model_and_claims_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(group: int, *, is_quantised: bool, uses_matrices: bool = True) -> float:
        return (10.0 if uses_matrices else 30.0) + group / 100 + is_quantised

    monkeypatch.setattr(instructions, "decode", decode)
    monkeypatch.setattr(instructions, "tiles", lambda *, is_quantised: 12.0 + is_quantised)
    result = CliRunner().invoke(app, ["predict"])
    assert result.exit_code == 0, result.output
    assert "Nothing here was measured on a Mac" in result.output
    assert "| decode, 8 heads a kv head, q8 | 31.1 | 11.1 |" in result.output
    for chip in CHIPS:
        for model in MODELS:
            for suffix in ("", ", q8"):
                assert result.output.count(f"| {chip.name} | {model.name}{suffix} |") == 2
