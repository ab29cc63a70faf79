"""The command line of `python -m tests.perf`: one command per measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxserve.bench.cli import JsonOption, ModelOption, model_folder
from mlxserve.bench.report import Report
from mlxserve.core.config import EngineConfig

app = typer.Typer(
    help="Measure what mlxserve costs, for its developers.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def gap(
    model: ModelOption = "synthetic:llama-100m",
    runs: Annotated[int, typer.Option(min=1, help="Runs after the warm-up run.")] = 3,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 2500,
    max_num_batched_tokens: Annotated[int, typer.Option(min=64, help="The step budget.")] = 2048,
    image: Annotated[
        int, typer.Option(min=0, help="Side of an image in pixels, for a model made for it.")
    ] = 0,
    json: JsonOption = None,
) -> None:
    """The longest gap of a running stream while a long prompt is computed, or an image beside texts of its size."""
    from tests.perf.gap import bench_gap, bench_image_gap

    if image:
        _finish(bench_image_gap(runs=runs, side=image), json)
        return
    report = bench_gap(
        model_folder(model),
        runs=runs,
        prompt_length=prompt_length,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    _finish(report, json)


@app.command()
def cleaner(
    model: ModelOption = "mlxserve-mini",
    pairs: Annotated[int, typer.Option(min=1, help="Rounds, after one that warms up.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Short prompts beside the answer.")] = 120,
    slow_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that a page takes on the slow disk.")
    ] = 0.2,
    json: JsonOption = None,
) -> None:
    """The longest gap of an answer while pages are written to a disk, to a slow one, to none."""
    from rich.console import Console

    from tests.perf.cleaner import bench_cleaner

    with Console(stderr=True).status("") as status:
        report = bench_cleaner(
            model_folder(model),
            pairs=pairs,
            num_prompts=prompts,
            slow_seconds=slow_seconds,
            progress=status.update,
        )
    _finish(report, json)


@app.command()
def cold(
    processes: Annotated[int, typer.Option(min=1, help="Rounds of three processes.")] = 9,
    pairs: Annotated[int, typer.Option(min=1, help="Runs of each, after a warm-up.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 500,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    num_pages: Annotated[
        int, typer.Option(min=2, help="Pages of 32; by default, they are soon all in use.")
    ] = 192,
    itl_target_ms: Annotated[
        float, typer.Option(min=0, help="As of the server; 0: both sides compute equal steps.")
    ] = 0,
    kind: Annotated[
        str | None, typer.Option(help="qwen3 (attention) or qwen3_next (recurrent); default: both.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """CPU time of prompts of which nothing is cached, with the prefix cache and without it."""
    from rich.console import Console

    from tests.perf.cold import GEOMETRIES, Load, bench_cold

    if kind is not None and kind not in GEOMETRIES:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(GEOMETRIES)}")
    kinds = list(GEOMETRIES) if kind is None else [kind]
    load = Load(prompts, length, tokens, num_pages, itl_target_ms)
    with Console(stderr=True).status("") as status:
        report = bench_cold(load, kinds, processes=processes, pairs=pairs, progress=status.update)
    _finish(report, json)


@app.command()
def ranks(
    model: ModelOption = "synthetic:llama-100m",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each kind, interleaved.")] = 3,
    json: JsonOption = None,
) -> None:
    """What two ranks on this machine cost, by heads and by layers, beside one process."""
    from tests.perf.ranks import bench_ranks

    _finish(bench_ranks(Path(model_folder(model)), runs), json)


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

    from mlxserve.bench.report import machine
    from tests.perf.simulation import comparison, costs, workloads
    from tests.perf.simulation.recording import recorded_fit

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


@app.command()
def fleet(
    servers: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of servers; may be repeated.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Simulated seconds that are counted, after half as many.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the agents and the failures.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write the plot to this SVG file.")] = None,
) -> None:
    """Agents over many servers, simulated: what each policy of a router finds, and how long prompts wait."""
    from rich.console import Console

    from tests.perf.simulation.fleet.plot import figure, table
    from tests.perf.simulation.fleet.runs import SIZES, run_all

    with Console(stderr=True).status("") as status:
        results = run_all(servers or SIZES, seconds, seed, status.update)
    Console(width=150).print(table(results))
    if plot is not None:
        plot.write_text(figure(results), encoding="utf-8")


@app.command()
def router(
    servers: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of servers; may be repeated.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 200,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 3,
    json: JsonOption = None,
) -> None:
    """CPU time of the real vllm-router for a request, by policy and number of servers that answer at once."""
    from rich.console import Console

    from tests.perf.router import bench_router

    with Console(stderr=True).status("") as status:
        report = bench_router(
            servers or (3, 30, 100), num_requests=requests, runs=runs, progress=status.update
        )
    _finish(report, json)


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

    from tests.perf.kv_dtype import bench_kv_dtype

    with Console(stderr=True).status("") as status:
        report = bench_kv_dtype(
            model_folder(model),
            text=text,
            num_texts=texts,
            context=context,
            tokens=tokens,
            progress=status.update,
        )
    _finish(report, json)


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="Write one JSON line per step to this file.")],
    model: ModelOption = "synthetic:llama-100m",
    max_context: Annotated[int, typer.Option(min=256, help="Tokens of the longest prompt.")] = 4096,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most decodes in a step.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=64, help="The step budget.")] = 2048,
) -> None:
    """Record the steps of a short mixed load of chosen sizes, for `simulate --fit`."""
    from tests.perf.simulation.recording import record as record_load

    fitted = record_load(
        model_folder(model),
        out,
        max_context=max_context,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    typer.echo(f"{out}: {fitted.text()}")


@app.command()
def sched(
    running: Annotated[
        list[int] | None, typer.Option(min=1, help="Decoding requests; may be repeated.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of each; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of 32 steps.")] = 10,
    json: JsonOption = None,
) -> None:
    """Microseconds to plan and commit a step."""
    from tests.perf.sched import bench_sched

    report = bench_sched(
        running=running or [1, 16, 64, 256],
        contexts=context or [1_000, 10_000, 100_000],
        rounds=rounds,
    )
    _finish(report, json)


@app.command()
def plan_costs(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of 64 steps.")] = 7,
    json: JsonOption = None,
) -> None:
    """Microseconds of a step beside kept pages, named prefixes and waiting clients, and with windows."""
    from tests.perf.plan_costs import bench_plan_costs

    _finish(bench_plan_costs(rounds=rounds), json)


@app.command()
def drafts(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    answers: Annotated[
        int, typer.Option(min=0, help="Answers of the included model, one after the other.")
    ] = 200,
    json: JsonOption = None,
) -> None:
    """Drafts beside plain decode on recorded machines, and the passes of weights that they save; not timed."""
    from mlxserve.system import machine

    machine.prepare()
    machine.import_mlx_lm()
    from tests.perf.drafts import bench_drafts

    _finish(bench_drafts(seeds=seeds, num_answers=answers), json)


@app.command()
def calls(
    functions: Annotated[bool, typer.Option(help="By function instead of by file.")] = False,
    json: JsonOption = None,
) -> None:
    """The functions of ours that one decode step enters, on a CPU and recorded for Metal."""
    from mlxserve.system import machine

    machine.prepare()
    machine.import_mlx_lm()
    from tests.perf.calls import bench_calls

    _finish(bench_calls(by_function=functions), json)


@app.command(name="way-in")
def way_in(
    functions: Annotated[bool, typer.Option(help="By function instead of by file.")] = False,
    json: JsonOption = None,
) -> None:
    """The functions of ours that a chat request enters from the socket to the scheduler's queue."""
    from mlxserve.system import machine

    machine.prepare()
    machine.import_mlx_lm()
    from tests.perf.way_in import bench_way_in

    _finish(bench_way_in(by_function=functions), json)


@app.command()
def host(
    decodes: Annotated[
        list[int] | None, typer.Option(min=1, help="Decoding requests; may be repeated.")
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prompt's chunk.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a round.")] = 20,
    json: JsonOption = None,
) -> None:
    """CPU time to build a step on Metal, beside mlx-lm's own step."""
    from mlxserve.system import machine

    machine.prepare()
    machine.import_mlx_lm()
    from tests.perf.host import bench_host

    report = bench_host(decodes=decodes or [1, 8, 32], chunk=chunk, rounds=rounds, steps=steps)
    _finish(report, json)


@app.command()
def memory() -> None:
    """Planned memory of real 4-bit models on Macs, from MLX's rules; nothing is run."""
    from tests.memory_table import memory_table

    typer.echo(memory_table(), nl=False)


@app.command()
def predict() -> None:
    """Tokens/s of ten models on six Macs by a model of costs, beside published figures; not measured."""
    from tests.perf.prediction import tables

    for line in tables():
        typer.echo(line)


@app.command()
def targets(
    model: ModelOption = "synthetic:llama-100m",
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of each.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a measurement in the list; may be repeated.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Targets of options and of decoding in process, each next to its baseline; exits with 1 if one is
    missed. `mlxserve bench table` has those that compare servers."""
    from json import dumps

    from rich.console import Console

    from tests.perf import targets as measured

    with Console(stderr=True).status("") as status:
        benches = measured.measures(model_folder(model), pairs, status.update)
        if unknown := set(only or ()) - set(benches):
            raise typer.BadParameter(f"{unknown.pop()!r} is not one of {', '.join(benches)}.")
        wanted = [t for t in measured.TARGETS if not only or t.bench in only]
        rows = list(measured.bench_targets(benches, wanted, status.update))
    measured.show(rows)
    if json is not None:
        json.write_text(dumps(measured.as_json(rows), indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(0 if all(row.is_met for row in rows) else 1)


@app.command()
def growth(
    model: ModelOption = "synthetic:llama-100m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the warm-up round.")] = 5,
    json: JsonOption = None,
) -> None:
    """How steps, admissions and memory grow with requests, contexts, prompts and cached chats."""
    from tests.perf.growth import bench_growth

    _finish(bench_growth(model_folder(model), rounds=rounds), json)


@app.command()
def soak(
    model: ModelOption = "mlxserve-mini",
    minutes: Annotated[int, typer.Option(min=2, help="Minutes of mixed load.")] = 60,
    json: JsonOption = None,
) -> None:
    """A long mixed load: memory growth, leaked pages, gaps minute by minute."""
    from rich.console import Console

    from tests.perf.soak import bench_soak

    with Console(stderr=True).status("") as status:
        report = bench_soak(model_folder(model), minutes=minutes, progress=status.update)
    _finish(report, json)


@app.command()
def loading(
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Of block, such as Q4_K; may be repeated; default: all."),
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of each file, about.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the fastest counts.")] = 5,
    json: JsonOption = None,
) -> None:
    """Seconds to load a GB of GGUF blocks of each kind, beside a folder for mlx."""
    from rich.console import Console

    from mlxserve.system import machine

    machine.prepare()
    machine.import_mlx_lm()
    from tests.perf.loading import KINDS, bench_loading

    if unknown := set(kind or ()) - set(KINDS):
        raise typer.BadParameter(f"{unknown.pop()!r} is not one of {', '.join(KINDS)}.")
    with Console(stderr=True).status("") as status:
        report = bench_loading(
            kind or KINDS, megabytes=megabytes, rounds=rounds, progress=status.update
        )
    _finish(report, json)


@app.command()
def overhead(
    model: ModelOption = "synthetic:llama-100m",
    runs: Annotated[int, typer.Option(min=1, help="Runs after the warm-up run.")] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent answers.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of each answer.")] = 64,
    json: JsonOption = None,
) -> None:
    """Microseconds of CPU that the API adds to each streamed token."""
    from tests.perf.overhead import bench_overhead

    report = bench_overhead(model_folder(model), runs=runs, streams=streams, tokens=tokens)
    _finish(report, json)


@app.command(name="memory-turns")
def memory_turns(
    size: Annotated[
        list[float] | None, typer.Option(min=0.6, help="GiB of the cache; may be repeated.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Tokens computed by chats in turns, room and waits: layers with a window beside dense ones."""
    from tests.perf.memory_turns import bench_memory_turns

    _finish(bench_memory_turns(size or [1.2, 4.0, 8.0]), json)


@app.command(name="disk-turns")
def disk_turns(
    size: Annotated[
        list[float] | None, typer.Option(min=0.6, help="GiB of the cache; may be repeated.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Tokens that a long chat computes beside side requests, and bytes that it reads from disk for a turn."""
    from tests.perf.disk_turns import bench_disk_turns

    _finish(bench_disk_turns(size or [1.2, 4.0]), json)


@app.command()
def screen(
    runs: Annotated[int, typer.Option(min=1, help="Runs of each measurement.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each run.")] = 6.0,
    text: Annotated[
        list[str] | None, typer.Option(help="prose, fence, list or long; may be repeated.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """The terminal: first frame, idle CPU, stalls while an answer streams; next to plain Textual."""
    from tests.perf.screen import TEXTS, bench_screen

    texts = text or list(TEXTS)
    if unknown := set(texts) - set(TEXTS):
        raise typer.BadParameter(f"{unknown.pop()!r} is not one of {', '.join(TEXTS)}.")
    _finish(bench_screen(runs=runs, seconds=seconds, texts=texts), json)


@app.command()
def screenshots(folder: Annotated[Path, typer.Argument(help="Where to write them.")]) -> None:
    """Take the screenshots of the documentation with the included model."""
    from tests.perf.screenshots import write_screenshots

    write_screenshots(folder)


def _finish(report: Report, json: Path | None) -> None:
    report.show(program="tests.perf")
    if json is not None:
        report.write_json(json)
