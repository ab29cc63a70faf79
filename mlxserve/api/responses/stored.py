"""Reads, lists and deletes stored responses. No model is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import key_id
from mlxserve.api.errors import ApiError, invalid_value, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.responses.store import MissingResponse, ResponseStore, StoredResponse
from mlxserve.helpers.work import Work

_LIST_SECONDS = 0.01  # for the items of a long conversation


class StoredResponses:
    """The endpoints over one store."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/{id}", self.get, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def get(self, request: Request) -> Response:
        """Returns a stored response."""
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(
                400,
                "stream: a stored response can only be read whole.",
                param="stream",
                code="unsupported_parameter",
            )
        return json_response(self._stored(request).response)

    async def input_items(self, request: Request) -> Response:
        """Lists the input of a response, with the conversation before it as far as it is stored."""
        stored = self._stored(request)
        listing = partial(self._listed, stored, request.query_params)
        page: Work[dict[str, Any]] = Work(_LIST_SECONDS, listing)
        return json_response(await run_fairly(request, page))

    def _listed(self, stored: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
        earlier = self._stored_before(stored)
        own = stored.items[: len(stored.items) - len(stored.response["output"])]
        items = [item.listed(number) for number, item in enumerate([*earlier, *own])]
        return page_of(items, query)

    async def cancel(self, request: Request) -> Response:
        """Always refused: there are no background responses. Clients cancel by disconnecting."""
        self._stored(request)
        raise ApiError(
            400,
            "Only background responses can be cancelled, and this server has none.",
            param="id",
            code="invalid_value",
        )

    def _stored(self, request: Request) -> StoredResponse:
        """The response in the path. Raises ApiError 404."""
        stored = self._store.get(request.path_params["id"], key_id(request))
        if stored is None:
            raise response_not_found(request.path_params["id"], "id")
        return stored

    async def delete(self, request: Request) -> Response:
        """Deletes a stored response."""
        response_id = request.path_params["id"]
        if not self._store.delete(response_id, key_id(request)):
            raise response_not_found(response_id, "id")
        return json_response({"id": response_id, "object": "response", "deleted": True})

    def _stored_before(self, stored: StoredResponse) -> list[Any]:
        """The items before a response; none if a response of its conversation is missing."""
        if stored.previous is None:
            return []
        try:
            return self._store.conversation(stored.previous, stored.owner)
        except MissingResponse:
            return []


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Paginate a list as OpenAI does, by `limit`, `order` and `after`. Raises ApiError 400."""
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise invalid_value("limit", "must be a whole number from 1 to 100")
    if order not in ("asc", "desc"):
        raise invalid_value("order", "must be asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise invalid_value("after", "is not an item of this response")
    begin = 0 if after is None else ids.index(after) + 1
    page = ordered[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(ordered),
    }


def response_not_found(response_id: str, param: str) -> ApiError:
    """Build the 404 for a response."""
    return ApiError(
        404,
        f"There is no response {response_id[:100]!r}: it was not stored, was deleted or has expired.",
        param=param,
        code="response_not_found",
    )
