"""`mlxserve doctor`: checks this machine and this installation, or a server's security."""

# Annotations are read by typer at run time, so this file does not postpone them.

import os
import sys
from typing import Annotated

import typer

from mlxserve.cli.remote import Url, url_of
from mlxserve.errors import InvalidConfig


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

    is_well = True
    for finding in diagnose():
        print(finding, flush=True)
        is_well = is_well and not finding.is_broken
    return is_well


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
