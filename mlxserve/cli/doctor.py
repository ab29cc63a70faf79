"""`mlxserve doctor`: checks this machine and this installation."""

# Annotations are read by typer at run time, so this file does not postpone them.

import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxserve.cli.completion import models_here
from mlxserve.cli.ranks import run_by_launcher
from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import InvalidConfig, MlxServeError
from mlxserve.ranks.environment import own_rank

if TYPE_CHECKING:
    from mlxserve.doctor.finding import Finding

_NUM_LOG_LINES = 5
_HELD_SECONDS = 1.0  # by one route: every other request has waited as long
_DEFAULT_MODEL = "synthetic:llama-100m"


def doctor(
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Also measure this machine, which takes minutes, and write all of it to this JSON "
            "file: please attach it to an issue. It holds no secrets and no user name.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="With --report: the model to measure, a folder or a repository id. Default: "
            f"{_DEFAULT_MODEL}, random weights.",
            autocompletion=models_here,
        ),
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Measure the connection of these machines instead, in mlx.launch's format.",
        ),
    ] = None,
    distributed_backend: Annotated[
        str, typer.Option(help="With --hostfile: any, ring, jaccl or mpi.")
    ] = "any",
    port: Annotated[
        int,
        typer.Option(
            min=1, max=65_000, help="With --hostfile: the ranks listen here and on the next ports."
        ),
    ] = 29_502,
) -> None:
    """Check this machine and this installation.

    Prints a table that can be pasted into a bug report. Exits with 1 if a check fails.
    """
    if (rank := own_rank()) is not None:
        _time_ranks(rank, distributed_backend)
        return
    if hostfile is not None:
        code = run_by_launcher(hostfile, distributed_backend, port)
        sys.exit(130 if code is None else code)
    if model is not None and report is None:
        raise InvalidConfig("--model only applies to --report. Add --report, or omit --model.")
    is_well = _diagnose() if report is None else _report(report, model or _DEFAULT_MODEL)
    if not is_well:
        sys.exit(1)


def _time_ranks(rank: int, backend: str) -> None:
    from mlxserve.system import machine

    machine.prepare()
    from mlxserve.doctor.ranks import time_ranks  # imports mlx

    for finding in time_ranks(backend):
        if rank == 0:
            print_safe(finding)


def _report(path: Path, model: str) -> bool:
    """Print the report; True if no check failed. A missing figure is no failure."""
    from mlxserve.bench.cli import model_folder
    from mlxserve.doctor.figures import chosen, measure
    from mlxserve.doctor.finding import Finding
    from mlxserve.doctor.measurement import Measurement
    from mlxserve.doctor.report import diagnose
    from mlxserve.doctor.report_file import ReportFile

    file = ReportFile(path, model)
    try:
        folder = model_folder(model)
    except OSError as error:
        raise InvalidConfig(f"--model {model} cannot be written: {error}") from error
    is_well = True
    both: Iterator[Finding | Measurement] = chain(diagnose(), measure(folder))
    # Not the service: its log may hold anything.
    for finding in both:
        print_safe(finding)
        file.add(finding)
        is_well = is_well and not (isinstance(finding, Finding) and finding.is_broken)
    file.complete(chosen(folder))
    print_safe(f"{path} is complete: please attach it to an issue.")
    return is_well


def _diagnose() -> bool:
    from mlxserve.doctor.report import diagnose
    from mlxserve.doctor.sections import section

    is_well = True
    more = (
        section("servers", _server_findings),
        section("access", _access_findings),
        section("service", _service_findings),
        section("page store", _store_findings),
    )
    for finding in chain(diagnose(), *more):
        print_safe(finding)
        is_well = is_well and not finding.is_broken
    return is_well


def _access_findings() -> Iterator["Finding"]:
    """Report who gets into a server that is started with the configuration of now."""
    from mlxserve.api.access.description import describe
    from mlxserve.api.access.policy import read_access
    from mlxserve.api.config import ServerConfig
    from mlxserve.cli.options import SCHEMAS
    from mlxserve.cli.settings import Settings
    from mlxserve.doctor.finding import Finding

    config = Settings.read(SCHEMAS, {}, os.environ).build(ServerConfig)
    for name, value in describe(read_access(config, os.environ.get("MLXSERVE_API_KEY"))):
        yield Finding(name, value)


def _server_findings() -> Iterator["Finding"]:
    """Report what has held the event loops of this user's running servers."""
    from mlxserve.cli.running_servers import health_of, running_servers
    from mlxserve.doctor.finding import Finding, Grade

    for server in running_servers():
        health = health_of(server)
        if not health:
            yield Finding("server", f"{server.url} does not answer", Grade.SLOW)
            continue
        loop = health["event_loop"]
        text = f"{server.url}: its event loop was held {loop['blocked_seconds']:.1f} s in all"
        if loop["longest_route"] is not None:
            text += f", longest {loop['longest_seconds']:.2f} s by {loop['longest_route']}"
        is_slow = loop["longest_seconds"] > _HELD_SECONDS
        yield Finding("server", text, Grade.SLOW if is_slow else Grade.OK)


def _store_findings() -> Iterator["Finding"]:
    """Report the page store that a server started with the configuration of now would use."""
    from mlxserve.cli.options import SCHEMAS
    from mlxserve.cli.settings import Settings
    from mlxserve.core.config import EngineConfig
    from mlxserve.core.store_url import shown_store
    from mlxserve.doctor.finding import Finding, Grade

    config = Settings.read(SCHEMAS, {}, os.environ).build(EngineConfig)
    if config.page_store is None:
        return
    from mlxserve.disk.store_report import facts_of

    facts = facts_of(config.page_store)
    text = f"{shown_store(config.page_store)}: {facts.text}"
    yield Finding("page store", text, Grade.SLOW if facts.advice else Grade.OK)
    if facts.advice:
        yield Finding("page store", facts.advice)


def _service_findings() -> Iterator["Finding"]:
    """Report the installed service, with the end of its log."""
    from mlxserve.doctor.finding import Finding
    from mlxserve.service.choice import service_manager
    from mlxserve.service.unit import last_lines, log_file

    try:
        manager = service_manager()
        if not manager.unit_file.exists():
            return
        yield Finding("service", manager.state().text)
    except MlxServeError as error:
        yield Finding("service", str(error))
    yield Finding("service log", str(log_file()))
    for line in last_lines(log_file(), _NUM_LOG_LINES):
        yield Finding("", line)
