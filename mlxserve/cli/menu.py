"""The menu of a bare `mlxserve` in a terminal: a person's first step."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mlxserve.cli.streams import print_safe

# The words of a command, and what it does.
_ENTRIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("chat",), "Chat with a model here, in the terminal"),
    (("serve",), "Serve a model to programs, and to a page in the browser"),
    (("models",), "List models, and which of them fit this machine"),
    (("launch",), "Start a coding agent that uses your server"),
    (("doctor",), "Check this machine and this installation"),
    (("--help",), "Show all commands"),
)
_LEAVE = ("q", "quit", "exit")


def is_wanted(arguments: Sequence[str]) -> bool:
    """True for a command line without a command, in a terminal."""
    is_terminal = all(os.isatty(fd) for fd in (0, 1, 2)) and os.environ.get("TERM") != "dumb"
    return not arguments and is_terminal


def choose() -> list[str]:
    """Ask for a command, and return its words; none if the user leaves."""
    print_safe("What would you like to do?\n")
    for number, (words, about) in enumerate(_ENTRIES, 1):
        print_safe(f"  {number}  {words[0].removeprefix('--'):<8} {about}")
    print_safe()
    try:
        chosen = _asked()
        return [*chosen, _agent()] if chosen == ["launch"] else chosen
    except (EOFError, KeyboardInterrupt):
        print_safe()
        return []


def _asked() -> list[str]:
    while True:
        answer = input("Number or name (Enter: chat, q: quit): ").strip().lower()
        if answer in _LEAVE:
            return []
        if not answer:
            return ["chat"]
        for number, (words, _) in enumerate(_ENTRIES, 1):
            if answer in (str(number), words[0].removeprefix("--")):
                return list(words)
        print_safe(f"{answer[:40]!r} is not in the list.")


def _agent() -> str:
    from mlxserve.cli.agents import AGENTS

    first = next(iter(AGENTS))
    while True:
        answer = input(f"Which one: {', '.join(AGENTS)} (Enter: {first})? ").strip().lower()
        if not answer or answer in AGENTS:
            return answer or first
        print_safe(f"{answer[:40]!r} is not in the list.")
