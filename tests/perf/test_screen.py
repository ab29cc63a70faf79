"""The measurement of the terminal runs; its results are not tested."""

import asyncio

import pytest

from tests.perf import screen, screen_child
from tests.perf.screen import bench_screen


def test_only_the_end_of_a_text_is_streamed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_child, "PIECES_PER_SECOND", 10_000)

    async def collect() -> list[str]:
        return [piece async for piece in screen_child.pieces_of("x" * 100, 0.0005)]

    pieces = asyncio.run(collect())
    assert [len(piece) for piece in pieces] == [80, 4, 4, 4, 4, 4]


def test_the_report_has_a_baseline_for_each_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "python_alone", lambda: 0.02)
    monkeypatch.setattr(screen, "time_start", lambda command: (0.2, 0.5))
    results = {
        "idle": {"blinking": [0.5], "still": [0.25]},
        "stream": {"stalls": [0.001, 0.03], "busy": [0.002, 0.02]},
    }
    monkeypatch.setattr(screen, "result_of", lambda kind, *more: results[kind])
    report = bench_screen(runs=2, seconds=1.0, texts=["fence"])
    medians = {figure.name: figure.text() for figure in report.figures}
    assert medians == {
        "first frame, mlxserve chat": "200 ms",
        "first frame, an empty Textual app": "200 ms",
        "typing is visible, mlxserve chat": "500 ms",
        "typing is visible, an empty Textual app": "500 ms",
        "Python alone, start to end": "20 ms",
        "idle, while the cursor blinks, of one core": "0.5 %",
        "idle, after that, of one core": "0.25 %",
        "idle, with the engine panel, while the cursor blinks, of one core": "0.5 %",
        "idle, with the engine panel, after that, of one core": "0.25 %",
        "a 600-line fence: stall p95": "30 ms",
        "a 600-line fence: longest": "30 ms",
        "a 600-line fence: work p95": "20 ms",
        "  with the engine panel: stall p95": "30 ms",
        "  with the engine panel: longest": "30 ms",
        "  with the engine panel: work p95": "20 ms",
        "  Textual's Markdown: stall p95": "30 ms",
        "  Textual's Markdown: longest": "30 ms",
        "  Textual's Markdown: work p95": "20 ms",
    }


def test_a_program_that_shows_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="showed nothing"):
        screen.time_start(["sh", "-c", "true"])


@pytest.mark.instruments
def test_the_panel_is_measured_with_a_map_that_moves() -> None:
    found = screen.result_of("stream", "fence", "panel", "1")
    assert len(found["stalls"]) > 5
    shares = screen.result_of("idle", "panel", "1")
    assert shares.keys() == {"blinking", "still"}
    assert all(share > 0 for [share] in shares.values())


@pytest.mark.instruments
def test_a_measurement_runs_in_a_terminal_of_its_own() -> None:
    found = screen.result_of("stream", "fence", "ours", "1")
    assert len(found["stalls"]) > 5
    picture, seen = screen.time_start(screen.EMPTY_APP)
    assert 0 < picture < seen
