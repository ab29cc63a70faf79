"""`mlxserve bench`: passes its arguments to the benchmarks' own command line."""

# Annotations are read by typer at run time, so this file does not postpone them.

import typer


def bench(context: typer.Context) -> None:
    """Measure this machine, with a baseline in the same run."""
    from mlxserve.bench.cli import app as bench_app
    from mlxserve.system import machine

    machine.prepare()
    bench_app(args=context.args, prog_name="mlxserve bench")
