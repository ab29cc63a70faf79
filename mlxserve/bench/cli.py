"""The commands of `mlxserve bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.bench.report import Report
from mlxserve.bench.serving import WORKLOADS, Workload, bench_serving
from mlxserve.bench.synthetic import PREFIX, synthetic_model
from mlxserve.config import EngineConfig

app = typer.Typer(
    help="Measure this machine, always next to a baseline in the same run.",
    no_args_is_help=True,
    add_completion=False,
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


@app.command()
def simulate(
    workload: Annotated[
        list[str] | None, typer.Option(help="chat, fan-out, agents or bursty; may be repeated.")
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(help="Fit step times to this recording; with --model, write it first."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Record this model's steps on this machine, and fit step times to them."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Approximate requests of a run.")] = 400,
    seeds: Annotated[int, typer.Option(min=2, help="Paired runs of each variant.")] = 6,
    option: Annotated[
        list[str] | None, typer.Option(help="Vary only this option; may be repeated.")
    ] = None,
    itl_target_ms: Annotated[
        float, typer.Option(min=0, help="As of the server, in every variant; 0 sets no limit.")
    ] = EngineConfig().itl_target_ms,
    json: JsonOption = None,
) -> None:
    """The real scheduler under a simulated clock: which defaults hold on which workload."""
    from rich.console import Console

    from mlxserve.bench import comparison, costs, workloads
    from mlxserve.bench.recording import recorded_fit
    from mlxserve.bench.report import machine

    console = Console()
    scenarios = [workloads.find_scenario(name) for name in workload or workloads.SCENARIOS]
    variants = comparison.find_variants(option)
    cost = costs.ASSUMED
    if model is not None:
        with console.status("recording the steps of a short load"):
            fitted = recorded_fit(model_folder(model), fit)
    elif fit is not None:
        fitted = costs.fit(costs.read_trace(fit))
    else:
        fitted = None
    if fitted is None:
        console.print("Step times are assumed (8B weights in 4 bits, 400 GB/s); see --model.")
    else:
        cost = fitted.model
        console.print(f"Step times {fitted.text()}.")
    comparisons = []
    with console.status("") as status:
        for scenario in scenarios:
            compared = comparison.compare(
                scenario,
                cost,
                num_requests=requests,
                seeds=seeds,
                variants=variants,
                base=EngineConfig().with_options(itl_target_ms=itl_target_ms),
                progress=status.update,
            )
            compared.show(console)
            comparisons.append(compared)
    comparison.show_verdicts(comparisons, console)
    if json is not None:
        comparison.write_json(json, cost, machine(), comparisons)


def _serving(workload: Workload) -> Callable[..., None]:
    def command(
        model: ModelOption = workload.model,
        against: AgainstOption = None,
        pairs: RoundsOption = 3,
        size: SizeOption = 1.0,
        num_pages: PagesOption = 1024,
        json: JsonOption = None,
        plot: PlotOption = None,
    ) -> None:
        from rich.console import Console

        with Console(stderr=True).status("") as status:
            report = bench_serving(
                workload,
                model_folder(model),
                against=against or [],
                pairs=pairs,
                size=size,
                num_pages=num_pages,
                progress=status.update,
            )
        finish(report, json, plot)

    return command


for _workload in WORKLOADS.values():
    app.command(
        _workload.name,
        help=_workload.about,
        rich_help_panel=_OVER_HTTP,
    )(_serving(_workload))


@app.command(rich_help_panel=_OVER_HTTP)
def table(
    model: ModelOption = "synthetic:llama-100m",
    against: AgainstOption = None,
    pairs: RoundsOption = 3,
    size: SizeOption = 1.0,
    num_pages: PagesOption = 1024,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """All that servers are compared by, in one run: gaps, first tokens, rates, starts; with targets."""
    from rich.console import Console

    from mlxserve.bench.table import bench_table

    with Console(stderr=True).status("") as status:
        report = bench_table(
            model_folder(model),
            against=against or [],
            pairs=pairs,
            size=size,
            num_pages=num_pages,
            progress=status.update,
        )
    finish(report, json, plot)


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
    json: JsonOption = None,
) -> None:
    """Seconds to the first token of a long prompt: cold, from memory, from disk after a restart."""
    from rich.console import Console

    from mlxserve.bench.restart import bench_restart

    with Console(stderr=True).status("") as status:
        report = bench_restart(
            model_folder(model), pairs=pairs, num_tokens=tokens, progress=status.update
        )
    finish(report, json)


@app.command()
def kv_dtype(
    model: ModelOption = "mlxserve-mini",
    text: Annotated[
        Path | None, typer.Option(help="A text file; without it what the model itself writes.")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts that are read.")] = 8,
    context: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 512,
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of a greedy answer to the first half of each text.")
    ] = 128,
    json: JsonOption = None,
) -> None:
    """Keys and values in 8 bits next to the model's own dtype: perplexity, greedy tokens, memory."""
    from rich.console import Console

    from mlxserve.bench.kv_dtype import bench_kv_dtype

    with Console(stderr=True).status("") as status:
        report = bench_kv_dtype(
            model_folder(model),
            text=text,
            num_texts=texts,
            context=context,
            tokens=tokens,
            progress=status.update,
        )
    finish(report, json)


def model_folder(model: str) -> str:
    """The folder of a synthetic model, written if it is missing; any other name unchanged."""
    return str(synthetic_model(model)) if model.startswith(PREFIX) else model


def finish(report: Report, json: Path | None, plot: Path | None = None) -> None:
    """Show a report, and write it to the files asked for."""
    report.show()
    if json is not None:
        report.write_json(json)
    if plot is not None:
        from mlxserve.bench.plot import draw

        draw(report, plot)
