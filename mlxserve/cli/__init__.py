"""The command line: parse the options, build what a command needs, run it. One file per command.

Importing this package is cheap, so `mlxserve chat` can show its first screen before it imports
anything else.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, NoReturn

from mlxserve.cli import menu
from mlxserve.cli.streams import print_error, print_safe
from mlxserve.core.errors import MlxServeError
from mlxserve.core.version import __version__

if TYPE_CHECKING:
    from tui.opening import FirstFrame


def main() -> NoReturn:
    """The console script. An error the user can act on is printed in one line, no traceback."""
    try:
        if menu.is_wanted(sys.argv[1:]):
            sys.argv += (words := menu.choose())
            if not words:
                sys.exit(0)
        frame = _first_frame()
        with nullcontext() if frame is None else closing(frame):
            _run(frame)
    except MlxServeError as error:
        print_error(error)
        sys.exit(1)
    except MemoryError as error:
        print_error(f"there is not enough memory ({error or 'refused'}).")
        sys.exit(1)
    except Exception:  # noqa: BLE001  (a bug; its text may come from a model's folder)
        import traceback

        print_safe(traceback.format_exc(), end="", to=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _run(frame: FirstFrame | None) -> None:
    if sys.argv[1:] in (["--version"], ["-V"]):  # without importing every command
        print_safe(f"mlxserve {__version__}")
        return
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
    """Draw the first frame of `chat` where Textual would draw with its usual driver."""
    is_terminal = all(os.isatty(fd) for fd in (0, 1, 2)) and os.environ.get("TERM") != "dumb"
    is_asked_for_help = not {"--help", "-h"}.isdisjoint(sys.argv)
    if sys.argv[1:2] != ["chat"] or is_asked_for_help or not is_terminal:
        return None
    if "TEXTUAL_DRIVER" in os.environ:
        return None
    try:
        from tui.opening import FirstFrame
    except ImportError:
        # Another package named tui; reported when the terminal is started.
        return None
    return FirstFrame()
