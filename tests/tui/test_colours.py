"""Which theme the terminal opens in before one is chosen."""

from __future__ import annotations

import pytest

from tui.colours import DARK, LIGHT, named_theme


@pytest.mark.parametrize("background", ["7", "9", "15"])
@pytest.mark.parametrize("before", ["0;", "0;default;"])
def test_a_light_terminal_gets_the_light_theme(
    monkeypatch: pytest.MonkeyPatch, before: str, background: str
) -> None:
    monkeypatch.setenv("COLORFGBG", before + background)
    assert named_theme() == LIGHT


@pytest.mark.parametrize("value", ["15;0", "7;8", "0;99"])
def test_any_other_gets_the_dark_one(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("COLORFGBG", value)
    assert named_theme() == DARK


@pytest.mark.parametrize("value", ["0;default", "0;", "", "light"])
def test_a_value_without_a_background_names_none(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("COLORFGBG", value)
    assert named_theme() is None


def test_without_the_variable_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORFGBG", raising=False)
    assert named_theme() is None
