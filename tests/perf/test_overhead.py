"""The API's time is the CPU time of its event loop's thread."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from mlxserve.build import build_text_model
from mlxserve.core.config import EngineConfig
from tests.perf import overhead
from tests.perf.cli import app


@pytest.mark.instruments
def test_only_the_time_of_the_event_loop_counts(tmp_path: Path) -> None:
    chat = build_text_model(EngineConfig().with_options(num_pages=64, disable_log_stats=True))
    with overhead.served(chat) as (url, loop_time):
        before = loop_time()
        ends = time.thread_time() + 0.2
        while time.thread_time() < ends:  # this thread works, the loop's does not
            pass
        assert loop_time() - before < 0.1
        assert overhead.stream_answers(url, chat.model_name, 2, 4) > 0
        with pytest.raises(RuntimeError, match="max_tokens"):
            overhead.stream_answers(url, chat.model_name, 1, 0)
    with pytest.raises(httpx.TransportError):
        httpx.get(url)


@pytest.mark.instruments
def test_the_report_has_one_figure_per_run_for_tokens_and_for_requests(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--model", "mlxserve-mini", "--runs", "2", "--streams", "2", "--tokens", "64"]
    result = CliRunner().invoke(app, ["overhead", *options, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())["figures"]
    assert [figure["unit"] for figure in figures] == ["µs", "µs"]
    assert [len(figure["values"]) for figure in figures] == [2, 2]
    assert (
        min(figures[1]["values"]) > 0
    )  # the value per token is a difference, and noise can make it negative
