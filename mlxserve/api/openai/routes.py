"""OpenAI's routes: `/v1/chat/completions` and `/v1/completions`.

A request is read, validated, tokenized and admitted to the queue before anything is sent, so its
errors have real statuses. After that its answers are streamed or returned whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import client_name, request_id
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.errors import ApiError
from mlxserve.api.openai.replies import ChatReply, CompletionReply, EchoedPrompt
from mlxserve.api.openai.schema import ChatRequest, CompletionRequest
from mlxserve.api.service import Prepared, Service
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.helpers.work import Work
from mlxserve.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """The result of reading the body of `/v1/completions` in the client's turn."""

    params: SamplingParams
    prompts: list[list[int]]


class OpenAI:
    """The endpoints over one `TextModel`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model = service.model
        self._prompts = service.prompts

    def routes(self) -> list[Route]:
        return [
            BodyRoute(
                "/v1/chat/completions",
                self.chat_completions,
                body=ChatRequest,
                prepare=self._prepare_chat,
            ),
            BodyRoute(
                "/v1/completions",
                self.completions,
                body=CompletionRequest,
                prepare=self._prepare_texts,
            ),
        ]

    def _prepare_chat(self, request: Request, body: ChatRequest) -> Work[Prepared]:
        params = body.sampling(self._model.default_params)
        return self._service.begin(request, body.prompt_source(), params, body.turn())

    async def chat_completions(
        self, request: Request, body: ChatRequest, prepared: Prepared
    ) -> Response:
        """Answers a conversation."""
        prompt = await self._prompts.finish(request, prepared.prompt)
        answers = await self._service.submit(
            request,
            body,
            [prompt],
            prepared.params,
            num_choices=body.n or 1,
            turn=prepared.turn,
            prefix_name=body.prefix_name,
        )
        reply = ChatReply(
            id=f"chatcmpl-{request_id(request)}",
            created=int(time.time()),
            model=self._model.model_name,
            token_text=self._token_text,
            wants_logprobs=bool(body.logprobs),
            wants_usage=body.include_usage,
        )
        return await self._service.reply(request, answers, reply, is_stream=body.stream)

    def _prepare_texts(self, _request: Request, body: CompletionRequest) -> Work[PreparedTexts]:
        params = body.sampling(self._model.default_params)
        if body.suffix:
            infilling = self._prompts.infilling(body.prompt, body.suffix, params)
            return infilling.then(lambda middle: PreparedTexts(middle.params, middle.prompts))
        encoding = self._prompts.encoding(body.prompt)
        return encoding.then(lambda prompts: PreparedTexts(params, prompts))

    async def completions(
        self, request: Request, body: CompletionRequest, prepared: PreparedTexts
    ) -> Response:
        """Continues texts."""
        echoed = await self._echoed(request, prepared.prompts, body)
        answers = await self._service.submit(
            request,
            body,
            prepared.prompts,
            prepared.params,
            num_choices=body.n or 1,
            prefix_name=body.prefix_name,
        )
        reply = CompletionReply(
            id=f"cmpl-{request_id(request)}",
            created=int(time.time()),
            model=self._model.model_name,
            token_text=self._token_text,
            wants_logprobs=body.logprobs is not None,
            wants_usage=body.include_usage,
            echoed=echoed,
        )
        return await self._service.reply(request, answers, reply, is_stream=body.stream)

    async def _echoed(
        self, request: Request, prompts: Sequence[Sequence[int]], body: CompletionRequest
    ) -> list[EchoedPrompt]:
        """The prompts that the answers begin with; empty without `echo`."""
        if body.echo and body.logprobs is not None and body.prefix_name is not None:
            raise ApiError(
                400,
                "echo: with `logprobs` beside it, no named prefix can come before the prompt; put the "
                "prefix's text into the prompt.",
                param="echo",
            )
        echoed: list[EchoedPrompt] = []
        for prompt in prompts if body.echo else ():
            logprobs: list[TokenLogprob] = []
            if body.logprobs is not None:
                logprobs = await self._model.require_writer().score(
                    prompt, num_top=body.logprobs, client=client_name(request)
                )
            echo = EchoedPrompt(self._model.codec.decode(prompt), prompt[0], tuple(logprobs))
            echoed += [echo] * (body.n or 1)
        return echoed

    def _token_text(self, token_id: int) -> str:
        return self._model.codec.decode([token_id])
