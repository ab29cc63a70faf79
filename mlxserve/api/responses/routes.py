"""OpenAI's newer route, `/v1/responses`.

A response is stored for a while (`store.py`) unless `store` is false: it can be read again
(`stored.py`), and `previous_response_id` continues its conversation. Instructions apply to their own request only.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import key_id, request_id
from mlxserve.api.bodies.request_body import BodyRoute, read_request
from mlxserve.api.errors import ApiError, encode_json, from_engine
from mlxserve.api.responses.reply import ResponseReply
from mlxserve.api.responses.schema import ResponsesRequest
from mlxserve.api.responses.store import MissingResponse, ResponseStore, StoredResponse
from mlxserve.api.responses.stored import response_not_found
from mlxserve.api.service import Service
from mlxserve.core.errors import MlxServeError


class Responses:
    """The endpoint over one service; the store may be that of several."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    def routes(self) -> list[Route]:
        return [BodyRoute("/v1/responses", self.create, body=ResponsesRequest)]

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
                raise response_not_found(response_id, param) from error
            raise ApiError(
                404,
                f"Response {response_id[:100]!r} cannot be continued, because {error.response_id!r} "
                "in its conversation was deleted or has expired. Send the whole conversation.",
                param=param,
                code="response_not_found",
            ) from error

    def _keep(self, owner: str, asked: ResponsesRequest, response: dict[str, Any]) -> None:
        if asked.store is False:
            return
        answered = ResponsesRequest.read({"input": response["output"]}).input
        items = [*asked.input, *answered]
        size = sum(item.size for item in items) + len(encode_json(response))
        self._store.put(StoredResponse(owner, response, items, size, asked.previous_response_id))
