"""`mlxserve chats`: exports and imports this user's chats."""

# Annotations are read by typer at run time, so this file does not postpone them.

import sys
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import InvalidRequest

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Export your chats of the terminal and the page, or import those of other programs.",
)


@app.command(name="export")
def export_(
    file: Annotated[Path, typer.Argument(help="The new file, such as chats.json.")],
) -> None:
    """Write all chats into a file, with every version of every answer."""
    from tui.chat_files import ChatFileError, export_file

    try:
        number = export_file(file.expanduser())
    except ChatFileError as error:
        raise InvalidRequest(str(error)) from error
    print_safe(f"{number:,} chat{'' if number == 1 else 's'} exported to {file}")


@app.command(name="import")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Exports of mlxserve or Open WebUI, or the conversations.json of ChatGPT's export.",
            show_default=False,
        ),
    ],
) -> None:
    """Add the chats of exported files to yours. A chat that is here already is left as it is."""
    from tui.chat_files import ChatFileError, import_file

    failed = False
    for file in files:
        try:
            report = import_file(file.expanduser())
        except ChatFileError as error:
            raise InvalidRequest(str(error)) from error
        print_safe(f"{file}: {report.describe()}")
        for problem in report.problems:
            print_safe(f"  {problem}", to=sys.stderr)
        failed |= report.num_refused > 0
    if failed:
        raise typer.Exit(1)
