"""OpenAI's newer route, `/v1/responses`.

A response is stored for a while (`store.py`) unless `store` is false: it can be read again
(`stored.py`), and `previous_response_id` continues its conversation. Instructions apply to their own request only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import key_id, request_id
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.json_body import body_size
from mlxserve.api.errors import ApiError
from mlxserve.api.responses.reply import ResponseReply
from mlxserve.api.responses.schema import ResponsesRequest
from mlxserve.api.responses.store import MissingResponse, ResponseStore, StoredResponse
from mlxserve.api.responses.stored import response_not_found
from mlxserve.api.service import Prepared, Service
from mlxserve.helpers.work import Work


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """The result of reading a body in the client's turn.

    new: the body, with stored items in place of references
    whole: the same, after the conversation that it continues
    """

    new: ResponsesRequest
    whole: ResponsesRequest
    answering: Prepared


class Responses:
    """The endpoint over one service. Several services may share the store."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/v1/responses", self.create, body=ResponsesRequest, prepare=self._prepare)
        ]

    def _prepare(self, request: Request, body: ResponsesRequest) -> Work[PreparedResponse]:
        new = body.with_items(self._store.items(body.referenced, key_id(request)))
        whole = new.after(self._earlier(request, new.previous_response_id))
        params = whole.sampling(self._service.model.default_params)
        prepared = self._service.begin(request, whole.prompt_source(), params, whole.turn())
        return prepared.then(partial(PreparedResponse, new, whole))

    async def create(
        self, request: Request, body: ResponsesRequest, prepared: PreparedResponse
    ) -> Response:
        """Answers a conversation with a response."""
        answering = prepared.answering
        reply = ResponseReply(
            id=request_id(request),
            created=int(time.time()),
            model=self._service.model.model_name,
            request=prepared.whole,
            params=answering.params,
            on_end=partial(self._keep, key_id(request), prepared.new, body_size(request)),
        )
        prompt = await self._service.prompts.finish(request, answering.prompt)
        answers = await self._service.submit(
            request,
            body,
            [prompt],
            answering.params,
            turn=answering.turn,
            prefix_name=body.prefix_name,
        )
        return await self._service.reply(request, answers, reply, is_stream=body.stream)

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

    def _keep(
        self, owner: str, body: ResponsesRequest, body_size: int, response: dict[str, Any]
    ) -> None:
        if body.store is False:
            return
        answered = ResponsesRequest.read({"input": response["output"]}).input
        items = [*body.input, *answered]
        # The response repeats the body and the items of the answer.
        size = sum(item.size for item in (*items, *answered)) + body_size
        self._store.put(StoredResponse(owner, response, items, size, body.previous_response_id))
