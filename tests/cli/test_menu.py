"""The menu of a bare `mlxserve` in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mlxserve.cli import menu
from tests.cli.commands import Run

Type = Callable[..., None]


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Type:
    """The lines that a user types, and then the end of the input."""

    def typed(*lines: str) -> None:
        left = list(lines)

        def read(_question: str) -> str:
            if not left:
                raise EOFError
            return left.pop(0)

        monkeypatch.setattr("builtins.input", read)

    return typed


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("",), ["chat"]),
        (("2",), ["serve"]),
        ((" Models ",), ["models"]),
        (("9", "none", "5"), ["doctor"]),
        (("launch", ""), ["launch", "claude"]),
        (("4", "emacs", "codex"), ["launch", "codex"]),
        (("6",), ["--help"]),
        (("q",), []),
        ((), []),
        (("launch",), []),
    ],
)
def test_a_number_or_a_name_is_a_command(
    lines: Sequence[str], words: list[str], typing: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(*lines)
    assert menu.choose() == words
    shown = capsys.readouterr().out
    assert "  1  chat     Chat with a model here" in shown
    assert ("'none' is not in the list." in shown) == ("none" in lines)


def test_a_bare_command_in_a_terminal_runs_what_was_chosen(
    run: Run, typing: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(menu, "is_wanted", lambda arguments: not arguments)
    typing("6")
    outcome = run(stdin=None)
    assert outcome.code == 0
    assert "Use a model:" in outcome.out
    typing("q")
    assert run(stdin=None).code == 0


def test_no_menu_is_shown_to_a_pipe_or_beside_a_command(run: Run) -> None:
    assert not menu.is_wanted([])
    assert "Usage:" in "".join(run()[1:])
