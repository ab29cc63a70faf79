"""`mlxserve bench` passes its arguments to a command line of its own."""

from __future__ import annotations

import pytest

from tests.cli.commands import Run, error_line, mlxserve


@pytest.mark.slow
def test_bench_has_commands_of_its_own() -> None:
    outcome = mlxserve("bench", "--help")
    assert outcome.code == 0
    assert "mlxserve bench" in outcome.out
    assert "decode" in outcome.out
    assert mlxserve("bench", "decode", "--no-such-flag").code == 2
    assert mlxserve("bench", "-h").out == outcome.out
    assert "╭" not in outcome.out, "its help looks like that of the other commands"


def test_a_mistake_in_a_benchmark_is_one_line(run: Run) -> None:
    assert "no such folder" in error_line(run("bench", "decode", "--model", "./no such folder"))
