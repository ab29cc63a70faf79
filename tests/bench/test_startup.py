"""Starts are measured one at a time, in turn, after a warm-up round."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from mlxserve.bench import startup
from mlxserve.bench.servers import Contender
from mlxserve.core.errors import InvalidConfig


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces both servers; the log of starts and ends, in order."""
    log: list[str] = []

    @contextlib.contextmanager
    def start(name: str, environment: Mapping[str, str]) -> Iterator[Contender]:
        assert environment["PYTHONDONTWRITEBYTECODE"] == "", "nothing is compiled"
        assert Path(environment["PYTHONPYCACHEPREFIX"]).is_dir()
        log.append(f"start {name}")
        yield Contender(name, "http://127.0.0.1:9", "m", float(len(log)), 2.0)
        log.append(f"end {name}")

    def ours(
        name: str, model: str, environment: Mapping[str, str]
    ) -> AbstractContextManager[Contender]:
        return start(name, environment)

    monkeypatch.setattr(startup, "our_server", ours)
    monkeypatch.setattr(startup, "mlx_lm_server", partial(ours, "mlx-lm"))
    return log


def test_each_server_starts_alone_and_the_first_round_is_not_counted(starts: list[str]) -> None:
    report = startup.bench_startup("m", against=["mlx-lm"], pairs=2)
    names = ["mlxserve", "mlx-lm"] * 3
    assert starts == [f"{what} {name}" for name in names for what in ("start", "end")]
    ready = {figure.who: figure.values for figure in report.figures[:3]}
    assert ready == {"mlxserve": (5.0, 9.0), "mlx-lm": (7.0, 11.0), "÷ mlx-lm": (5 / 7, 9 / 11)}
    cpu = {figure.who: figure.values for figure in report.figures[3:6]}
    assert cpu == {"mlxserve": (2.0, 2.0), "mlx-lm": (2.0, 2.0), "÷ mlx-lm": (1.0, 1.0)}
    assert [len(figure.values) for figure in report.figures[6:]] == [2, 2, 2]


def test_one_contender_has_no_ratios(starts: list[str]) -> None:
    report = startup.bench_startup("m", against=[], pairs=1)
    assert {figure.who for figure in report.figures} == {"mlxserve"}


def test_a_running_server_cannot_be_started() -> None:
    with pytest.raises(InvalidConfig, match="a running server cannot be started"):
        startup.bench_startup("m", against=["http://127.0.0.1:1"], pairs=1)
