"""Ollama's routes, below `/api`, as its clients and the programs that have it built in use them.

Errors have Ollama's format because of the path: see `errors.py`. A request for another model is refused,
as clients offer to download what is not found; nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.request_body import BodyRoute, read_request
from mlxserve.api.errors import ApiError, from_engine, json_response
from mlxserve.api.fair_work import KEEP_ALIVE, WAITED
from mlxserve.api.ollama.reply import OllamaReply, nanoseconds
from mlxserve.api.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaRequest,
)
from mlxserve.api.server.sse import JSON_LINES
from mlxserve.api.service import Service
from mlxserve.api.warnings import warn
from mlxserve.core.errors import MlxServeError
from mlxserve.images.picture import PicturePrompt
from mlxserve.text.parsing.turn import AssistantTurn

AskedT = TypeVar("AskedT", bound=OllamaGeneration)


class Ollama:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chat = service.chat

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/api/chat", self.chat, body=OllamaChatRequest),
            BodyRoute("/api/generate", self.generate, body=OllamaGenerateRequest),
            BodyRoute("/api/embed", self.embed, body=OllamaEmbedRequest),
            BodyRoute("/api/embeddings", self.embeddings, body=OllamaEmbedRequest),
        ]

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        asked, reply = await self._asked(OllamaChatRequest, "message", request)
        if not asked.messages:
            return self._loaded(request, asked, reply)
        prompt = partial(
            self._service.prompts.of_conversation,
            request,
            asked.conversation,
            len(asked.messages),
            asked.template_kwargs,
            tools=asked.definitions,
            continues=asked.continues,
        )
        return await self._answer(request, asked, reply, prompt, asked.turn())

    async def generate(self, request: Request) -> Response:
        """Answers a prompt, or with `raw` continues it."""
        asked, reply = await self._asked(OllamaGenerateRequest, "response", request)
        if not asked.prompt:
            return self._loaded(request, asked, reply)
        if asked.suffix:
            message = f'"{reply.model}" does not support insert: send the whole prompt as `raw`'
            raise ApiError(400, message, param="suffix")
        reply.context = None if asked.raw else ()
        prompt = partial(self._prompt, request, asked)
        return await self._answer(
            request, asked, reply, prompt, None if asked.raw else asked.turn()
        )

    async def embed(self, request: Request) -> Response:
        """Computes the vectors of texts."""
        load_seconds = request.scope[WAITED]
        started = perf_counter() - load_seconds
        asked = await read_request(OllamaEmbedRequest, request)
        name = self._model(request, asked)
        vectors, num_tokens = await self._vectors(request, asked, "input")
        reply = {
            "model": name,
            "embeddings": vectors,
            "total_duration": nanoseconds(perf_counter() - started),
            "load_duration": nanoseconds(load_seconds),
            "prompt_eval_count": num_tokens,
        }
        return self._json(request, asked, reply)

    async def embeddings(self, request: Request) -> Response:
        """Computes the vector of one text."""
        asked = await read_request(OllamaEmbedRequest, request)
        self._model(request, asked)
        vectors, _ = await self._vectors(request, asked, "prompt")
        return self._json(request, asked, {"embedding": vectors[0] if vectors else []})

    def _model(self, request: Request, asked: OllamaRequest) -> str:
        """Its name, which replies repeat; it stays loaded for as long as is asked. Raises ApiError 400 and 404."""
        name = asked.model or asked.name
        if not name:
            raise ApiError(400, "model is required", param="model")
        self._service.names.require(name)
        if asked.keep_alive is not None:
            request.scope[KEEP_ALIVE](asked.keep_alive)
        return name

    async def _asked(
        self, kind: type[AskedT], member: str, request: Request
    ) -> tuple[AskedT, OllamaReply]:
        """What the model cannot do is refused in the words by which clients know that they have to go
        on without it. Raises ApiError."""
        load_seconds = request.scope[WAITED]
        started = perf_counter() - load_seconds
        asked = await read_request(kind, request)
        name = self._model(request, asked)
        if self._chat.writer is None:
            what = "chat" if member == "message" else "generate"
            raise ApiError(400, f'"{name}" does not support {what}', param="model")
        if asked.thinks and not self._chat.can_think:
            raise ApiError(400, f'"{name}" does not support thinking', param="think")
        if asked.tools and not self._chat.can_call:
            raise ApiError(400, f'"{name}" does not support tools', param="tools")
        context = self._chat.max_model_len
        if (asked.options.num_ctx or 0) > context:
            warn(request, f"options.num_ctx: the context here is {context} tokens")
        token_text = (lambda token: self._chat.codec.decode([token])) if asked.logprobs else None
        return asked, OllamaReply(member, name, started, load_seconds, token_text)

    def _loaded(self, request: Request, asked: OllamaGeneration, reply: OllamaReply) -> Response:
        """The reply to a request without a prompt, by which Ollama loads or unloads a model."""
        if asked.unloads and not request.scope[KEEP_ALIVE](0.0):
            warn(request, "keep_alive: the server decides how long the model stays loaded")
        ending = {"done": True, "done_reason": "unload" if asked.unloads else "load"}
        return self._json(request, asked, {**reply.piece(), **ending})

    async def _prompt(self, request: Request, asked: OllamaGenerateRequest) -> list[int]:
        if asked.raw:
            if asked.images and self._chat.supports_images:
                message = "images: a raw prompt holds none; send it without `raw`"
                raise ApiError(400, message, param="images")
            asked.conversation(sees=False)  # which refuses images
            [prompt] = await self._service.prompts.of_texts(request, [asked.prompt or ""])
            return prompt
        prompt = await self._service.prompts.of_conversation(
            request, asked.conversation, 2, asked.template_kwargs, tools=asked.definitions
        )
        earlier = asked.context or ()
        if isinstance(prompt, PicturePrompt):
            return prompt.after(earlier)
        return [*earlier, *prompt]

    async def _answer(
        self,
        request: Request,
        asked: OllamaGeneration,
        reply: OllamaReply,
        make_prompt: Callable[[], Awaitable[list[int]]],
        turn: AssistantTurn | None,
    ) -> Response:
        params = asked.sampling(self._chat.default_params)
        try:
            prompt = await make_prompt()
            answers = await self._service.submit(
                request, asked.options, [prompt], params, turn=turn
            )
        except MlxServeError as error:
            raise from_engine(error, prompt_param=asked.PROMPT) from error
        reply.answers = answers
        if reply.context is not None:
            # Without the rows of images, which are no tokens.
            reply.context = [token for token in prompt if token >= 0]
        return await self._service.reply(request, asked, answers, reply, framing=JSON_LINES)

    async def _vectors(
        self, request: Request, asked: OllamaEmbedRequest, field: str
    ) -> tuple[list[list[float]], int]:
        """(vectors, tokens)."""
        return await self._service.vectors.of_texts(
            request,
            getattr(asked, field),
            field=field,
            dimensions=asked.dimensions or None,
            is_cut=asked.truncate is not False,
        )

    def _json(self, request: Request, asked: OllamaRequest, reply: Mapping[str, Any]) -> Response:
        headers = self._service.warnings.header(request, asked.unknown_fields)
        return json_response(reply, headers=headers)
