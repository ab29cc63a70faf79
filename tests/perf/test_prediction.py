"""Predicted decodes and prompts follow from bytes, instructions and dispatches, and say that nobody measured them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.perf import instructions, prediction
from tests.perf.cli import app
from tests.perf.prediction import CHIPS, MAX_ERROR, MODELS, PUBLISHED, chunk, decode_step
from tests.perf.step_sizes import AttentionLayer, StepSizes, model_of

pytestmark = [
    pytest.mark.instruments,
    pytest.mark.usefixtures("compiled", "on_a_cpu"),  # compiled functions are one dispatch
]

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
M4_PRO, M5 = (next(chip for chip in CHIPS if chip.name == name) for name in ("M4 Pro", "M5"))
# Of Qwen3-32B in 4 bits.
DENSE = StepSizes(
    *(18_000_000_000, 0, 31_200_000_000, 0, 0, 0, 0, 0),
    layers=(AttentionLayer(64, 8, 128, None),) * 64,
    state=0,
    recurrent_rows=0,
)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions as of a kernel that nobody runs."""
    monkeypatch.setattr(instructions, "decode", lambda _group, _head_dim: 30.0)
    monkeypatch.setattr(instructions, "tiles", lambda _head_dim: 12.0)


@pytest.mark.usefixtures("counted")
def test_thirty_instructions_a_head_nearly_meet_the_memory_at_eight_heads() -> None:
    step = decode_step(M4_PRO, DENSE, 900, 8192)
    assert step.arithmetic / step.keys == pytest.approx(0.79, abs=0.02)
    assert not step.is_bound_by_arithmetic


@pytest.mark.usefixtures("counted")
def test_a_window_bounds_what_a_decode_and_a_chunk_read() -> None:
    windows = replace(DENSE, layers=(AttentionLayer(64, 8, 128, 1024),) * 64)
    assert decode_step(M4_PRO, windows, 900, 65_536) == decode_step(M4_PRO, windows, 900, 1024)
    near, far = (chunk(M4_PRO, windows, start, 512) for start in (4096, 65_536))
    assert near == far


@pytest.mark.usefixtures("counted")
def test_a_chunk_is_copied_where_memory_allows_and_only_then_uses_matrix_units() -> None:
    copied, by_tiles = (chunk(chip, DENSE, 65_536, 512) for chip in (M5, replace(M5, memory=1)))
    assert copied.weights == by_tiles.weights
    assert by_tiles.arithmetic > 2.5 * copied.arithmetic


@pytest.mark.usefixtures("counted")
def test_a_chunk_reads_all_experts_and_pads_the_rows_of_each() -> None:
    experts = replace(DENSE, expert_products=10**9, num_experts=256, num_used=8)
    alone = chunk(M4_PRO, DENSE, 0, 512).weights
    assert chunk(M4_PRO, experts, 0, 512).weights > alone
    few, many = (
        chunk(M4_PRO, experts, 0, rows).weights / chunk(M4_PRO, DENSE, 0, rows).weights
        for rows in (2048, 512)
    )
    assert many > few, "256 experts share the tiles of 4,096 pairs"
    slow = replace(experts, all_experts=10**13)
    assert chunk(M4_PRO, slow, 0, 512).weights == pytest.approx(
        (10**13 + DENSE.weights) / M4_PRO.bytes_per_second
    )


def test_sizes_are_those_of_the_catalogue_and_dispatches_those_of_a_recorded_step() -> None:
    dense = model_of("qwen3:8b")
    assert dense.sizes.layers == (AttentionLayer(32, 8, 128, None),) * 36
    assert dense.sizes.products == 36 * 4096 * (2 * (32 + 8) * 128 + 3 * 12_288)
    assert dense.dispatches == 36 * 12 + 19  # 12 of a layer
    assert dense.dispatches_as_defined > dense.dispatches + 7 * 36
    experts = model_of("qwen3.6:35b").sizes
    assert (experts.num_experts, experts.num_used, experts.num_expert_layers) == (256, 8, 40)
    assert experts.expert_weights * 256 == experts.all_experts * 8
    assert len(experts.layers) == 10
    assert experts.recurrent_rows == 30 * 32 * 128
    windows = model_of("gemma4:26b").sizes.layers
    assert {layer.window for layer in windows} == {None, 1024}


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the command prints, with the instructions that the emulator counts."""
    result = CliRunner().invoke(app, ["predict"])
    assert result.exit_code == 0, result.output
    return [line.strip() for line in result.output.splitlines()]


@pytest.mark.long
def test_the_page_has_the_tables_that_the_command_prints(lines: list[str]) -> None:
    assert "Nothing here was measured on a Mac." in lines
    page = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    for chip in CHIPS:
        found = [row for row in rows if row.startswith(f"| {chip.name}, {chip.memory} GB |")]
        assert len(found) == len(MODELS)
    assert [row for row in rows if row not in page] == []
    # Nor does the page have a row that the command does not print.
    section = page[page.index("## Tokens per second, computed") + 1 :]
    end = next(at for at, line in enumerate(section) if line.startswith("## "))
    assert [line for line in section[:end] if line.startswith("|") and line not in rows] == []


def test_figures_are_computed_within_15_percent_or_named() -> None:
    missed = set()
    for each in PUBLISHED:
        for what, error in each.errors.items():
            if what in each.fitted:
                assert abs(error) < 0.05, (each, what)
            elif abs(error) > MAX_ERROR:
                missed.add((each.chip.name, each.model, what))
    assert missed == {
        ("M3 Ultra", "qwen3:8b", "decode"),
        ("M4 Max", "qwen3:4b", "decode"),
        ("M2 Pro", "bonsai:27b", "decode"),
        ("M2 Pro", "bonsai:27b", "prompt"),
        ("M2 Pro", "qwen3.5:35b", "prompt"),
    }
    named = [line for line in prediction.published_table() if "not explained" in line]
    assert sum(line.count("not explained") for line in named) == len(missed)
