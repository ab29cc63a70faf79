"""Warnings about request fields without effect: a header on each reply, a log line once per field."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)

WARNING_HEADER = "x-mlxserve-warning"
_MAX_NAMES_SHOWN = 8
_MAX_NAMES_REMEMBERED = 1_000


class UnknownFields:
    """Remembers which fields were logged. One per app."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, names: Iterable[str]) -> dict[str, str]:
        """The reply headers that name these fields; logs those that are new."""
        shown = [_shown(name) for name in names][:_MAX_NAMES_SHOWN]
        if not shown:
            return {}
        new = [name for name in shown if name not in self._logged]
        if new and len(self._logged) < _MAX_NAMES_REMEMBERED:
            self._logged.update(new)
            logger.warning("Request fields without effect: %s", ", ".join(new))
        return {WARNING_HEADER: f"ignored unknown fields: {', '.join(shown)}"}


def _shown(name: str) -> str:
    """A name as a header can hold it: ASCII, without a space at either end, otherwise quoted."""
    text = ascii(name)[1:-1][:64]
    return text if text and text == text.strip() else f"'{text}'"
