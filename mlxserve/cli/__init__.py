"""The command line: parse the options, build what a command needs, run it. One file per command.

Importing this package is cheap, so `mlxserve chat` can show its first screen before it imports
anything else.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn

from mlxserve.errors import MlxServeError

if TYPE_CHECKING:
    from tui.opening import FirstFrame


def main() -> NoReturn:
    """The console script. An error the user can act on is printed in one line, no traceback."""
    try:
        with _first_frame() or nullcontext() as frame:
            _run(frame)
    except MlxServeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except MemoryError as error:
        print(f"error: there is not enough memory ({error or 'refused'}).", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _run(frame: FirstFrame | None) -> None:
    from mlxserve.cli.terminal import plain_flags, run_with_plain_flags

    flags = plain_flags(sys.argv[1:])
    if flags is not None:
        run_with_plain_flags(flags, frame)
        return
    from mlxserve.cli import completion
    from mlxserve.cli.commands import app

    if completion.VARIABLE in os.environ:
        completion.teach_shells()
    app(obj=frame)


def _first_frame() -> FirstFrame | None:
    if sys.argv[1:2] != ["chat"]:
        return None
    try:
        from tui.opening import first_frame
    except ImportError:
        return None  # another package named tui; reported when the terminal is started
    return first_frame(sys.argv[1:])
