import pytest
from textual.binding import Binding

from mlxserve.history.store import Store
from tui.app import ChatApp
from tui.commands import COMMANDS, key_label, looks_like_command, matching, parse
from tui.home import Home
from tui.talk.connection import ConnectOptions, Connector
from tui.widgets.composer import Composer


def test_names_and_keys_are_unique() -> None:
    names = [command.name for command in COMMANDS]
    keys = [key for command in COMMANDS for key in command.keys]
    assert len(set(names)) == len(names)
    assert len(set(keys)) == len(keys)


def test_every_command_has_a_handler(home: Home) -> None:
    store = Store.in_memory()
    app = ChatApp(Connector(ConnectOptions(url="http://127.0.0.1:1"), home), store, home)
    assert set(app.handlers) == {command.name for command in COMMANDS}
    store.close()


def test_every_key_is_bound_to_its_command() -> None:
    bound = {
        key: binding.action
        for binding in ChatApp.BINDINGS
        if isinstance(binding, Binding)
        for key in binding.key.split(",")
    }
    assert bound == {
        key: f"command('{command.name}')" for command in COMMANDS for key in command.keys
    }


def test_no_key_of_a_command_is_a_key_of_the_composer() -> None:
    own = [b for kind in Composer.__mro__ for b in vars(kind).get("BINDINGS", ())]
    taken = {key for binding in own for key in binding.key.split(",")}
    assert "pageup" in taken
    assert not taken & {key for command in COMMANDS for key in command.keys}


def test_a_prefix_finds_its_command() -> None:
    for typed, first in [
        ("new", "new"),
        ("thi", "thinking"),
        ("the", "theme"),
        ("cod", "code"),
        ("exp", "export"),
    ]:
        assert matching(typed)[0].name == first, typed


def test_letters_in_between_may_be_omitted() -> None:
    assert "previous" in [command.name for command in matching("pvs")]


def test_nonsense_matches_nothing() -> None:
    assert matching("zzzz") == []


def test_a_slash_alone_lists_all_commands() -> None:
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


def test_other_lines_are_not_commands() -> None:
    for line in ["new", "/nope", "/new\nline", "/usr/bin is a folder", "/newer x", ""]:
        assert parse(line) is None, line


@pytest.mark.parametrize("line", ["/nope", "/nope with words", "/new"])
def test_an_unknown_command_is_recognised_as_one(line: str) -> None:
    assert looks_like_command(line)


def test_a_text_that_only_starts_with_a_slash_is_a_message() -> None:
    for line in ["/", "/ ", "/ a", "/usr/bin", "/a\nb", "a /b", "//", ""]:
        assert not looks_like_command(line), line


def test_keys_are_written_as_on_the_keyboard() -> None:
    assert [key_label(key) for key in ("ctrl+n", "escape", "f1", "alt+left")] == [
        *("Ctrl+N", "Esc", "F1", "Alt+Left")
    ]


def test_the_help_of_every_command_fits_into_a_narrow_window() -> None:
    """Of 80 columns, the suggestions need 39 for the scrollbar, the margins, the name and the key."""
    assert {c.name: c.help for c in COMMANDS if len(c.help) > 41} == {}
