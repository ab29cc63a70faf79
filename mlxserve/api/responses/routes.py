"""OpenAI's newer route, `/v1/responses`.

A response is stored for a while (`store.py`) unless `store` is false: it can be read again, and
`previous_response_id` continues its conversation. Instructions apply to their own request only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import key_id, request_id
from mlxserve.api.bodies.request_body import BodyRoute, read_request
from mlxserve.api.errors import ApiError, encode_json, from_engine, invalid_value, json_response
from mlxserve.api.responses.reply import ResponseReply
from mlxserve.api.responses.schema import ResponsesRequest
from mlxserve.api.responses.store import MissingResponse, ResponseStore, StoredResponse
from mlxserve.api.service import Service
from mlxserve.errors import MlxServeError


class Responses:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/v1/responses", self.create, body=ResponsesRequest),
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
        earlier = self._stored_before(stored)
        own = stored.items[: len(stored.items) - len(stored.response["output"])]
        items = [item.listed(number) for number, item in enumerate([*earlier, *own])]
        return json_response(page_of(items, request.query_params))

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
        """Raises ApiError 404."""
        stored = self._store.get(request.path_params["id"], key_id(request))
        if stored is None:
            raise _not_found(request.path_params["id"], "id")
        return stored

    async def delete(self, request: Request) -> Response:
        """Deletes a stored response."""
        response_id = request.path_params["id"]
        if not self._store.delete(response_id, key_id(request)):
            raise _not_found(response_id, "id")
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def create(self, request: Request) -> Response:
        """Answers a conversation with a response."""
        new = await read_request(ResponsesRequest, request)
        self._service.check_model(request, new.model)
        new = new.with_items(self._store.items(new.referenced, key_id(request)))
        asked = new.after(self._earlier(request, new.previous_response_id))
        params = asked.sampling(self._service.chat.default_params)
        turn = asked.turn()
        reply = ResponseReply(
            id=request_id(request),
            created=int(time.time()),
            model=self._service.chat.model_name,
            asked=asked,
            params=params,
            on_end=partial(self._keep, key_id(request), new),
        )
        try:
            prompt = await self._service.prompts.of_conversation(
                request,
                asked.conversation,
                len(asked.input),
                asked.template_kwargs,
                tools=asked.definitions,
            )
            answers = await self._service.submit(
                request, asked, [prompt], params, turn=turn, prefix_name=asked.prefix_name
            )
        except MlxServeError as error:
            raise from_engine(error, prompt_param="input") from error
        return await self._service.reply(request, asked, answers, reply)

    def _earlier(self, request: Request, response_id: str | None) -> list[Any]:
        """The items of the conversation to continue. Raises ApiError 404."""
        if response_id is None:
            return []
        try:
            return self._store.conversation(response_id, key_id(request))
        except MissingResponse as error:
            param = "previous_response_id"
            if error.response_id == response_id:
                raise _not_found(response_id, param) from error
            raise ApiError(
                404,
                f"Response {response_id[:100]!r} cannot be continued, because {error.response_id!r} "
                "in its conversation was deleted or has expired. Send the whole conversation.",
                param=param,
                code="response_not_found",
            ) from error

    def _stored_before(self, stored: StoredResponse) -> list[Any]:
        """The items before a response; none if one of its conversation is missing."""
        if stored.previous is None:
            return []
        try:
            return self._store.conversation(stored.previous, stored.owner)
        except MissingResponse:
            return []

    def _keep(self, owner: str, asked: ResponsesRequest, response: dict[str, Any]) -> None:
        if asked.store is False:
            return
        answered = ResponsesRequest.read({"input": response["output"]}).input
        items = [*asked.input, *answered]
        size = sum(len(item.model_dump_json()) for item in items) + len(encode_json(response))
        self._store.put(StoredResponse(owner, response, items, size, asked.previous_response_id))


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A list, paginated as OpenAI does it: `limit`, `order` and `after`. Raises ApiError 400."""
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


def _not_found(response_id: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response {response_id[:100]!r}: it was not stored, was deleted or has expired.",
        param=param,
        code="response_not_found",
    )
