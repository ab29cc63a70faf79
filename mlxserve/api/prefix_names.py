"""Names of prefixes as one API key knows them. Another key neither sees nor uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request

from mlxserve.api.access.security import in_namespace, without_namespace
from mlxserve.errors import UnknownPrefix

if TYPE_CHECKING:
    from mlxserve.chat import Chat


class PrefixNames:
    """Those of the prefixes of one `Chat`."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def full(self, request: Request, name: str) -> str:
        """The name under which `Chat` knows the prefix."""
        return in_namespace(request, name)

    def own(self, request: Request) -> dict[str, int]:
        """The key's prefixes by its own names, each with its number of tokens."""
        return {
            own: num_tokens
            for name, num_tokens in sorted(self._chat.prefixes().items())
            if (own := without_namespace(request, name)) is not None
        }

    def unknown(self, request: Request, name: str) -> UnknownPrefix:
        """The error for a name, which tells only the names of the same key."""
        return UnknownPrefix.named(name, self.own(request))
