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
    """One command. `action` names the app's method `action_<action>`."""

    name: str  # after the slash
    title: str
    help: str
    action: str
    keys: tuple[str, ...] = ()
    argument: str = ""  # a placeholder for the help; empty: takes no argument

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS: tuple[Command, ...] = (
    Command("new", "New chat", "Start a new chat; this one is saved", "new_chat", ("ctrl+n",)),
    Command("stop", "Stop", "Stop the answer; keep the text so far", "stop", ("escape",)),
    Command(
        "retry",
        "Retry",
        "Regenerate the answer, or reconnect",
        "retry",
        ("ctrl+r",),
    ),
    Command(
        "continue",
        "Continue",
        "Continue a stopped or cut-off answer",
        "continue_answer",
    ),
    Command(
        "compact",
        "Compact",
        "Summarise the start to free context",
        "compact",
    ),
    Command(
        "edit",
        "Edit",
        "Edit and resend your last message",
        "edit_last",
    ),
    Command(
        "previous",
        "Previous version",
        "Show the previous version of a message",
        "sibling(-1)",
        ("alt+left",),
    ),
    Command(
        "next",
        "Next version",
        "Show the next version of a message",
        "sibling(1)",
        ("alt+right",),
    ),
    Command("chats", "Chats", "Open or search earlier chats", "chats", ("ctrl+o",)),
    Command(
        "find",
        "Find in this chat",
        "Find text; repeat for the previous match",
        "find",
        ("f5",),
        "TEXT",
    ),
    Command("rename", "Rename", "Rename this chat", "rename", (), "TITLE"),
    Command(
        "system",
        "System prompt",
        "Set the system prompt; `off` removes it",
        "system",
        (),
        "[TEXT|off]",
    ),
    Command(
        "set",
        "Sampling",
        "Set temperature, seed …; `off` resets",
        "set_sampling",
        (),
        "[NAME VALUE]",
    ),
    Command(
        "attach",
        "Attach a file",
        "Add a text file's contents to the message",
        "attach",
        (),
        "FILE",
    ),
    Command(
        "editor",
        "Editor",
        "Write the message in $EDITOR",
        "editor",
        ("ctrl+g",),
    ),
    Command(
        "thinking",
        "Thinking",
        "Show or hide the model's thinking",
        "thinking",
        ("ctrl+t",),
    ),
    Command("copy", "Copy the answer", "Copy the last answer as Markdown", "copy", ("f3",)),
    Command(
        "code",
        "Copy code",
        "Copy a code block, by default the last",
        "copy_code",
        (),
        "[NUMBER]",
    ),
    Command(
        "export",
        "Export",
        "Save this chat as Markdown or JSON",
        "export",
        (),
        "[json] [FILE]",
    ),
    Command("model", "Model", "Choose or download a model", "model", (), "[NAME]"),
    Command(
        "engine",
        "Engine",
        "Show cache pages, queue, speed and memory",
        "engine",
        ("f4",),
    ),
    Command("theme", "Theme", "Switch between light and dark", "theme", ("f2",)),
    Command("help", "Keys and commands", "Show all keys and commands", "help", ("f1",)),
    Command("quit", "Quit", "Quit, and stop the server started here", "quit", ("ctrl+q",)),
)

COMPOSER_KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "Send; during an answer, the message is queued"),
    ("Shift+Enter, Ctrl+J", "New line"),
    ("Esc, Esc", "Edit your last message, if the input is empty"),
    ("@", "Attach a file; Tab completes its path"),
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
    ("t", "Show or hide the thinking"),
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
    """The command and its argument if the line is a command, such as `/export json`."""
    if not line.startswith("/"):
        return None
    name, _, argument = line[1:].partition(" ")
    found = next((command for command in COMMANDS if command.name == name), None)
    return None if found is None else (found, argument.strip())


def looks_like_command(line: str) -> bool:
    """Whether the line is meant as a command, known or not: `/frobnicate`, but not `/usr/bin`."""
    return re.fullmatch(r"/[a-z]+( .*)?", line) is not None


def key_words(key: str) -> str:
    """A key as printed on a keyboard: `ctrl+n` becomes Ctrl+N."""
    names = {"escape": "Esc", "pageup": "PageUp", "pagedown": "PageDown"}
    return "+".join(names.get(part, part.capitalize()) for part in key.split("+"))


def markdown_table() -> str:
    """The commands as a Markdown table, for docs/terminal.md."""
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
