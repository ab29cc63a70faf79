"""Contrast as defined by WCAG 2.1: from 1 for the same colour to 21 for black on white."""

from __future__ import annotations

Colour = tuple[int, int, int]  # red, green and blue, from 0 to 255


def contrast(one: Colour, other: Colour) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Colour) -> float:
    """0 for black, 1 for white."""
    parts = [c / 255 for c in colour]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
