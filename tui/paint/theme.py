"""The two themes, and the styles Markdown is painted with in each."""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style
from textual.theme import Theme

Colours = dict[str, str]  # what a colour is used for -> `#RRGGBB`

# In the dark and in the light theme.
_COLOURS: dict[str, tuple[str, str]] = {
    "background": ("#16181F", "#FAFAF7"),
    "surface": ("#1C1F28", "#F1F1EC"),
    "panel": ("#262A36", "#E6E6DF"),
    "foreground": ("#D5DAEE", "#22252E"),
    "quiet": ("#8B92AB", "#646A7C"),  # text of less importance
    "primary": ("#8AADF4", "#2A5DB0"),
    "secondary": ("#A5ADCB", "#5C6378"),
    "accent": ("#C6A0F6", "#7A3FB5"),
    "warning": ("#EED49F", "#8A5A00"),
    "error": ("#ED8796", "#B3261E"),
    "success": ("#A6DA95", "#2B6E36"),
    "border": ("#3A4054", "#C3C4BC"),
    "border-blurred": ("#2C3140", "#D8D8D0"),
    "highlight": ("#28314A", "#DCE5F4"),  # the selected row of a list; quiet text is readable on it
    "code-background": ("#22252F", "#EFEFE9"),
    "number": ("#F5A97F", "#9A4A00"),  # numbers in code
    "found": ("#16181F", "#22252E"),  # search results
    "found-background": ("#EED49F", "#FFDF8A"),
    "owner-0": ("#A6DA95", "#2B6E36"),  # requests and their pages
    "owner-1": ("#F5A97F", "#9A4A00"),
    "owner-2": ("#7DC4E4", "#0B6E7F"),
    "owner-3": ("#F5BDE6", "#A3367A"),
}
_DARK_COLOURS: Colours = {name: dark for name, (dark, _) in _COLOURS.items()}
_LIGHT_COLOURS: Colours = {name: light for name, (_, light) in _COLOURS.items()}


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
    """Return the Markdown styles that go with DARK or LIGHT."""
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
