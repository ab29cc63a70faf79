"""The two themes, and the styles Markdown is painted with in each."""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style
from textual.theme import Theme

from tui import colours
from tui.colours import COLOURS, Colours


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
    address: Style  # the URL shown after a link's text
    inline_code: Style
    code: Style
    code_label: Style
    keyword: Style
    name: Style
    string: Style
    number: Style
    comment: Style
    found: Style  # search results


def palette(*, dark: bool) -> Palette:
    """The Markdown styles that go with DARK or LIGHT."""
    return _DARK_PALETTE if dark else _LIGHT_PALETTE


def _theme(name: str, *, dark: bool) -> Theme:
    c = COLOURS[name]
    return Theme(
        name=name,
        primary=c["primary"],
        secondary=c["secondary"],
        accent=c["accent"],
        warning=c["warning"],
        error=c["error"],
        success=c["success"],
        foreground=c["foreground"],
        background=c["background"],
        surface=c["surface"],
        panel=c["panel"],
        dark=dark,
        variables={
            "border": c["border"],
            "border-blurred": c["border-blurred"],
            "footer-key-foreground": c["primary"],
            "scrollbar": c["border-blurred"],
            "scrollbar-hover": c["border"],
            "scrollbar-active": c["primary"],
            "scrollbar-background": c["background"],
            "scrollbar-background-hover": c["background"],
            "scrollbar-background-active": c["background"],
            "scrollbar-corner-color": c["background"],
            "text-quiet": c["quiet"],
            **{name: colour for name, colour in c.items() if name.startswith("owner-")},
            "block-cursor-background": c["highlight"],
            "block-cursor-foreground": c["foreground"],
            "block-cursor-text-style": "none",
            "block-cursor-blurred-background": c["highlight"],
            "block-cursor-blurred-foreground": c["foreground"],
        },
    )


def _palette(c: Colours) -> Palette:
    def on_code(name: str, *, italic: bool = False) -> Style:
        return Style(color=c[name], bgcolor=c["code-background"], italic=italic or None)

    return Palette(
        text=Style(),
        strong=Style(bold=True),
        emphasis=Style(italic=True),
        struck=Style(strike=True),
        heading=Style(color=c["primary"], bold=True),
        marker=Style(color=c["quiet"]),
        link=Style(color=c["primary"], underline=True),
        address=Style(color=c["quiet"]),
        inline_code=on_code("foreground"),
        code=on_code("foreground"),
        code_label=on_code("quiet"),
        keyword=on_code("accent"),
        name=on_code("primary"),
        string=on_code("success"),
        number=on_code("number"),
        comment=on_code("quiet", italic=True),
        found=Style(color=c["found"], bgcolor=c["found-background"]),
    )


DARK = _theme(colours.DARK, dark=True)
LIGHT = _theme(colours.LIGHT, dark=False)
_DARK_PALETTE = _palette(COLOURS[colours.DARK])
_LIGHT_PALETTE = _palette(COLOURS[colours.LIGHT])
