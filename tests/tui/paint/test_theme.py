from dataclasses import fields

import pytest
from rich.style import Style
from textual.color import Color
from textual.theme import Theme

from tests.tui.contrast import contrast
from tui.paint.theme import DARK, LIGHT, palette

THEMES = {"dark": DARK, "light": LIGHT}
READABLE = 4.5  # WCAG 2.1, level AA, for text


def contrast_of(one: str, other: str) -> float:
    return contrast(Color.parse(one).rgb, Color.parse(other).rgb)


def text_colors(theme: Theme) -> dict[str, str]:
    return {
        "foreground": theme.foreground or "",
        "primary": theme.primary,
        "accent": theme.accent or "",
        "error": theme.error or "",
        "quiet": theme.variables["text-quiet"],
    }


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("ground", ["background", "surface"])
def test_every_text_has_enough_contrast(name: str, ground: str) -> None:
    theme = THEMES[name]
    for what, color in text_colors(theme).items():
        assert contrast_of(color, getattr(theme, ground)) >= READABLE, what


@pytest.mark.parametrize("name", THEMES)
def test_every_markdown_style_has_enough_contrast(name: str) -> None:
    theme, styles = THEMES[name], palette(dark=name == "dark")
    for field in fields(styles):
        style: Style = getattr(styles, field.name)
        text = style.color.name if style.color else theme.foreground
        ground = style.bgcolor.name if style.bgcolor else theme.background
        assert contrast_of(text or "", ground or "") >= READABLE, field.name


def test_one_theme_is_dark_and_one_is_light() -> None:
    assert DARK.dark
    assert not LIGHT.dark
