"""The commands of `mlxserve bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.bench.report import Report, as_words
from mlxserve.bench.serving import WORKLOADS, bench_serving
from mlxserve.bench.synthetic import PREFIX, synthetic_model
from mlxserve.bench.table import bench_table
from mlxserve.system.command_help import PlainTyper

app = PlainTyper(
    help="Measure this machine, always next to a baseline in the same run.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelOption = Annotated[
    str,
    typer.Option(
        help="A folder, a repository id, or synthetic:llama-100m, :qwen3-0.6b or :counting-100m."
    ),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", help="Plot the figures to this PNG file.")
]
AgainstOption = Annotated[
    list[str] | None,
    typer.Option(
        help="URL of a server, or mlx-lm to start its server on the same files; may be repeated."
    ),
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Interleaved rounds.")]
SizeOption = Annotated[float, typer.Option(min=0.01, help="Scales the prompts' lengths.")]
PagesOption = Annotated[int, typer.Option(min=8, help="Pages of our servers' caches.")]
_OVER_HTTP = "Over HTTP, also next to other servers"


@app.command()
def decode(
    model: ModelOption = "synthetic:llama-100m",
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of runs.")] = 5,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Concurrent answers.")] = 1,
    shared: Annotated[
        int, typer.Option(min=1, help="With --batch: tokens of the prefix that all prompts share.")
    ] = 512,
    json: JsonOption = None,
) -> None:
    """Decode speed next to mlx-lm's own loops on the same weights, in one process."""
    from mlxserve.bench.decode import bench_batch_decode, bench_decode

    if batch == 1:
        report = bench_decode(model_folder(model), pairs=pairs, context=context, tokens=tokens)
    else:
        report = bench_batch_decode(
            model_folder(model), pairs=pairs, batch=batch, shared=shared, own=context, tokens=tokens
        )
    finish(report, json)


def _over_http(bench: Callable[..., Report], default_model: str) -> Callable[..., None]:
    """Return the command of a measurement that starts servers, and may compare others."""

    def command(
        model: ModelOption = default_model,
        against: AgainstOption = None,
        pairs: RoundsOption = 3,
        size: SizeOption = 1.0,
        num_pages: PagesOption = 1024,
        json: JsonOption = None,
        plot: PlotOption = None,
    ) -> None:
        with _shown_progress() as progress:
            report = bench(
                model_folder(model),
                against=against or [],
                pairs=pairs,
                size=size,
                num_pages=num_pages,
                progress=progress,
            )
        finish(report, json, plot)

    return command


for _workload in WORKLOADS.values():
    app.command(_workload.name, help=_workload.about, rich_help_panel=_OVER_HTTP)(
        _over_http(partial(bench_serving, _workload), _workload.model)
    )
app.command(
    "table",
    help="All that servers are compared by, in one run: gaps, first tokens, rates, starts; with targets.",
    rich_help_panel=_OVER_HTTP,
)(_over_http(bench_table, "synthetic:llama-100m"))


@app.command()
def startup(
    model: ModelOption = "mlxserve-mini",
    against: Annotated[list[str] | None, typer.Option(help="mlx-lm, for its server.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of starts.")] = 3,
    json: JsonOption = None,
) -> None:
    """Seconds and CPU from the start of a server's process until it is ready, and to its first token."""
    from mlxserve.bench.startup import bench_startup

    finish(bench_startup(model_folder(model), against=against or [], pairs=pairs), json)


@app.command()
def restart(
    model: ModelOption = "synthetic:llama-100m",
    pairs: Annotated[int, typer.Option(min=1, help="Rounds, each with two servers.")] = 3,
    tokens: Annotated[int, typer.Option(min=64, help="Length of the prompt.")] = 8192,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="Unload the model and load it again instead of a restart."),
    ] = False,
    json: JsonOption = None,
) -> None:
    """Seconds to the first token of a long prompt: cold, from memory, from disk after a restart."""
    from mlxserve.bench.restart import bench_restart

    with _shown_progress() as progress:
        report = bench_restart(
            model_folder(model),
            pairs=pairs,
            num_tokens=tokens,
            reloads=reload,
            progress=progress,
        )
    finish(report, json)


@contextmanager
def _shown_progress() -> Iterator[Callable[[str], None]]:
    """Show progress; yields the function to call with each current task."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(as_words(text))


def model_folder(model: str) -> str:
    """Return the folder of a synthetic model, writing it if missing; other names unchanged."""
    return str(synthetic_model(model)) if model.startswith(PREFIX) else model


def finish(report: Report, json: Path | None, plot: Path | None = None) -> None:
    """Show a report, and write it to the requested files."""
    report.show()
    if json is not None:
        report.write_json(json)
    if plot is not None:
        from mlxserve.bench.plot import draw

        draw(report, plot)
