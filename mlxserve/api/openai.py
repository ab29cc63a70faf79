"""OpenAI's routes: `/v1/chat/completions`, `/v1/completions` and `/v1/models`.

A request is read, validated, tokenised and admitted to the queue before anything is sent, so its
errors have real statuses; after that its answers are either framed as they come or folded.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.answers import Answers, unless_disconnected
from mlxserve.api.errors import from_engine, json_response
from mlxserve.api.metrics import Metrics
from mlxserve.api.naming import ModelNames, UnknownFields
from mlxserve.api.prompts import Prompts
from mlxserve.api.schema import ChatRequest, CompletionRequest, read_request
from mlxserve.api.security import cache_namespace, client_name, request_id
from mlxserve.api.shapes import ChatShape, CompletionShape
from mlxserve.api.sse import DONE, EventStream, event
from mlxserve.errors import MlxServeError
from mlxserve.request import SamplingParams

if TYPE_CHECKING:
    from mlxserve.chat import Chat


class OpenAI:
    """The endpoints over one `Chat`."""

    def __init__(self, chat: Chat, names: ModelNames, metrics: Metrics) -> None:
        self._chat = chat
        self._names = names
        self._metrics = metrics
        self._prompts = Prompts(chat)
        self._unknown_fields = UnknownFields()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
        ]

    async def chat_completions(self, request: Request) -> Response:
        asked = await read_request(ChatRequest, request)
        self._names.check(asked.model)
        params = asked.sampling(self._chat.default_params)
        try:
            prompt = await self._prompts.of_messages(
                request,
                [message.for_template() for message in asked.messages],
                asked.chat_template_kwargs,
                asked.prefix_name,
            )
            answers = await self._submit(request, asked, [prompt], params)
        except MlxServeError as error:
            raise from_engine(error, prompt_param="messages") from error
        shape = ChatShape(
            id=f"chatcmpl-{request_id(request)}",
            created=int(time.time()),
            model=self._chat.model_name,
            token_text=self._token_text,
            wants_logprobs=bool(asked.logprobs),
            wants_usage=asked.include_usage,
        )
        return await self._reply(request, asked, answers, shape)

    async def completions(self, request: Request) -> Response:
        asked = await read_request(CompletionRequest, request)
        self._names.check(asked.model)
        params = asked.sampling(self._chat.default_params)
        try:
            prompts = await self._prompts.of_texts(request, asked.prompt, asked.prefix_name)
            answers = await self._submit(request, asked, prompts, params)
        except MlxServeError as error:
            raise from_engine(error) from error
        shape = CompletionShape(
            id=f"cmpl-{request_id(request)}",
            created=int(time.time()),
            model=self._chat.model_name,
            token_text=self._token_text,
            wants_logprobs=asked.logprobs is not None,
            wants_usage=asked.include_usage,
        )
        return await self._reply(request, asked, answers, shape)

    async def models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._names.check(request.path_params["name"])
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._chat.model_name,
            "object": "model",
            "created": self._chat.created,
            "owned_by": "mlxserve",
            "aliases": list(self._names.aliases),
            "context_length": self._chat.max_model_len,
            "max_model_len": self._chat.max_model_len,
        }

    async def _submit(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> Answers:
        return await Answers.submit(
            self._chat,
            prompts,
            params,
            self._metrics,
            num_choices=asked.n or 1,
            cache_salt=cache_namespace(request, asked.cache_salt),
            client=client_name(request),
            priority=asked.priority,
        )

    async def _reply(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        answers: Answers,
        shape: ChatShape | CompletionShape,
    ) -> Response:
        headers = self._unknown_fields.warn(asked.unknown_fields)
        if asked.stream:
            return EventStream(_frames(answers, shape), close=answers.aclose, headers=headers)
        try:
            folded = await unless_disconnected(request.receive, answers.fold())
        except MlxServeError as error:
            raise from_engine(error) from error
        finally:
            await answers.aclose()
        if folded is None:
            return Response(status_code=499)  # nobody reads it
        return json_response(shape.whole(folded, answers.tokens), headers=headers)

    def _token_text(self, token_id: int) -> str:
        return self._chat.decode([token_id])


async def _frames(
    answers: Answers, shape: ChatShape | CompletionShape
) -> AsyncGenerator[bytes, None]:
    """The events of one stream. An engine's error ends it in OpenAI's way: no [DONE]."""
    try:
        async with aclosing(answers.deltas()) as deltas:
            async for index, delta in deltas:
                frames = b"".join(event(chunk) for chunk in shape.chunks(index, delta))
                if frames:
                    yield frames
    except MlxServeError as error:
        yield event(from_engine(error).body())
        return
    if shape.wants_usage:
        yield event(shape.usage_chunk(answers.tokens))
    yield DONE
