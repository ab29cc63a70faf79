"""The command line: parse, build, hand over to a front. One file for each command.

Importing this costs nothing, so that `mlxserve chat` has its first picture on the screen before
anything else is imported.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn

from mlxserve.errors import MlxServeError

if TYPE_CHECKING:
    from tui.opening import FirstFrame


def main() -> NoReturn:
    """The console script. What a user can act on is one line, never a traceback."""
    try:
        with _first_frame() or nullcontext() as frame:
            _run(frame)
    except MlxServeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _run(frame: FirstFrame | None) -> None:
    from mlxserve.cli.talk import plain_flags, talk

    flags = plain_flags(sys.argv[1:])
    if flags is not None:
        talk(flags, frame)
        return
    from mlxserve.cli.commands import app

    app(obj=frame)


def _first_frame() -> FirstFrame | None:
    if sys.argv[1:2] != ["chat"]:
        return None
    try:
        from tui.opening import first_frame
    except ImportError:
        return None  # another package is in the way, which is said when the terminal is needed
    return first_frame(sys.argv[1:])
