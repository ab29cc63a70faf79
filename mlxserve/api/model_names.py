"""The names of the served model, and the replies to requests for other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.api.errors import ApiError

MODEL_NAMES = "mlxserve.model_names"  # in the scope of a request to a model: the model's ModelNames
CLAUDE = "claude-"
_LATEST = ":latest"


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of a model. Requested names are only compared with them, never used as a path.

    unlisted: names that are accepted but not listed, such as a path on this machine
    is_strict: refuse any other name
    others: the other models of the server
    has_adapters: refuse MODEL:NAME for adapters that the model does not have
    """

    own: str
    aliases: Sequence[str] = ()
    unlisted: Sequence[str] = ()
    is_strict: bool = False
    others: Sequence[str] = ()
    has_adapters: bool = False

    def check(self, name: str | None, *, is_anthropic: bool = False) -> str | None:
        """Return a warning for a name that is not the model's, or None.

        Ignores case, `:latest` and the organisation. Anthropic's clients only know the names of
        Anthropic's models: any of them means this one. Raises ApiError 404 if names are strict, and
        for an adapter that the model does not have.
        """
        if name is None or self.has(name):
            return None
        if is_anthropic and name.startswith(CLAUDE):
            return None
        if self.is_strict:
            raise self.unknown(name)
        if self.has_nearly(name):
            return None
        if self.may_mean_adapter(name):
            raise self.unknown(name)
        return f"the model {name[:100]!r} is not served here; {self.own} is"

    def has(self, name: str) -> bool:
        return name in (self.own, *self.aliases, *self.unlisted)

    def has_nearly(self, name: str) -> bool:
        """True if the model has this name but for case, `:latest` and the organisation."""
        return _bare(name) in map(_bare, (self.own, *self.aliases))

    def may_mean_adapter(self, name: str) -> bool:
        """True if the name has the form of an adapter of this model."""
        base, colon, _ = name.rpartition(":")
        return bool(self.has_adapters and colon) and (self.has(base) or self.has_nearly(base))

    def require(self, name: str, *, is_anthropic: bool = False) -> None:
        """Raises ApiError 404 for a name that is not the model's, whether names are strict or not."""
        if self.check(name, is_anthropic=is_anthropic) is not None:
            raise self.unknown(name)

    def unknown(self, name: str) -> ApiError:
        known = (self.own, *self.aliases, *self.others)
        served = ", ".join(map(repr, known))
        return ApiError(
            404,
            f"The model {name[:100]!r} is not served here. Served: {served}.",
            param="model",
            code="model_not_found",
            ollama_message=f"model '{name[:100]}' not found: this server has {served} and downloads "
            "none; `mlxserve pull` on its machine does",
        )


def _bare(name: str) -> str:
    return name.lower().removesuffix(_LATEST).rpartition("/")[2]
