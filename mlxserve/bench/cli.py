"""The commands of `mlxserve bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.bench.report import Report
from mlxserve.bench.serving import WORKLOADS, Workload, bench_serving
from mlxserve.bench.synthetic import PREFIX, synthetic_model

app = typer.Typer(
    help="Measure this machine, always beside a baseline in the same run.", no_args_is_help=True
)

Model = Annotated[
    str,
    typer.Option(help="A folder, a repository id, or synthetic:llama-100m, synthetic:qwen3-0.6b."),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this PNG file.")]


@app.command()
def decode(
    model: Model = "synthetic:llama-100m",
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of runs.")] = 5,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Answers at the same time.")] = 1,
    shared: Annotated[
        int, typer.Option(min=1, help="With --batch: tokens that all prompts begin with.")
    ] = 512,
    json: Json = None,
) -> None:
    """Decode speed beside mlx-lm's own loops on the same weights, in one process."""
    from mlxserve.bench.decode import bench_batch_decode, bench_decode

    if batch == 1:
        report = bench_decode(_resolve(model), pairs=pairs, context=context, tokens=tokens)
    else:
        report = bench_batch_decode(
            _resolve(model), pairs=pairs, batch=batch, shared=shared, own=context, tokens=tokens
        )
    _finish(report, json)


@app.command()
def gap(
    model: Model = "synthetic:llama-100m",
    runs: Annotated[int, typer.Option(min=1, help="Runs after the one that warms up.")] = 3,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 2500,
    max_num_batched_tokens: Annotated[int, typer.Option(min=64, help="The step budget.")] = 2048,
    json: Json = None,
) -> None:
    """The longest gap of a running stream while a long prompt is computed beside it."""
    from mlxserve.bench.gap import bench_gap

    report = bench_gap(
        _resolve(model),
        runs=runs,
        prompt_length=prompt_length,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    _finish(report, json)


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="Write one JSON line per step to this file.")],
    model: Model = "synthetic:llama-100m",
    max_context: Annotated[int, typer.Option(min=256, help="The longest prompt.")] = 4096,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The most decodes in a step.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=64, help="The step budget.")] = 2048,
) -> None:
    """Record the steps of a short mixed load on the real engine, for `simulate --fit`."""
    from mlxserve.bench.record import record as record_load

    fitted = record_load(
        _resolve(model),
        out,
        max_context=max_context,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    typer.echo(f"{out}: {fitted.text()}")


@app.command()
def simulate(
    workload: Annotated[
        list[str] | None, typer.Option(help="chat, fan-out, agents or bursty; may be repeated.")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Fit step times to this file of `mlxserve bench record`.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="About so many in each run.")] = 400,
    seeds: Annotated[int, typer.Option(min=2, help="Paired runs of each variant.")] = 6,
    option: Annotated[
        list[str] | None, typer.Option(help="Vary only this option; may be repeated.")
    ] = None,
    json: Json = None,
) -> None:
    """The real scheduler under a simulated clock: which defaults hold on which workload."""
    from rich.console import Console

    from mlxserve.bench import comparison, costs, workloads
    from mlxserve.bench.report import machine

    console = Console()
    scenarios = [workloads.find_scenario(name) for name in workload or workloads.SCENARIOS]
    variants = comparison.find_variants(option)
    cost = costs.ASSUMED
    if fit is None:
        console.print("Step times are assumed (8B weights in 4 bits, 400 GB/s); see --fit.")
    else:
        fitted = costs.fit(costs.read_trace(fit))
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
                progress=status.update,
            )
            compared.show(console)
            comparisons.append(compared)
    comparison.show_verdicts(comparisons, console)
    if json is not None:
        comparison.write_json(json, cost, machine(), comparisons)


@app.command()
def sched(
    running: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests that decode; may be repeated.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of each; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of 32 steps each.")] = 10,
    json: Json = None,
) -> None:
    """Microseconds that planning and committing a step takes."""
    from mlxserve.bench.sched import bench_sched

    report = bench_sched(
        running=running or [1, 16, 64, 256],
        contexts=context or [1_000, 10_000, 100_000],
        rounds=rounds,
    )
    _finish(report, json)


def _serving(workload: Workload) -> Callable[..., None]:
    def command(
        model: Model = "synthetic:llama-100m",
        against: Annotated[
            list[str] | None,
            typer.Option(
                help="A server's URL, or mlx-lm to start its server on the same files; may be repeated."
            ),
        ] = None,
        pairs: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 3,
        size: Annotated[float, typer.Option(min=0.01, help="Scales the prompts' lengths.")] = 1.0,
        num_pages: Annotated[int, typer.Option(min=8, help="Of our servers' caches.")] = 1024,
        json: Json = None,
        plot: Plot = None,
    ) -> None:
        from rich.console import Console

        with Console(stderr=True).status("") as status:
            report = bench_serving(
                workload,
                _resolve(model),
                against=against or [],
                pairs=pairs,
                size=size,
                num_pages=num_pages,
                progress=status.update,
            )
        _finish(report, json, plot)

    return command


for _workload in WORKLOADS.values():
    app.command(
        _workload.name, help=_workload.about, rich_help_panel="Over HTTP, also beside other servers"
    )(_serving(_workload))


@app.command()
def startup(
    model: Model = "mlxserve-mini",
    against: Annotated[list[str] | None, typer.Option(help="mlx-lm, for its server.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of starts.")] = 3,
    json: Json = None,
) -> None:
    """Seconds from the start of a server's process until it is ready, and to its first token."""
    from mlxserve.bench.startup import bench_startup

    _finish(bench_startup(_resolve(model), against=against or [], pairs=pairs), json)


@app.command()
def targets(
    model: Model = "synthetic:llama-100m",
    small: Annotated[
        str, typer.Option(help="The model whose server is started.")
    ] = "mlxserve-mini",
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of each.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="A bench by its name in the list; may be repeated.")
    ] = None,
    json: Json = None,
) -> None:
    """Every promise beside its baseline, in one run of some minutes; 1 if one is missed."""
    from json import dumps

    from rich.console import Console

    from mlxserve.bench import targets as promised

    with Console(stderr=True).status("") as status:
        benches = promised.measures(_resolve(model), small, pairs, status.update)
        if unknown := set(only or ()) - set(benches):
            raise typer.BadParameter(f"{unknown.pop()!r} is not one of {', '.join(benches)}.")
        wanted = [t for t in promised.TARGETS if not only or t.bench in only]
        rows = list(promised.bench_targets(benches, wanted, status.update))
    promised.show(rows)
    if json is not None:
        json.write_text(dumps(promised.as_json(rows), indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(0 if all(row.is_kept for row in rows) else 1)


@app.command()
def growth(
    model: Model = "synthetic:llama-100m",
    rounds: Annotated[int, typer.Option(min=1, help="After the one that warms up.")] = 5,
    json: Json = None,
) -> None:
    """How steps, admissions and memory grow with requests, contexts, prompts and cached chats."""
    from mlxserve.bench.growth import bench_growth

    _finish(bench_growth(_resolve(model), rounds=rounds), json)


@app.command()
def soak(
    model: Model = "mlxserve-mini",
    minutes: Annotated[int, typer.Option(min=2, help="Of mixed load.")] = 60,
    json: Json = None,
) -> None:
    """Mixed load for long: memory's slope, pages not given back, gaps minute by minute."""
    from rich.console import Console

    from mlxserve.bench.soak import bench_soak

    with Console(stderr=True).status("") as status:
        report = bench_soak(_resolve(model), minutes=minutes, progress=status.update)
    _finish(report, json)


@app.command()
def overhead(
    model: Model = "synthetic:llama-100m",
    runs: Annotated[int, typer.Option(min=1, help="Runs after the one that warms up.")] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Answers at the same time.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer, at most.")] = 64,
    json: Json = None,
) -> None:
    """What the API costs beside the engine: microseconds of CPU per streamed token."""
    from mlxserve.bench.overhead import bench_overhead

    report = bench_overhead(_resolve(model), runs=runs, streams=streams, tokens=tokens)
    _finish(report, json)


@app.command()
def screen(
    runs: Annotated[int, typer.Option(min=1, help="Of each measurement.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="That each of them takes.")] = 6.0,
    text: Annotated[
        list[str] | None, typer.Option(help="prose, fence, list or long; may be repeated.")
    ] = None,
    json: Json = None,
) -> None:
    """The terminal: first picture, idle CPU, and stalls while answers come, beside Textual's own."""
    from mlxserve.bench.screen import TEXTS, bench_screen

    texts = text or list(TEXTS)
    if unknown := set(texts) - set(TEXTS):
        raise typer.BadParameter(f"{unknown.pop()!r} is not one of {', '.join(TEXTS)}.")
    _finish(bench_screen(runs=runs, seconds=seconds, texts=texts), json)


def _resolve(model: str) -> str:
    return str(synthetic_model(model)) if model.startswith(PREFIX) else model


def _finish(report: Report, json: Path | None, plot: Path | None = None) -> None:
    report.show()
    if json is not None:
        report.write_json(json)
    if plot is not None:
        from mlxserve.bench.plot import draw

        draw(report, plot)
