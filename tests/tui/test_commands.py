import pytest
from textual.binding import Binding

from tui.app import ChatApp
from tui.commands import (
    COMMANDS,
    key_words,
    looks_like_command,
    matching,
    parse,
    readme_table,
)
from tui.widgets.composer import Composer


def test_names_and_keys_are_unique() -> None:
    names = [command.name for command in COMMANDS]
    keys = [key for command in COMMANDS for key in command.keys]
    assert len(set(names)) == len(names)
    assert len(set(keys)) == len(keys)


def test_every_command_has_its_action() -> None:
    for command in COMMANDS:
        assert hasattr(ChatApp, "action_" + command.action.partition("(")[0]), command


def test_every_key_is_bound_to_its_command() -> None:
    bound = {
        key: binding.action
        for binding in ChatApp.BINDINGS
        if isinstance(binding, Binding)
        for key in binding.key.split(",")
    }
    assert bound == {key: command.action for command in COMMANDS for key in command.keys}


def test_no_key_is_taken_from_the_line_one_writes_in() -> None:
    taken = {key for key, _ in Composer()._bindings.key_to_bindings.items()}
    assert not taken & {key for command in COMMANDS for key in command.keys}


@pytest.mark.parametrize(
    ("typed", "first"),
    [("new", "new"), ("thi", "thinking"), ("the", "theme"), ("cod", "code"), ("exp", "export")],
)
def test_what_is_typed_finds_its_command(typed: str, first: str) -> None:
    assert matching(typed)[0].name == first


def test_letters_in_between_may_be_left_out() -> None:
    assert "previous" in [command.name for command in matching("pvs")]


def test_nothing_fits_nonsense() -> None:
    assert matching("zzzz") == []


def test_a_bare_slash_shows_them_all() -> None:
    assert tuple(matching("")) == COMMANDS


@pytest.mark.parametrize(
    ("line", "name", "argument"),
    [
        ("/new", "new", ""),
        ("/rename My chat ", "rename", "My chat"),
        ("/system a\nb", "system", "a\nb"),
        ("/export json", "export", "json"),
    ],
)
def test_a_line_is_a_command_with_its_argument(line: str, name: str, argument: str) -> None:
    parsed = parse(line)
    assert parsed is not None
    assert (parsed[0].name, parsed[1]) == (name, argument)


@pytest.mark.parametrize(
    "line", ["new", "/nope", "/new\nline", "/usr/bin is a folder", "/newer x", ""]
)
def test_other_lines_are_not_commands(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize("line", ["/nope", "/nope with words", "/new"])
def test_what_was_meant_as_a_command_is_told(line: str) -> None:
    assert looks_like_command(line)


@pytest.mark.parametrize("line", ["/", "/ ", "/ a", "/usr/bin", "/a\nb", "a /b", "//", ""])
def test_what_only_begins_like_a_command_is_a_message(line: str) -> None:
    assert not looks_like_command(line)


def test_keys_are_written_as_on_the_keyboard() -> None:
    assert [key_words(key) for key in ("ctrl+n", "escape", "f1", "alt+left")] == [
        *("Ctrl+N", "Esc", "F1", "Alt+Left"),
    ]


def test_the_readme_names_every_command() -> None:
    table = readme_table()
    assert all(f"`/{command.name}" in table for command in COMMANDS)
    assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1


def test_what_a_command_does_can_be_read_in_a_narrow_window() -> None:
    """80 columns: in the list above the composer a scrollbar, two margins and 33 columns go off."""
    assert {c.name: c.help for c in COMMANDS if len(c.help) > 41} == {}
