"""The standard streams of a server, which runs on when they are closed or their disk is full."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from mlxserve.system.terminal_text import escaped_lines

_STANDARD = (0, 1, 2)
_STDOUT = 1


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed.

    The next socket or file would take its number otherwise, and receive what libraries print.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)


def print_safe(text: object = "", *, end: str = "\n", to: TextIO | None = None) -> None:
    """Print on stdout, or `to`, without control sequences. All commands print through this.

    Raises OSError.
    """
    print(escaped_lines(str(text)), end=end, file=to, flush=True)


def print_error(text: object) -> None:
    """Print an error on stderr. Raises OSError."""
    print_safe(f"error: {text}", to=sys.stderr)


def say(line: str) -> None:
    """Print a line on stdout; ignore a closed stream or a full disk."""
    try:
        print_safe(line)
    except OSError:
        # What could not be written stays in the buffer, and would fail again when Python ends.
        _point_to_null(_STDOUT)


def forget_unwritten() -> None:
    """Drop buffered output that cannot be written, or it would change the exit code."""
    for stream, number in ((sys.stdout, _STDOUT), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _point_to_null(number)


def _point_to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
