"""The two looks of the terminal, and the colours Markdown is painted with in each."""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style
from textual.theme import Theme


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Styles of one message's text. Backgrounds are left to the widget, except for code."""

    text: Style
    strong: Style
    emphasis: Style
    struck: Style
    heading: Style
    marker: Style  # bullets, numbers, quote bars, rules, table lines
    link: Style
    address: Style  # the written-out target behind a link's words
    inline_code: Style
    code: Style
    code_label: Style
    keyword: Style
    name: Style
    string: Style
    number: Style
    comment: Style
    found: Style  # what was looked for


DARK = Theme(
    name="mlxserve-dark",
    primary="#8AADF4",
    secondary="#A5ADCB",
    accent="#C6A0F6",
    warning="#EED49F",
    error="#ED8796",
    success="#A6DA95",
    foreground="#D5DAEE",
    background="#16181F",
    surface="#1C1F28",
    panel="#262A36",
    dark=True,
    variables={
        "border": "#3A4054",
        "border-blurred": "#2C3140",
        "footer-key-foreground": "#8AADF4",
        "scrollbar": "#2C3140",
        "scrollbar-hover": "#3A4054",
        "scrollbar-active": "#8AADF4",
        "scrollbar-background": "#16181F",
        "scrollbar-background-hover": "#16181F",
        "scrollbar-background-active": "#16181F",
        "scrollbar-corner-color": "#16181F",
        "text-quiet": "#8B92AB",
        # What is chosen in a list: quiet words stay readable on it.
        "block-cursor-background": "#28314A",
        "block-cursor-foreground": "#D5DAEE",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#28314A",
        "block-cursor-blurred-foreground": "#D5DAEE",
    },
)

LIGHT = Theme(
    name="mlxserve-light",
    primary="#2A5DB0",
    secondary="#5C6378",
    accent="#7A3FB5",
    warning="#8A5A00",
    error="#B3261E",
    success="#2B6E36",
    foreground="#22252E",
    background="#FAFAF7",
    surface="#F1F1EC",
    panel="#E6E6DF",
    dark=False,
    variables={
        "border": "#C3C4BC",
        "border-blurred": "#D8D8D0",
        "footer-key-foreground": "#2A5DB0",
        "scrollbar": "#D8D8D0",
        "scrollbar-hover": "#C3C4BC",
        "scrollbar-active": "#2A5DB0",
        "scrollbar-background": "#FAFAF7",
        "scrollbar-background-hover": "#FAFAF7",
        "scrollbar-background-active": "#FAFAF7",
        "scrollbar-corner-color": "#FAFAF7",
        "text-quiet": "#646A7C",
        "block-cursor-background": "#DCE5F4",
        "block-cursor-foreground": "#22252E",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#DCE5F4",
        "block-cursor-blurred-foreground": "#22252E",
    },
)


def palette(*, dark: bool) -> Palette:
    """The Markdown colours that go with DARK or LIGHT."""
    return _DARK_PALETTE if dark else _LIGHT_PALETTE


def _palette(
    *,
    heading: str,
    quiet: str,
    link: str,
    code: str,
    code_background: str,
    keyword: str,
    name: str,
    string: str,
    number: str,
    found: str,
    found_background: str,
) -> Palette:
    def on_code(color: str) -> Style:
        return Style(color=color, bgcolor=code_background)

    return Palette(
        text=Style(),
        strong=Style(bold=True),
        emphasis=Style(italic=True),
        struck=Style(strike=True),
        heading=Style(color=heading, bold=True),
        marker=Style(color=quiet),
        link=Style(color=link, underline=True),
        address=Style(color=quiet),
        inline_code=on_code(code),
        code=on_code(code),
        code_label=Style(color=quiet, bgcolor=code_background),
        keyword=on_code(keyword),
        name=on_code(name),
        string=on_code(string),
        number=on_code(number),
        comment=Style(color=quiet, bgcolor=code_background, italic=True),
        found=Style(color=found, bgcolor=found_background),
    )


_DARK_PALETTE = _palette(
    heading="#8AADF4",
    quiet="#8B92AB",
    link="#8AADF4",
    code="#D5DAEE",
    code_background="#22252F",
    keyword="#C6A0F6",
    name="#8AADF4",
    string="#A6DA95",
    number="#F5A97F",
    found="#16181F",
    found_background="#EED49F",
)
_LIGHT_PALETTE = _palette(
    heading="#2A5DB0",
    quiet="#646A7C",
    link="#2A5DB0",
    code="#22252E",
    code_background="#EFEFE9",
    keyword="#7A3FB5",
    name="#2A5DB0",
    string="#2B6E36",
    number="#9A4A00",
    found="#22252E",
    found_background="#FFDF8A",
)
