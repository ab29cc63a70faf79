"""Contenders are measured in turn and compared pair by pair."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxserve.bench import loads, servers, serving
from mlxserve.bench.cli import app
from mlxserve.bench.client import TimedRequest
from mlxserve.bench.plot import draw, panels_of
from mlxserve.bench.report import Figure, Report
from mlxserve.bench.servers import Contender, ServerFailed
from mlxserve.core.errors import InvalidConfig


def request(label: str = "", at: float = 0.0, *times: float, **fields: Any) -> TimedRequest:
    made = TimedRequest(label, at, list(times), max(times, default=at))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_figures_are_of_all_requests_from_the_first_to_the_last() -> None:
    found = serving.measure(
        [
            request("a", 0.0, 1.0, 1.5, num_prompt=60, num_cached=30, num_completion=2),
            request("b", 1.0, 3.0, 4.0, num_prompt=20, num_cached=10, num_completion=2),
            request("b", 1.0, error="429"),
        ]
    )
    assert found["requests/s"] == 2 / 4
    assert found["prompt tokens/s"] == 80 / 4
    assert found["answer tokens/s"] == 1
    assert found["cached share"] == 0.5
    assert (found["gap p50, ms"], found["gap max, ms"]) == (500, 1000)
    assert (found["first token, a p50, ms"], found["first token, b p50, ms"]) == (1000, 2000)
    assert found["errors"] == 1


def test_ratios_are_taken_pair_by_pair_and_zeros_are_left_out() -> None:
    runs = {
        "x": [{"rate": 2.0, "errors": 0.0}, {"rate": 9.0, "errors": 0.0}],
        "y": [{"rate": 1.0, "errors": 0.0}, {"rate": 3.0, "errors": 0.0}],
    }
    figures = list(serving.figures(runs))
    assert figures == [
        Figure("rate", "", (2.0, 9.0), "x"),
        Figure("rate", "", (1.0, 3.0), "y"),
        Figure("rate", "", (2.0, 3.0), "÷ y"),
    ]


def test_every_round_sends_each_contender_the_same_and_the_first_round_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, float]] = []

    class Client:
        def __init__(self, url: str, model: str) -> None:
            self.url = url
            self.requests = [request("", 0.0, 1.0, num_prompt=1)]

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            """Nothing to close."""

        async def metric(self, name: str) -> float:
            return float(len(asked))

    async def play(context: loads.LoadContext) -> None:
        asked.append((context.client.url, context.draw.random()))  # type: ignore[attr-defined]

    monkeypatch.setattr(serving, "LoadClient", Client)
    workload = serving.Workload("w", play, (), "")
    both = [Contender("one", "1", "m"), Contender("two", "2", "m")]
    runs = asyncio.run(serving.play_rounds(workload, both, 2, 1.0, lambda _: None))
    assert [url for url, _ in asked] == ["1", "2"] * 3
    assert [draw for _, draw in asked[::2]] == [draw for _, draw in asked[1::2]]
    assert len({draw for _, draw in asked}) == 3
    assert len(runs["one"]) == len(runs["two"]) == 2
    assert runs["one"][0].figures["num_preemptions"] == 1  # the increase during the load


def test_a_round_keeps_the_first_error_of_its_requests() -> None:
    gone = Contender("gone", "http://127.0.0.1:9", "m")
    warmed: list[float] = []

    async def play(context: loads.LoadContext) -> None:
        warmed.append(context.size)
        await context.ask(["w1"], 1)

    workload = serving.Workload("w", play, (), "")
    [found] = asyncio.run(
        serving.play_rounds(workload, [gone], 1, 2.0, lambda _: None, warm_up=0.1)
    )["gone"]
    assert warmed == [0.2, 2.0]
    assert "ConnectError" in (found.failure or "")
    assert found.figures["errors"] == 1


def report() -> Report:
    figures = (
        Figure("rate", "", (1.0, 3.0), "ours"),
        Figure("rate", "", (1.0, 1.0), "theirs"),
        Figure("rate", "", (1.0, 3.0), "÷ theirs"),
    )
    return Report("demo", {}, figures, {"cores": "2"})


def test_a_plot_has_a_panel_per_figure_and_no_ratios() -> None:
    panels = panels_of(report())
    assert {name: [f.who for f in figures] for name, figures in panels.items()} == {
        "rate": ["ours", "theirs"]
    }


def test_plotting_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidConfig, match=r"matplotlib: .* install .*\[.*bench.*\]"):
        draw(report(), tmp_path / "plot.png")


def test_a_server_that_does_not_start_shows_why() -> None:
    script = "import sys; sys.exit('no such model')"
    failing = servers.run_child("ours", [sys.executable, "-c", script], "/ready", {})
    with pytest.raises(ServerFailed, match=r"ours did not start(?s:.*)no such model"):
        failing.__enter__()


@pytest.mark.long
def test_a_workload_runs_on_real_servers(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--model", "mlxserve-mini", "--pairs", "1", "--size", "0.2", "--num-pages", "256"]
    result = CliRunner().invoke(app, ["again", *options, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = {(f["name"], f["who"]): f["median"] for f in json.loads(file.read_text())["figures"]}
    assert figures["cached share", "mlxserve"] > 0.5
    assert figures["cached share", "without cache"] == 0
    assert ("errors", "mlxserve") not in figures


def test_words_are_new_in_every_round() -> None:
    first, second = (
        loads.LoadContext(None, random.Random(f"w/{n}"))  # type: ignore[arg-type]
        for n in range(2)
    )
    assert first.words(20) != second.words(20)
