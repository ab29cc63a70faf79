"""`mlxserve chats`: lists, pins, moves, exports and imports this user's chats."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import InvalidRequest
from mlxserve.system.command_help import PlainTyper
from mlxserve.system.counted import counted

app = PlainTyper(
    help="List and sort your chats of the terminal and the page, export them, or import others.",
)
_FOLDER_WIDTH = 20  # columns of a folder's name


@app.command(name="list")
def list_(
    folder: Annotated[
        str | None,
        typer.Option(
            help="Only chats of this folder; '' for those in none.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Only pinned chats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List your chats with their numbers, pins and folders: pinned ones first, then the most recent."""
    from tui.chat_files import ChatFileError
    from tui.chat_places import list_chats

    try:
        chats = list_chats()
    except ChatFileError as error:
        raise InvalidRequest(str(error)) from error
    chats = [chat for chat in chats if chat.is_pinned or not pinned]
    if folder is not None:
        chats = [chat for chat in chats if chat.folder.casefold() == folder.casefold()]
    if as_json:
        names = ("id", "title", "folder", "is_pinned", "created_at", "updated_at")
        cards = [{name: asdict(chat)[name] for name in names} for chat in chats]
        print_safe(json.dumps(cards, indent=2))
        return
    if not chats:
        print_safe("No such chats.", to=sys.stderr)
    width = max((len(chat.folder) for chat in chats), default=0)
    for chat in chats:
        when = datetime.fromtimestamp(chat.updated_at)
        parts = [f"{chat.id:>5}", "pinned" if chat.is_pinned else " " * 6, f"{when:%Y-%m-%d %H:%M}"]
        if width:
            parts.append(chat.folder.ljust(min(width, _FOLDER_WIDTH)))
        print_safe("  ".join([*parts, chat.title]))


@app.command(name="set")
def set_(
    numbers: Annotated[
        list[int],
        typer.Argument(
            help="Numbers of chats, as `list` shows them.", metavar="NUMBER...", show_default=False
        ),
    ],
    folder: Annotated[
        str | None,
        typer.Option(
            help="Put them into this folder; '' takes them out of theirs.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    pin: Annotated[
        bool | None, typer.Option("--pin/--unpin", help="Keep them first in lists.")
    ] = None,
) -> None:
    """Pin chats, or put them into a folder, which is made by its first chat."""
    from tui.chat_files import ChatFileError
    from tui.chat_places import place_chats

    if folder is None and pin is None:
        raise InvalidRequest("Say what to set: --folder NAME, --pin or --unpin.")
    try:
        chats = place_chats(numbers, folder=folder, is_pinned=pin)
    except ChatFileError as error:
        raise InvalidRequest(str(error)) from error
    for chat in chats:
        where = f"in {chat.folder}" if chat.folder else "in no folder"
        print_safe(f"{chat.title}: {where}, {'pinned' if chat.is_pinned else 'not pinned'}")


@app.command(name="export")
def export_(
    file: Annotated[Path, typer.Argument(help="The new file, such as chats.json.")],
) -> None:
    """Write all chats into a file, with every version of every answer, and your saved prompts."""
    from tui.chat_files import ChatFileError, export_file

    try:
        number = export_file(file.expanduser())
    except ChatFileError as error:
        raise InvalidRequest(str(error)) from error
    print_safe(f"{counted(number, 'chat')} exported to {file}")


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
    """Add the chats and prompts of exported files to yours. What is here already is left as it is."""
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
