"""`python -m tests.reliability NAME`: the long runs, of which the slow suite has short ones."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.system import machine
from tests.reliability.beside import run_beside
from tests.reliability.every_field import run_every_field
from tests.reliability.kills import kill_again_and_again
from tests.reliability.several_models import run_several_models
from tests.reliability.side_by_side import run_side_by_side

app = typer.Typer(add_completion=False)


def _say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """For one run, whose servers see nothing of the user: no options, no disk cache, no named prefix."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "MLXSERVE_HOME": str(folder / "home"),
            "MLXSERVE_DISK_CACHE_DIR": str(folder / "pages"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }
        yield folder


@app.command()
def kills(times: Annotated[int, typer.Option(min=1)] = 200, seed: int = 1) -> None:
    """Kill a server under load, again and again."""
    machine.prepare()  # before the model is written with mlx
    from tests.conftest import write_model

    with _own_folder() as folder:
        model = folder / "model"
        model.mkdir()
        write_model(model, "qwen3", max_position_embeddings=1_000)
        report = kill_again_and_again(folder, model, times, seed, say=_say)
    print(report)
    sys.exit(bool(report.wrong_answers or report.leftovers))


@app.command()
def side_by_side(minutes: Annotated[float, typer.Option(min=0.5)] = 60) -> None:
    """Hostile and good clients side by side. The good ones' p99 gap may double at most, and none waits
    for more than two seconds, or twice what one alone does."""
    machine.prepare()  # before a model is written with mlx
    with _own_folder() as folder:
        report = run_side_by_side(folder, minutes)
    print(report)
    slope, error = report.slope()
    is_good = not (
        report.alone.failures
        or report.beside.failures
        or report.bad_replies
        or report.pages_left
        or report.beside.gap(0.99) > 2 * report.alone.gap(0.99)
        or report.slow_kinds()
        or slope > 3 * error
    )
    sys.exit(not is_good)


@app.command()
def beside(
    only: Annotated[list[str] | None, typer.Argument(help="Parts of names of attacks.")] = None,
) -> None:
    """Each attack beside another client, none of whose requests may wait for more than two seconds, or
    twice what it waits alone."""
    machine.prepare()  # before a model is written with mlx
    with _own_folder() as folder:
        report = run_beside(folder, only or [], say=_say)
    print(report)
    sys.exit(not report.is_good)


@app.command()
def engine(
    steps: Annotated[
        int, typer.Option(min=1, help="Of all runs with this file together.")
    ] = 300_000,
    seed: Annotated[int, typer.Option(help="Of the first episode.")] = 1,
    file: Annotated[Path, typer.Option(help="Where a run that was stopped goes on.")] = Path(
        "engine-fuzz.json"
    ),
) -> None:
    """Whole engines of tiny models under random events and faults, one after another."""
    machine.prepare()  # before the models are written with mlx
    with _own_folder():
        from tests.reliability.engine_machine import fuzz

        is_good = fuzz(file, seed, steps, _say)
    sys.exit(not is_good)


@app.command()
def every_field(
    every: Annotated[int, typer.Option(min=1, help="Send each N-th request only.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="Begin with this one.")] = 0,
) -> None:
    """Hostile values for every field of every route: nothing holds the event loop or a processor."""
    machine.prepare()
    with _own_folder() as folder:
        report = run_every_field(folder, every=every, first=first, say=_say)
    print(report)
    sys.exit(bool(report.faults))


@app.command()
def models(minutes: Annotated[float, typer.Option(min=0.2)] = 30) -> None:
    """Four models take turns in memory for two, and eight clients ask them."""
    machine.prepare()  # before the models are written with mlx
    with _own_folder() as folder:
        report = run_several_models(folder, minutes)
    print(report)
    sys.exit(not report.is_good)


if __name__ == "__main__":
    app(prog_name="python -m tests.reliability")
