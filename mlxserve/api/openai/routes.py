"""OpenAI's routes: `/v1/chat/completions` and `/v1/completions`.

A request is read, validated, tokenized and admitted to the queue before anything is sent, so its
errors have real statuses. After that its answers are streamed or returned whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import client_name, request_id
from mlxserve.api.bodies.messages import conversation_of
from mlxserve.api.bodies.request_body import BodyRoute, read_request
from mlxserve.api.errors import ApiError, from_engine
from mlxserve.api.openai.replies import ChatReply, CompletionReply, EchoedPrompt
from mlxserve.api.openai.schema import ChatRequest, CompletionRequest
from mlxserve.api.service import Service
from mlxserve.core.errors import MlxServeError
from mlxserve.request import TokenLogprob


class OpenAI:
    """The endpoints over one `TextModel`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chat = service.chat
        self._prompts = service.prompts

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/v1/chat/completions", self.chat_completions, body=ChatRequest),
            BodyRoute("/v1/completions", self.completions, body=CompletionRequest),
        ]

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        asked = await read_request(ChatRequest, request)
        self._service.check_model(request, asked.model)
        params = asked.sampling(self._chat.default_params)
        turn = asked.turn()
        try:
            prompt = await self._prompts.of_conversation(
                request,
                partial(conversation_of, asked.messages),
                len(asked.messages),
                asked.template_kwargs,
                tools=asked.definitions,
                continues=bool(asked.continue_final_message),
            )
            answers = await self._service.submit(
                request,
                asked,
                [prompt],
                params,
                num_choices=asked.n or 1,
                turn=turn,
                prefix_name=asked.prefix_name,
            )
        except MlxServeError as error:
            raise from_engine(error, prompt_param="messages") from error
        reply = ChatReply(
            id=f"chatcmpl-{request_id(request)}",
            created=int(time.time()),
            model=self._chat.model_name,
            token_text=self._token_text,
            wants_logprobs=bool(asked.logprobs),
            wants_usage=asked.include_usage,
        )
        return await self._service.reply(request, asked, answers, reply)

    async def completions(self, request: Request) -> Response:
        """Continues texts."""
        asked = await read_request(CompletionRequest, request)
        self._service.check_model(request, asked.model)
        params = asked.sampling(self._chat.default_params)
        try:
            prompts = await self._prompts.of_texts(request, asked.prompt)
            echoed = await self._echoed(request, prompts, asked)
            answers = await self._service.submit(
                request,
                asked,
                prompts,
                params,
                num_choices=asked.n or 1,
                prefix_name=asked.prefix_name,
            )
        except MlxServeError as error:
            raise from_engine(error) from error
        reply = CompletionReply(
            id=f"cmpl-{request_id(request)}",
            created=int(time.time()),
            model=self._chat.model_name,
            token_text=self._token_text,
            wants_logprobs=asked.logprobs is not None,
            wants_usage=asked.include_usage,
            echoed=echoed,
        )
        return await self._service.reply(request, asked, answers, reply)

    async def _echoed(
        self, request: Request, prompts: Sequence[Sequence[int]], asked: CompletionRequest
    ) -> list[EchoedPrompt]:
        """What each answer begins with; nothing without `echo`."""
        if asked.echo and asked.logprobs is not None and asked.prefix_name is not None:
            raise ApiError(
                400,
                "echo: with `logprobs` beside it, no named prefix can come before the prompt; put the "
                "prefix's text into the prompt.",
                param="echo",
            )
        echoed: list[EchoedPrompt] = []
        for prompt in prompts if asked.echo else ():
            logprobs: list[TokenLogprob] = []
            if asked.logprobs is not None:
                logprobs = await self._chat.require_writer().score(
                    prompt, num_top=asked.logprobs, client=client_name(request)
                )
            one = EchoedPrompt(self._chat.codec.decode(prompt), prompt[0], tuple(logprobs))
            echoed += [one] * (asked.n or 1)
        return echoed

    def _token_text(self, token_id: int) -> str:
        return self._chat.codec.decode([token_id])
