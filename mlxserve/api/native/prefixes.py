"""Named prefixes over HTTP: computed once, then prepended to a prompt by `prefix_name`.

A name belongs to the API key that added it. Other keys can neither see nor use it, but an admin key
sees and deletes everybody's: `?key=ID` names the owner, and is empty for a prefix added without a
key. A key that is revoked loses its prefixes.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import cache_namespace, is_admin, key_id
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.errors import ApiError, invalid_value, json_response
from mlxserve.api.native.schema import PrefixRequest
from mlxserve.api.prefix_names import MAX_PREFIXES, OwnedPrefix
from mlxserve.api.service import Service
from mlxserve.core.errors import UnknownPrefix

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Prefixes:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._model = service.model
        self._prompts = service.prompts
        self._prefix_names = service.prefix_names
        self._adding: Counter[str] = Counter()  # names of prefixes that are being computed

    def routes(self) -> list[Route]:
        return [
            Route("/v1/prefixes", self.index, methods=["GET"]),
            Route("/v1/prefixes/{name}", self.get, methods=["GET"]),
            BodyRoute(
                "/v1/prefixes/{name}",
                self.put,
                body=PrefixRequest,
                method="PUT",
                admit=_check_name,
            ),
            Route("/v1/prefixes/{name}", self.delete, methods=["DELETE"]),
        ]

    async def index(self, request: Request) -> Response:
        """Lists the prefixes of the API key, or all of them for an admin key."""
        cards = [_card(prefix) for prefix in self._prefix_names.visible(request)]
        return json_response({"object": "list", "data": cards})

    async def get(self, request: Request) -> Response:
        """Describes a prefix."""
        name, owner = request.path_params["name"], _owner(request)
        for prefix in self._prefix_names.visible(request):
            if (prefix.owner, prefix.name) == (owner, name):
                return json_response(_card(prefix))
        raise self._not_found(request, name, owner)

    async def put(self, request: Request, body: PrefixRequest) -> Response:
        """Adds or replaces a prefix and computes it, so that its first use is already fast."""
        name = request.path_params["name"]
        full_name = self._prefix_names.full(request, name)
        self._refuse_too_many(request, full_name)
        self._adding[full_name] += 1
        try:
            token_ids = await self._token_ids(request, body)
            await self._model.require_writer().prefixes.add(
                full_name,
                token_ids,
                cache_salt=cache_namespace(request, None),
                client=key_id(request),
                max_share=self._prefix_names.max_share(request),
            )
        finally:
            self._adding -= Counter([full_name])
        return json_response(_card(OwnedPrefix(key_id(request), name, len(token_ids))))

    def _refuse_too_many(self, request: Request, full_name: str) -> None:
        """Raises ApiError 409 if a new name exceeds the limit of all names or the key's share of it."""
        writer = self._model.writer
        known = self._adding.keys() | (() if writer is None else writer.prefixes.sizes().keys())
        if full_name in known:
            return
        if len(known) >= MAX_PREFIXES:
            message = f"There are already {MAX_PREFIXES} prefixes; delete one."
            raise ApiError(409, message, param="name", code="prefix_quota_exceeded")
        owner = self._prefix_names.full(request, "")
        num_own = sum(name.startswith(owner) for name in known)
        max_own = max(int(MAX_PREFIXES * self._prefix_names.max_share(request)), 1)
        if num_own >= max_own:
            raise ApiError(
                409,
                f"One API key may have {max_own} of the {MAX_PREFIXES} prefixes and has {num_own}. "
                "Delete one, or raise max_prefix_share_per_key.",
                param="name",
                code="prefix_quota_exceeded",
            )

    async def delete(self, request: Request) -> Response:
        """Deletes a prefix. Its pages stay cached until they are evicted."""
        name, owner = request.path_params["name"], _owner(request)
        if (writer := self._model.writer) is None:
            raise self._not_found(request, name, owner)
        try:
            writer.prefixes.remove(self._prefix_names.full(request, name, owner))
        except UnknownPrefix as error:
            raise self._not_found(request, name, owner) from error
        return json_response({"id": name, "object": "prefix", "deleted": True})

    def _not_found(self, request: Request, name: str, owner: str) -> ApiError:
        message = str(self._prefix_names.unknown(request, name, owner))
        return ApiError(404, message, param="name", code="unknown_prefix")

    async def _token_ids(self, request: Request, body: PrefixRequest) -> list[int]:
        if body.prompt is not None:
            return (await self._prompts.encode(request, body.prompt))[0]
        return await self._prompts.render(request, body.prompt_source())


def _check_name(request: Request) -> None:
    """Raises ApiError 400 for an invalid name."""
    if not _NAME.fullmatch(request.path_params["name"]):
        raise invalid_value("name", "must be 1 to 64 letters, digits, dots, dashes or underscores")


def _owner(request: Request) -> str:
    """The id of the key that owns the named prefix. Raises ApiError 403."""
    own = key_id(request)
    owner = request.query_params.get("key", own)
    if owner != own and not is_admin(request):
        raise ApiError(
            403,
            "Prefixes of another API key need a key with the scope admin.",
            param="key",
            code="admin_required",
        )
    return owner


def _card(prefix: OwnedPrefix) -> dict[str, Any]:
    return {
        "id": prefix.name,
        "object": "prefix",
        "num_tokens": prefix.num_tokens,
        "key": prefix.owner or None,
    }
