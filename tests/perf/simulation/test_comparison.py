"""Comparisons: paired differences, which of them count, and the verdict on a default."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlxserve.core.errors import InvalidConfig
from tests.perf.cli import app
from tests.perf.simulation import comparison
from tests.perf.simulation.comparison import DEFAULTS, METRICS, Difference, Metric, OptionVariant
from tests.perf.simulation.costs import ASSUMED
from tests.perf.simulation.workloads import SCENARIOS

LOWER = Metric("time", "s", lambda r: r.makespan, floor=0.1)
HIGHER = replace(LOWER, is_higher_better=True)


@pytest.mark.parametrize(
    ("difference", "better", "worse"),
    [
        (Difference(LOWER, 10.0, -1.0, 0.1), True, False),
        (Difference(LOWER, 10.0, 1.0, 0.1), False, True),
        (Difference(HIGHER, 10.0, 1.0, 0.1), True, False),
        (Difference(LOWER, 10.0, -1.0, 0.4), False, False),  # 2.5 standard errors
        (Difference(LOWER, 100.0, -1.0, 0.1), False, False),  # 1 % of the default
        (Difference(LOWER, 0.0, 0.05, 0.0), False, False),  # below the floor
    ],
)
def test_a_difference_counts_if_it_is_certain_and_large(
    difference: Difference, better: bool, worse: bool
) -> None:
    assert (difference.is_better, difference.is_worse) == (better, worse)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"no difference"}, "no difference"),
        ({"worse", "no difference"}, "supported"),
        ({"better", "no difference"}, "not supported"),
        ({"better", "worse"}, "a trade"),
        ({"a trade"}, "a trade"),
    ],
)
def test_a_default_is_supported_if_leaving_it_only_ever_hurts(
    verdicts: set[str], expected: str
) -> None:
    assert comparison.overall(verdicts) == expected


def test_a_variant_that_changes_nothing_differs_by_nothing() -> None:
    scenario = replace(SCENARIOS["bursty"], num_slots=2)
    same = OptionVariant("max_num_seqs", DEFAULTS.scheduler.max_num_seqs)
    fewer = OptionVariant("max_num_seqs", 1)
    compared = comparison.compare(
        scenario, ASSUMED, num_requests=20, seeds=3, variants=[same, fewer]
    )
    unchanged, changed = compared.outcomes
    assert all(d.mean == d.error == 0 for d in unchanged.differences)
    assert unchanged.verdict() == "no difference"
    by_name = {d.metric.name: d for d in changed.differences}
    assert by_name["TTFT p50"].mean > 0
    assert by_name["TTFT p50"].error > 0
    assert by_name["max ITL p95"].mean < 0


def test_the_error_is_that_of_the_paired_differences() -> None:
    scenario = replace(SCENARIOS["bursty"], num_slots=2)
    few = DEFAULTS.with_options(max_num_seqs=1)
    pairs = [
        comparison.simulate(scenario, few, ASSUMED, seed, 20).makespan
        - comparison.simulate(scenario, DEFAULTS, ASSUMED, seed, 20).makespan
        for seed in (0, 1)
    ]
    compared = comparison.compare(
        scenario, ASSUMED, num_requests=20, seeds=2, variants=[OptionVariant("max_num_seqs", 1)]
    )
    makespan = compared.outcomes[0].differences[0]
    assert makespan.mean == pytest.approx(sum(pairs) / 2)
    assert makespan.error == pytest.approx(abs(pairs[0] - pairs[1]) / 2)
    assert not math.isnan(makespan.error)


def test_without_chunked_prefill_the_budget_holds_a_whole_prompt() -> None:
    chosen = OptionVariant("enable_chunked_prefill", False).of(DEFAULTS, SCENARIOS["chat"])
    assert chosen.scheduler.max_num_batched_tokens == SCENARIOS["chat"].max_context


def test_variants_are_chosen_by_option() -> None:
    assert {v.option for v in comparison.find_variants(["page_size"])} == {"page_size"}
    assert comparison.find_variants(None) == comparison.VARIANTS
    with pytest.raises(InvalidConfig, match="'nonsense' is not varied; choose from page_aligned"):
        comparison.find_variants(["nonsense"])


def test_the_tables_name_metrics_and_verdicts() -> None:
    compared = comparison.compare(
        replace(SCENARIOS["bursty"], num_slots=2),
        ASSUMED,
        num_requests=10,
        seeds=2,
        variants=[OptionVariant("max_num_seqs", 1)],
    )
    out = io.StringIO()
    console = Console(file=out, width=200)
    compared.show(console)
    comparison.show_verdicts([compared], console)
    shown = out.getvalue()
    assert all(metric.name in shown for metric in METRICS)
    assert "max_num_seqs 1" in shown
    assert "±" in shown
    narrow = io.StringIO()
    compared.show(Console(file=narrow, width=80))
    assert "…" not in narrow.getvalue()
    assert max(map(len, narrow.getvalue().splitlines())) <= 80
    assert "rate" in narrow.getvalue()


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(
        app,
        "simulate --workload fan-out --requests 15 --seeds 2 --option page_aligned_scheduling "
        f"--json {file}",
    )
    assert result.exit_code == 0, result.output
    assert "Are the defaults supported?" in result.output
    [workload] = json.loads(file.read_text())["workloads"]
    assert workload["workload"] == "fan-out"
    assert workload["seeds"] == 2
    [variant] = workload["variants"]
    assert variant["option"] == "page_aligned_scheduling"
    assert set(variant["differences"]) == {metric.name for metric in METRICS}


def test_the_comparison_may_be_made_without_a_target_between_tokens(tmp_path: Path) -> None:
    makespans = []
    for target in ("", "--itl-target-ms 0 ", "--itl-target-ms 100 "):
        file = tmp_path / "figures.json"
        result = CliRunner().invoke(
            app,
            "simulate --workload chat --requests 15 --seeds 2 --option page_size "
            f"{target}--json {file}",
        )
        assert result.exit_code == 0, result.output
        makespans.append(json.loads(file.read_text())["workloads"][0]["defaults"]["makespan"])
    assert makespans[0] == makespans[2] != makespans[1]
