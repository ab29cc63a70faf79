"""The colours of the two themes, as plain data: the opening frame has no time to import Textual."""

from __future__ import annotations

import os

DARK = "mlxserve-dark"
LIGHT = "mlxserve-light"
DEFAULT = DARK

Colours = dict[str, str]  # what a colour is used for -> `#RRGGBB`

COLOURS: dict[str, Colours] = {
    DARK: {
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
    },
    LIGHT: {
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
    },
}


def named_theme() -> str | None:
    """The theme of the terminal's background, where COLORFGBG names that; None elsewhere.

    iTerm2, Konsole, rxvt and others set it: the number of the text's colour, then the background's.
    """
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    if not background.isdecimal():
        return None
    return LIGHT if int(background) == 7 or 9 <= int(background) <= 15 else DARK
