"""Everything the terminal can be told to do, in one table.

The table feeds the slash commands, the command palette, the key bindings, the help screen and
the README, so that none of them can say something the others do not. Data only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from textual.fuzzy import Matcher


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to do. `action` is the method `action_<action>` of the app."""

    name: str  # after the slash
    title: str
    help: str
    action: str
    keys: tuple[str, ...] = ()
    argument: str = ""  # a hint; empty: it takes none

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS: tuple[Command, ...] = (
    Command("new", "New chat", "Start an empty chat; this one is kept", "new_chat", ("ctrl+n",)),
    Command("stop", "Stop", "Stop the answer and keep what has come", "stop", ("escape",)),
    Command(
        "retry",
        "Ask again",
        "Another answer, or connect again",
        "retry",
        ("ctrl+r",),
    ),
    Command(
        "continue",
        "Go on",
        "Write on where an answer stopped",
        "continue_answer",
    ),
    Command(
        "edit",
        "Edit the last question",
        "Ask it differently; the first one stays",
        "edit_last",
    ),
    Command(
        "previous",
        "Previous version",
        "Show the version before this one",
        "sibling(-1)",
        ("alt+left",),
    ),
    Command(
        "next",
        "Next version",
        "Show the version after this one",
        "sibling(1)",
        ("alt+right",),
    ),
    Command("chats", "Chats", "Open an earlier chat, or search them all", "chats", ("ctrl+o",)),
    Command(
        "find",
        "Find in this chat",
        "Go to these words; again: further up",
        "find",
        ("f5",),
        "WORDS",
    ),
    Command("rename", "Rename", "Give this chat another title", "rename", (), "TITLE"),
    Command(
        "system",
        "System prompt",
        "How the model should answer in this chat",
        "system",
        (),
        "[TEXT|off]",
    ),
    Command(
        "attach",
        "Attach a file",
        "Put a text file in the message, in sight",
        "attach",
        (),
        "FILE",
    ),
    Command(
        "editor",
        "Write in an editor",
        "Write the message in $EDITOR",
        "editor",
        ("ctrl+g",),
    ),
    Command(
        "thinking",
        "Thinking",
        "Show or hide what the model thought",
        "thinking",
        ("ctrl+t",),
    ),
    Command("copy", "Copy the answer", "Copy the last answer, as Markdown", "copy", ("f3",)),
    Command(
        "code",
        "Copy the code",
        "Copy the last block of code, or this one",
        "copy_code",
        (),
        "[NUMBER]",
    ),
    Command(
        "export",
        "Export",
        "Write this chat as Markdown or JSON",
        "export",
        (),
        "[json] [FILE]",
    ),
    Command("model", "Model", "Choose another model, or download one", "model", (), "[NAME]"),
    Command(
        "engine",
        "Engine",
        "Watch pages, reuse, queue and memory",
        "engine",
        ("f4",),
    ),
    Command("theme", "Light or dark", "Change between light and dark", "theme", ("f2",)),
    Command("help", "Keys and commands", "Show every key and command", "help", ("f1",)),
    Command("quit", "Quit", "Leave; the server started here ends too", "quit", ("ctrl+q",)),
)

COMPOSER_KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "Send; while an answer is coming, send after it"),
    ("Shift+Enter, Ctrl+J", "New line"),
    ("Esc, Esc", "Edit the last question, when nothing is being written"),
    ("@", "Files to send along, completed with Tab"),
    ("Up, Down", "Earlier questions, from the first or last line"),
    ("Tab, Shift+Tab", "To the messages and back"),
    ("PageUp, PageDown", "Scroll"),
)

MESSAGE_KEYS: tuple[tuple[str, str], ...] = (
    ("e", "Edit a question and ask it again"),
    ("r", "Another answer"),
    ("Left, Right", "Versions of this message"),
    ("y", "Copy the message, as Markdown"),
    ("c", "Copy its last block of code; again: the one before"),
    ("t", "Show or hide the thinking"),
    ("Esc", "Back to the line you write in"),
)


def matching(typed: str, commands: Iterable[Command] = COMMANDS) -> list[Command]:
    """The commands that what was typed after the slash may mean, the best first."""
    if not typed:
        return list(commands)
    matcher = Matcher(typed)
    scored = [(_score(matcher, typed, command), command) for command in commands]
    return [c for score, c in sorted(scored, key=lambda pair: -pair[0]) if score > 0]


def parse(line: str) -> tuple[Command, str] | None:
    """The command and its argument, if the line is one: `/export json` and the like."""
    if not line.startswith("/"):
        return None
    name, _, argument = line[1:].partition(" ")
    found = next((command for command in COMMANDS if command.name == name), None)
    return None if found is None else (found, argument.strip())


def looks_like_command(line: str) -> bool:
    """Whether somebody meant a command, there or not: `/frobnicate`, but not `/usr/bin`."""
    return re.fullmatch(r"/[a-z]+( .*)?", line) is not None


def key_words(key: str) -> str:
    """A key as people write it: `ctrl+n` is Ctrl+N."""
    names = {"escape": "Esc", "pageup": "PageUp", "pagedown": "PageDown"}
    return "+".join(names.get(part, part.capitalize()) for part in key.split("+"))


def readme_table() -> str:
    """The commands as a Markdown table."""
    rows = ["| Command | Key | What it does |", "|---|---|---|"]
    for command in COMMANDS:
        keys = ", ".join(key_words(key) for key in command.keys)
        usage = command.usage.replace("|", "\\|")
        rows.append(f"| `{usage}` | {keys} | {command.help} |")
    return "\n".join(rows)


def _score(matcher: Matcher, typed: str, command: Command) -> float:
    if command.name.startswith(typed):
        return 100.0 + len(typed) / len(command.name)
    return matcher.match(command.name)
