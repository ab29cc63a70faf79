"""Named prefixes over HTTP: computed once, then prepended to a prompt by `prefix_name`.

A name belongs to the API key that added it. Other keys can neither see nor use it.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import cache_namespace
from mlxserve.api.bodies.request_body import read_request
from mlxserve.api.bodies.route import BodyRoute
from mlxserve.api.errors import ApiError, from_engine, json_response
from mlxserve.api.native.schema import PrefixRequest
from mlxserve.api.service import Service
from mlxserve.errors import MlxServeError, UnknownPrefix

MAX_PREFIXES = 256  # of all keys together; the token ids of each stay in memory
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Prefixes:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._chat = service.chat
        self._names = service.names
        self._prompts = service.prompts
        self._prefix_names = service.prefix_names
        self._unknown_fields = service.unknown_fields

    def routes(self) -> list[Route]:
        return [
            Route("/v1/prefixes", self.index, methods=["GET"]),
            Route("/v1/prefixes/{name}", self.get, methods=["GET"]),
            BodyRoute("/v1/prefixes/{name}", self.put, body=PrefixRequest, method="PUT"),
            Route("/v1/prefixes/{name}", self.delete, methods=["DELETE"]),
        ]

    async def index(self, request: Request) -> Response:
        """Lists the prefixes of the API key."""
        found = [_card(*prefix) for prefix in self._prefix_names.own(request).items()]
        return json_response({"object": "list", "data": found})

    async def get(self, request: Request) -> Response:
        """Describes a prefix."""
        name = request.path_params["name"]
        num_tokens = self._prefix_names.own(request).get(name)
        if num_tokens is None:
            raise self._not_found(request, name)
        return json_response(_card(name, num_tokens))

    async def put(self, request: Request) -> Response:
        """Adds or replaces a prefix and computes it, so that its first use is already fast."""
        name = request.path_params["name"]
        if not _NAME.fullmatch(name):
            raise ApiError(
                400,
                "name: must be 1 to 64 letters, digits, dots, dashes or underscores.",
                param="name",
                code="invalid_value",
            )
        asked = await read_request(PrefixRequest, request)
        self._names.check(asked.model)
        full_name = self._prefix_names.full(request, name)
        known = self._chat.prefixes()
        if full_name not in known and len(known) >= MAX_PREFIXES:
            raise ApiError(
                400, f"There are already {MAX_PREFIXES} prefixes; delete one.", param="name"
            )
        try:
            token_ids = await self._token_ids(asked)
            await self._chat.add_prefix(
                full_name, token_ids, cache_salt=cache_namespace(request, None)
            )
        except MlxServeError as error:
            raise from_engine(error, prompt_param=asked.text_field) from error
        headers = self._unknown_fields.warn(asked.unknown_fields)
        return json_response(_card(name, len(token_ids)), headers=headers)

    async def delete(self, request: Request) -> Response:
        """Deletes a prefix. Its pages stay cached until they are evicted."""
        name = request.path_params["name"]
        try:
            self._chat.remove_prefix(self._prefix_names.full(request, name))
        except UnknownPrefix as error:
            raise self._not_found(request, name) from error
        return json_response({"id": name, "object": "prefix", "deleted": True})

    def _not_found(self, request: Request, name: str) -> ApiError:
        message = str(self._prefix_names.unknown(request, name))
        return ApiError(404, message, param="name", code="unknown_prefix")

    async def _token_ids(self, asked: PrefixRequest) -> list[int]:
        if asked.prompt is not None:
            return (await self._prompts.of_texts(asked.prompt))[0]
        return await self._prompts.of_messages(
            [message.for_template() for message in asked.messages or ()],
            asked.chat_template_kwargs,
            add_generation_prompt=False,
        )


def _card(name: str, num_tokens: int) -> dict[str, Any]:
    return {"id": name, "object": "prefix", "num_tokens": num_tokens}
