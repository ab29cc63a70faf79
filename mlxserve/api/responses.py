"""OpenAI's newer route, `/v1/responses`, for text: one output item of one part, or its events.

    created, in_progress                                      at once
      output_item.added, content_part.added                   with the first text
        output_text.delta ...
      output_text.done, content_part.done, output_item.done
    completed | incomplete | failed

The events' numbers rise by one; clients index items and parts, so each is added before it is used.
A reply is kept for a while (`response_store.py`) unless `store` is false: it can be read again, and
`previous_response_id` goes on with its conversation. Instructions are those of each request alone.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.answers import Answers, Tokens
from mlxserve.api.errors import ApiError, encode_json, from_engine, json_response
from mlxserve.api.request_model import read_request
from mlxserve.api.response_store import ResponseStore, StoredResponse
from mlxserve.api.schema import ResponsesRequest
from mlxserve.api.security import client_name, request_id
from mlxserve.api.service import Service
from mlxserve.api.shapes import cache_report
from mlxserve.api.sse import named_event
from mlxserve.errors import MlxServeError
from mlxserve.request import FinishReason, SamplingParams


class Responses:
    """The endpoint over one `Chat`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.get, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
        ]

    async def get(self, request: Request) -> Response:
        stored = self._store.get(request.path_params["id"], client_name(request))
        if stored is None:
            raise _not_found(request.path_params["id"], "id")
        return json_response(stored.response)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        if not self._store.delete(response_id, client_name(request)):
            raise _not_found(response_id, "id")
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def create(self, request: Request) -> Response:
        new = await read_request(ResponsesRequest, request)
        self._service.names.check(new.model)
        asked = new.after(self._earlier(request, new.previous_response_id))
        params = asked.sampling(self._service.chat.default_params)
        reply = Reply(
            id=request_id(request),
            created=int(time.time()),
            model=self._service.chat.model_name,
            asked=asked,
            params=params,
            on_end=partial(self._keep, client_name(request), new),
        )
        try:
            prompt = await self._service.prompts.of_messages(
                request,
                asked.messages_for_template(),
                asked.chat_template_kwargs,
                asked.prefix_name,
            )
            answers = await self._service.submit(request, asked, [prompt], params)
        except MlxServeError as error:
            raise from_engine(error, prompt_param="input") from error
        return await self._service.reply(request, asked, answers, reply)

    def _earlier(self, request: Request, response_id: str | None) -> list[Any]:
        """The items of the conversation that is gone on with. Raises ApiError 404."""
        if response_id is None:
            return []
        found = self._store.conversation(response_id, client_name(request))
        if found is None:
            raise _not_found(response_id, "previous_response_id")
        return found

    def _keep(self, owner: str, asked: ResponsesRequest, response: dict[str, Any]) -> None:
        if asked.store is False:
            return
        answered = ResponsesRequest.read({"input": response["output"]}).input
        items = [*asked.input, *answered]
        size = sum(len(item.model_dump_json()) for item in items) + len(encode_json(response))
        self._store.put(StoredResponse(owner, response, items, size, asked.previous_response_id))


@dataclass(slots=True, kw_only=True)
class Reply:
    """One response under way: the text so far, and the number of the next event."""

    id: str
    created: int
    model: str
    asked: ResponsesRequest
    params: SamplingParams
    on_end: Callable[[dict[str, Any]], None]
    text: str = ""
    _number: int = 0
    _is_item_open: bool = False
    _place: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    async def frames(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        """The events of one stream. An engine's error ends it as `response.failed`."""
        yield b"".join(self.opening())
        try:
            async with aclosing(answers.deltas()) as deltas:
                async for _, delta in deltas:
                    frames = b"".join(self.more(delta.text))
                    if delta.finish_reason is not None:
                        frames += b"".join(self.closing(delta.finish_reason, answers.tokens))
                    if frames:
                        yield frames
        except MlxServeError as error:
            yield self.failed(from_engine(error))

    async def whole(self, answers: Answers) -> dict[str, Any]:
        answer = (await answers.fold())[0]
        self.text = answer.text
        return self.ended(answer.finish_reason, answers.tokens)

    # Events.

    def opening(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def keepalive(self) -> bytes:
        """A real event: some clients give up on a stream that only sends comments."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    def more(self, text: str) -> Iterator[bytes]:
        if not text:
            return
        yield from self._open_item()
        self.text += text
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def closing(self, reason: FinishReason | None, tokens: Tokens) -> Iterator[bytes]:
        yield from self._open_item()  # an answer without text is still an item
        response = self.ended(reason, tokens)
        item = response["output"][0]
        yield self._event("response.output_text.done", **self._place, text=self.text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=self._part())
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    # Objects.

    def ended(self, reason: FinishReason | None, tokens: Tokens) -> dict[str, Any]:
        status = "incomplete" if reason is FinishReason.LENGTH else "completed"
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = [self._item(status, [self._part()])]
        response["usage"] = {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens.prompt + tokens.completion,
            "cache": cache_report(tokens.cache),
        }
        self.on_end(response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self.asked.instructions,
            "max_output_tokens": self.asked.max_output_tokens,
            "metadata": self.asked.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": self.asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": self.asked.store is not False,
            "temperature": self.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def _item_id(self) -> str:
        return f"msg_{self.id}"

    def _open_item(self) -> Iterator[bytes]:
        if self._is_item_open:
            return
        self._is_item_open = True
        item = self._item("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=self._part())

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._number
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": number, **data})


def _not_found(response_id: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response {response_id[:100]!r}: it was not stored, was deleted, or is too "
        "old.",
        param=param,
        code="response_not_found",
    )
