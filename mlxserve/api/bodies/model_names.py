"""The names of the served model, and the check of the `model` field against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.api.errors import ApiError

CLAUDE = "claude-"


@dataclass(frozen=True, slots=True)
class ModelNames:
    """A requested name is only compared with these; it is never used as a path or a repository."""

    own: str
    aliases: Sequence[str] = ()
    unlisted: Sequence[str] = ()  # accepted, but not shown, such as a path on this machine

    def check(self, name: str | None, *, is_anthropic: bool = False) -> None:
        """Raises ApiError 404 for an unknown name.

        Anthropic's clients only know the names of Anthropic's models: any of them is accepted.
        """
        known = (self.own, *self.aliases)
        if is_anthropic and name is not None and name.startswith(CLAUDE):
            return
        if name is not None and name not in known and name not in self.unlisted:
            raise ApiError(
                404,
                f"The model {name[:100]!r} is not served here. Served: "
                f"{', '.join(map(repr, known))}.",
                param="model",
                code="model_not_found",
            )
