"""The scheduler's own cost is measured on full steps of decodes."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from tests.perf import sched
from tests.perf.cli import app


def test_every_request_decodes_in_the_measured_steps() -> None:
    scheduler = sched.prefilled_scheduler(20, 500, max_tokens=200)
    chunks = scheduler.schedule()
    assert len(chunks) == 20
    assert all(chunk.length == 1 and chunk.samples for chunk in chunks)
    assert max(chunk.end for chunk in chunks) >= 500
    crossings = {chunk.start % sched.PAGE_SIZE for chunk in chunks}
    assert len(crossings) > 10  # not all pages are full in the same step
    scheduler.check()


def test_a_round_takes_a_page_for_every_request() -> None:
    scheduler = sched.prefilled_scheduler(8, 300, max_tokens=200)
    published = scheduler.pool.num_published
    chunks = scheduler.schedule()
    for _ in range(sched.PAGE_SIZE):
        chunks = sched.step(scheduler, chunks)
    assert scheduler.pool.num_published == published + 8


def test_there_is_a_time_for_every_round() -> None:
    seconds = sched.measure(4, 100, rounds=3)
    assert len(seconds) == 3
    assert all(value > 0 for value in seconds)


def test_the_command_shows_growth_over_requests_and_contexts(tmp_path: Path) -> None:
    file = tmp_path / "sched.json"
    result = CliRunner().invoke(
        app,
        f"sched --running 1 --running 4 --context 50 --context 200 --rounds 2 --json {file}",
    )
    assert result.exit_code == 0, result.output
    names = [figure["name"] for figure in json.loads(file.read_text())["figures"]]
    assert names == [
        "1 running, 200 tokens each",
        "4 running, 200 tokens each",
        "4 running, 50 tokens each",
    ]
