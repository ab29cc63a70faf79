"""Names a client uses: the model's, which must be known, and fields', which should be."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlxserve.api.errors import ApiError

logger = logging.getLogger(__name__)

CLAUDE = "claude-"
WARNING_HEADER = "x-mlxserve-warning"
_MAX_NAMES_SHOWN = 8
_MAX_NAMES_REMEMBERED = 1_000


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What the served model is called. A name is compared and never looked up anywhere."""

    own: str
    aliases: Sequence[str] = ()

    def check(self, name: str | None, *, is_anthropic: bool = False) -> None:
        """Raises ApiError 404 for a name that is given and not known.

        Anthropic's clients know the names of their own models only: each is the one served.
        """
        known = (self.own, *self.aliases)
        if is_anthropic and name is not None and name.startswith(CLAUDE):
            return
        if name is not None and name not in known:
            raise ApiError(
                404,
                f"The model {name[:100]!r} is not served here. Served: "
                f"{', '.join(map(repr, known))}.",
                param="model",
                code="model_not_found",
            )


class UnknownFields:
    """Fields that did nothing: named in a header each time, in the log the first time."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, names: Iterable[str]) -> dict[str, str]:
        shown = [_shown(name) for name in names][:_MAX_NAMES_SHOWN]
        if not shown:
            return {}
        new = [name for name in shown if name not in self._logged]
        if new and len(self._logged) < _MAX_NAMES_REMEMBERED:
            self._logged.update(new)
            logger.warning("Request fields without effect: %s", ", ".join(new))
        return {WARNING_HEADER: f"ignored unknown fields: {', '.join(shown)}"}


def _shown(name: str) -> str:
    """As it may stand in a header, which neither begins nor ends with a space; else in quotes."""
    text = ascii(name)[1:-1][:64]
    return text if text and text == text.strip() else f"'{text}'"
