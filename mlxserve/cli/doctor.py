"""`mlxserve doctor`: checks this machine and this installation, or a server's security."""

# Annotations are read by typer at run time, so this file does not postpone them.

import os
import sys
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from mlxserve.cli.remote import Url, url_of
from mlxserve.errors import InvalidConfig, MlxServeError

if TYPE_CHECKING:
    from mlxserve.doctor.finding import Finding

_NUM_LOG_LINES = 5


def doctor(
    security: Annotated[
        bool,
        typer.Option(
            "--security", help="Try harmless attacks against your own running server instead."
        ),
    ] = False,
    url: Url = None,
) -> None:
    """Check this machine and this installation.

    Prints a table that can be pasted into a bug report. Exits with 1 if a check fails.
    """
    if url is not None and not security:
        raise InvalidConfig("--url only applies to --security. Add --security, or omit --url.")
    is_well = _examine(url) if security else _diagnose()
    if not is_well:
        sys.exit(1)


def _diagnose() -> bool:
    from mlxserve.doctor.report import diagnose
    from mlxserve.doctor.sections import section

    is_well = True
    for finding in chain(diagnose(), section("service", _service_findings)):
        print(finding, flush=True)
        is_well = is_well and not finding.is_broken
    return is_well


def _service_findings() -> Iterator["Finding"]:
    """What the service says, with the end of its log; nothing where none is installed."""
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


def _examine(url: str | None) -> bool:
    from mlxserve.doctor.attacks import HEADING, AttackOutcome, examine

    print(HEADING)
    counts = dict.fromkeys(AttackOutcome, 0)
    for row in examine(url_of(url), os.environ.get("MLXSERVE_API_KEY")):
        print(row, flush=True)
        counts[row.outcome] += 1
    refused, accepted, skipped = (counts[outcome] for outcome in AttackOutcome)
    print(f"{refused} refused as expected, {accepted} not refused, {skipped} skipped")
    return accepted == 0
