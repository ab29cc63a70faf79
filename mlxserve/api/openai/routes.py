"""OpenAI's routes: `/v1/chat/completions`, `/v1/completions` and `/v1/models`.

A request is read, validated, tokenised and admitted to the queue before anything is sent, so its
errors have real statuses; after that its answers are either framed as they come or folded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import request_id
from mlxserve.api.anthropic.reply import model_info, model_page
from mlxserve.api.bodies.request_body import read_request
from mlxserve.api.errors import from_engine, json_response, speaks_anthropic
from mlxserve.api.openai.replies import ChatShape, CompletionShape
from mlxserve.api.openai.schema import ChatRequest, CompletionRequest
from mlxserve.api.service import Service
from mlxserve.errors import MlxServeError


class OpenAI:
    """The endpoints over one `Chat`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chat = service.chat
        self._names = service.names
        self._prompts = service.prompts

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
        turn = asked.turn()
        try:
            prompt = await self._prompts.of_messages(
                request,
                [message.for_template() for message in asked.messages],
                asked.template_kwargs,
                asked.prefix_name,
                tools=asked.definitions,
                continues=asked.continue_final_message,
            )
            answers = await self._service.submit(
                request, asked, [prompt], params, num_choices=asked.n or 1, turn=turn
            )
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
        return await self._service.reply(request, asked, answers, shape)

    async def completions(self, request: Request) -> Response:
        asked = await read_request(CompletionRequest, request)
        self._names.check(asked.model)
        params = asked.sampling(self._chat.default_params)
        try:
            prompts = await self._prompts.of_texts(request, asked.prompt, asked.prefix_name)
            answers = await self._service.submit(
                request, asked, prompts, params, num_choices=asked.n or 1
            )
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
        return await self._service.reply(request, asked, answers, shape)

    async def models(self, request: Request) -> Response:
        if speaks_anthropic(request.scope):
            return json_response(model_page(self._chat))
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        is_anthropic = speaks_anthropic(request.scope)
        self._names.check(request.path_params["name"], is_anthropic=is_anthropic)
        return json_response(model_info(self._chat) if is_anthropic else self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._chat.model_name,
            "object": "model",
            "created": self._chat.created,
            "owned_by": "mlxserve",
            "aliases": list(self._names.aliases),
            "context_length": self._chat.max_model_len,
            "max_model_len": self._chat.max_model_len,
            "capabilities": list(self._capabilities()),
            "loaded": True,
        }

    def _capabilities(self) -> Iterator[str]:
        """In Ollama's words, by which agents and editors choose what to send."""
        yield "completion"
        yield "embedding"
        if self._chat.can_call:
            yield "tools"
        if self._chat.can_think:
            yield "thinking"

    def _token_text(self, token_id: int) -> str:
        return self._chat.decode([token_id])
