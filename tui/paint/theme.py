"""The two themes, and the styles Markdown is painted with in each."""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style
from textual.theme import Theme

Colours = dict[str, str]  # what a colour is used for -> `#RRGGBB`

_DARK_COLOURS: Colours = {
    "background": "#16181F",
    "surface": "#1C1F28",
    "panel": "#262A36",
    "foreground": "#D5DAEE",
    "quiet": "#8B92AB",  # text of less importance
    "primary": "#8AADF4",
    "secondary": "#A5ADCB",
    "accent": "#C6A0F6",
    "warning": "#EED49F",
    "error": "#ED8796",
    "success": "#A6DA95",
    "border": "#3A4054",
    "border-blurred": "#2C3140",
    "highlight": "#28314A",  # the selected row of a list; quiet text stays readable on it
    "code-background": "#22252F",
    "number": "#F5A97F",  # in code
    "found": "#16181F",  # search results
    "found-background": "#EED49F",
    "owner-0": "#A6DA95",  # of requests and their pages
    "owner-1": "#F5A97F",
    "owner-2": "#7DC4E4",
    "owner-3": "#F5BDE6",
}
_LIGHT_COLOURS: Colours = {
    "background": "#FAFAF7",
    "surface": "#F1F1EC",
    "panel": "#E6E6DF",
    "foreground": "#22252E",
    "quiet": "#646A7C",
    "primary": "#2A5DB0",
    "secondary": "#5C6378",
    "accent": "#7A3FB5",
    "warning": "#8A5A00",
    "error": "#B3261E",
    "success": "#2B6E36",
    "border": "#C3C4BC",
    "border-blurred": "#D8D8D0",
    "highlight": "#DCE5F4",
    "code-background": "#EFEFE9",
    "number": "#9A4A00",
    "found": "#22252E",
    "found-background": "#FFDF8A",
    "owner-0": "#2B6E36",
    "owner-1": "#9A4A00",
    "owner-2": "#0B6E7F",
    "owner-3": "#A3367A",
}


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


def _theme(name: str, c: Colours, *, dark: bool) -> Theme:
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


DARK = _theme("mlxserve-dark", _DARK_COLOURS, dark=True)
LIGHT = _theme("mlxserve-light", _LIGHT_COLOURS, dark=False)
_DARK_PALETTE = _palette(_DARK_COLOURS)
_LIGHT_PALETTE = _palette(_LIGHT_COLOURS)
