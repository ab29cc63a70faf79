"""Names of prefixes by API key: another key neither sees nor uses them, an admin sees all.

`Writer` knows a prefix as `OWNER/NAME`, where the owner is the id of the key that added it, and as
`NAME` if it was added with the owner's key or without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

from mlxserve.api.access.keys import Key, Keyring
from mlxserve.api.access.security import is_admin, key_id
from mlxserve.core.errors import UnknownPrefix

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

MAX_PREFIXES = 256  # of all keys together; the token ids of each stay in memory


@dataclass(frozen=True, slots=True, order=True)
class OwnedPrefix:
    """A prefix by its owner's name for it. The owner is empty for the owner's key and without keys."""

    owner: str
    name: str
    num_tokens: int


class PrefixNames:
    """The names of one model's prefixes."""

    def __init__(self, model: TextModel, keyring: Keyring, max_share: float) -> None:
        self._model = model
        self._keyring = keyring
        self._max_share = max_share

    def full(self, request: Request, name: str, owner: str | None = None) -> str:
        """`Writer`'s name of a prefix, which by default belongs to the request's own key."""
        owner = key_id(request) if owner is None else owner
        return f"{owner}/{name}" if owner else name

    def all(self) -> list[OwnedPrefix]:
        """Every prefix, by owner and name."""
        prefixes: list[OwnedPrefix] = []
        if (writer := self._model.writer) is None:
            return prefixes
        for full_name, num_tokens in writer.prefixes.sizes().items():
            owner, _, name = full_name.rpartition("/")
            prefixes.append(OwnedPrefix(owner, name, num_tokens))
        return sorted(prefixes)

    def visible(self, request: Request) -> list[OwnedPrefix]:
        """The prefixes of the request's key; all of them for an admin key."""
        own = key_id(request)
        return [prefix for prefix in self.all() if is_admin(request) or prefix.owner == own]

    def max_share(self, request: Request) -> float:
        """Maximum fraction of all names and pages for the request's key."""
        return self._max_share if not is_admin(request) and self._keyring.num_keys > 1 else 1.0

    def unknown(self, request: Request, name: str, owner: str | None = None) -> UnknownPrefix:
        """Build the error for an unknown name, which reveals only names of the same key."""
        owner = key_id(request) if owner is None else owner
        return UnknownPrefix.named(name, [each.name for each in self.all() if each.owner == owner])

    def drop(self, key: Key) -> None:
        """Remove the prefixes of a revoked key. The owner's stay: they belong to no single key."""
        if key.is_owner:
            return
        for prefix in self.all():
            if prefix.owner == key.id:
                self._model.require_writer().prefixes.remove(f"{prefix.owner}/{prefix.name}")
