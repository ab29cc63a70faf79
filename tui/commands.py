"""Every command of the terminal, in one table. Data only.

The slash commands, the command palette, the key bindings, the help screen and docs/terminal.md
derive from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from textual.fuzzy import Matcher


@dataclass(frozen=True, slots=True)
class Command:
    """One command. The app knows its handler by its name."""

    name: str  # after the slash
    help: str
    keys: tuple[str, ...] = ()
    argument: str = ""  # a placeholder for the help; empty: takes no argument

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def key_label(self) -> str:
        """The key as printed, such as `Ctrl+N`; empty for none."""
        return " ".join(map(key_label, self.keys))


# The sections of the help screen, in their order.
COMMAND_GROUPS: dict[str, tuple[Command, ...]] = {
    "Answers": (
        Command("stop", "Stop the answer; keep the text so far", ("escape",)),
        Command("retry", "Regenerate the answer, or reconnect", ("ctrl+r",)),
        Command("continue", "Continue a stopped or cut-off answer"),
        Command("edit", "Edit and resend your last message"),
        Command("previous", "Show the previous version of a message", ("alt+left",)),
        Command("next", "Show the next version of a message", ("alt+right",)),
        Command("thinking", "Show or hide thinking and tools' results", ("ctrl+t",)),
        Command("copy", "Copy the last answer as Markdown", ("f3",)),
        Command("code", "Copy a code block, by default the last", (), "[NUMBER]"),
    ),
    "Messages": (
        Command(
            "attach",
            "Add text, PDF, DOCX, an image or a folder",
            (),
            "FILE",
        ),
        Command("editor", "Write the message in $EDITOR", ("ctrl+g",)),
        Command("system", "Edit the system prompt; `off` removes it", (), "[TEXT|off]"),
        Command("prompts", "Choose, save or delete a saved prompt", (), "[NAME]"),
        Command("set", "Set temperature, seed …; `off` resets", (), "[NAME VALUE]"),
        Command("compact", "Summarise the start to free context"),
    ),
    "Chats": (
        Command("new", "Start a new chat; this one is saved", ("ctrl+n",)),
        Command("chats", "Open or search earlier chats", ("ctrl+o",)),
        Command("find", "Find text; repeat for the previous match", ("f5",), "TEXT"),
        Command("rename", "Rename this chat", (), "TITLE"),
        Command("pin", "Keep this chat first in the list, or not"),
        Command("folder", "Put it into a folder; `off`: into none", (), "NAME"),
        Command("export", "Save this chat as Markdown or JSON", (), "[json] [FILE]"),
    ),
    "Model and program": (
        Command("model", "Choose or download a model", (), "[NAME]"),
        Command("models", "Show, load, unload and pin served models"),
        Command("tools", "Show, switch and allow tools (MCP)"),
        Command("engine", "Show cache pages, queue, speed and memory", ("f4",)),
        Command("theme", "Switch between light and dark", ("f2",)),
        Command("help", "Show all keys and commands", ("f1",)),
        Command("quit", "Quit, and stop the server started here", ("ctrl+q",)),
    ),
}

COMMANDS = tuple(command for group in COMMAND_GROUPS.values() for command in group)

COMMAND_NAMED = {command.name: command for command in COMMANDS}

COMPOSER_KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "Send; during an answer, the message is queued"),
    ("Shift+Enter, Ctrl+J", "New line"),
    ("Esc, Esc", "Edit your last message, if the input is empty"),
    ("Ctrl+U", "Empty the input; Ctrl+Z brings it back"),
    ("F6", "Unfold pasted text, or fold it again"),
    ("@", "Attach a text file or an image; Tab completes its path"),
    ("Up, Down", "Earlier messages, from the first or last line"),
    ("Tab, Shift+Tab", "Move to the messages and back"),
    ("PageUp, PageDown", "Scroll"),
    ("Ctrl+End", "Go to the end of the chat"),
)

MESSAGE_KEYS: tuple[tuple[str, str], ...] = (
    ("e", "Edit and resend your message"),
    ("r", "Regenerate the answer"),
    ("Left, Right", "Other versions of this message"),
    ("y", "Copy the message as Markdown"),
    ("c", "Copy its last code block; repeat for the previous one"),
    ("t", "Show or hide thinking, tools' results, a long message"),
    ("Esc", "Back to the input"),
)


def matching(typed: str, commands: Iterable[Command] = COMMANDS) -> list[Command]:
    """The commands that match the text after the slash, best match first."""
    if not typed:
        return list(commands)
    matcher = Matcher(typed)
    scored = [(_score(matcher, typed, command), command) for command in commands]
    return [c for score, c in sorted(scored, key=lambda pair: -pair[0]) if score > 0]


def parse(line: str) -> tuple[Command, str] | None:
    """Parse a line such as `/export json`; None if it is no command."""
    if not line.startswith("/"):
        return None
    name, _, argument = line[1:].partition(" ")
    command = COMMAND_NAMED.get(name)
    return None if command is None else (command, argument.strip())


def looks_like_command(line: str) -> bool:
    """True if the line is meant as a command, known or not: `/frobnicate`, but not `/usr/bin`."""
    return re.fullmatch(r"/[a-z]+( .*)?", line) is not None


def key_label(key: str) -> str:
    """Format a key as printed on a keyboard: `ctrl+n` becomes Ctrl+N."""
    names = {"escape": "Esc", "pageup": "PageUp", "pagedown": "PageDown"}
    return "+".join(names.get(part, part.capitalize()) for part in key.split("+"))


def _score(matcher: Matcher, typed: str, command: Command) -> float:
    if command.name.startswith(typed):
        return 100.0 + len(typed) / len(command.name)
    return matcher.match(command.name)
