"""Ollama's routes, below `/api`, as its clients and programs with built-in support use them.

Errors have Ollama's format because of the path: see `errors.py`. A request for another model is
refused, as clients then offer to download it; nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.fair_work import KEEP_ALIVE, STARTED, WAITED, run_fairly
from mlxserve.api.ollama.reply import OllamaReply, lines_or_object, nanoseconds
from mlxserve.api.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaRequest,
)
from mlxserve.api.server.sse import JSON_LINES
from mlxserve.api.service import Prepared, Service
from mlxserve.api.warnings import warn
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.helpers.work import MaybeWork, Work
from mlxserve.images.picture import PicturePrompt

_TOKENS_PER_SECOND = 20_000_000  # copied


class Ollama:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model = service.model

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/api/chat", self.chat, body=OllamaChatRequest, prepare=self._prepare_chat),
            BodyRoute(
                "/api/generate",
                self.generate,
                body=OllamaGenerateRequest,
                prepare=self._prepare_generate,
            ),
            BodyRoute("/api/embed", self.embed, body=OllamaEmbedRequest),
            BodyRoute("/api/embeddings", self.embeddings, body=OllamaEmbeddingsRequest),
        ]

    def _prepare_chat(
        self, request: Request, body: OllamaChatRequest
    ) -> MaybeWork[Prepared | None]:
        self._check(request, body, "chat")
        if not body.messages:
            return None
        params = body.sampling(self._model.default_params)
        return self._service.begin(request, body.prompt_source(), params, body.turn())

    async def chat(
        self, request: Request, body: OllamaChatRequest, prepared: Prepared | None
    ) -> Response:
        """Answers a conversation."""
        reply = self._begun(request, body, "message")
        if prepared is None:
            return self._loaded(request, body, reply)
        return await self._answer(request, body, reply, prepared)

    def _prepare_generate(
        self, request: Request, body: OllamaGenerateRequest
    ) -> MaybeWork[Prepared | None]:
        self._check(request, body, "generate")
        if not body.prompt and not body.suffix:
            return None
        params = body.sampling(self._model.default_params)
        if body.suffix:
            return self._prepare_middle(body, body.suffix, params)
        assert body.prompt is not None
        if not body.raw:
            return self._service.begin(request, body.prompt_source(), params, body.turn())
        if body.images and self._model.supports_images:
            message = "images: a raw prompt holds none; send it without `raw`"
            raise ApiError(400, message, param="images")
        # Refuses images.
        body.conversation(sees=False)
        encoding = self._service.prompts.encoding([body.prompt])
        return encoding.then(lambda prompts: Prepared(params, None, prompts[0]))

    def _prepare_middle(
        self, body: OllamaGenerateRequest, suffix: str, params: SamplingParams
    ) -> MaybeWork[Prepared | None]:
        if self._model.codec.middle_ends is None:
            raise ApiError(400, f'"{body.named_model}" does not support insert', param="suffix")
        infilling = self._service.prompts.infilling([body.prompt or ""], suffix, params)
        return infilling.then(lambda middle: Prepared(middle.params, None, middle.prompts[0]))

    async def generate(
        self, request: Request, body: OllamaGenerateRequest, prepared: Prepared | None
    ) -> Response:
        """Answers a prompt, or with `raw` continues it."""
        reply = self._begun(request, body, "response")
        if prepared is None:
            return self._loaded(request, body, reply)
        reply.context = None if body.raw or body.suffix else ()
        return await self._answer(request, body, reply, prepared, body.context or ())

    async def embed(self, request: Request, body: OllamaEmbedRequest) -> Response:
        """Computes the vectors of texts."""
        self._keep(request, body)
        vectors, num_tokens = await self._vectors(request, body)
        return json_response(
            {
                "model": body.named_model,
                "embeddings": vectors,
                "total_duration": nanoseconds(perf_counter() - request.scope[STARTED]),
                "load_duration": nanoseconds(request.scope[WAITED]),
                "prompt_eval_count": num_tokens,
            }
        )

    async def embeddings(self, request: Request, body: OllamaEmbeddingsRequest) -> Response:
        """Computes the vector of one text."""
        self._keep(request, body)
        vectors, _ = await self._vectors(request, body)
        return json_response({"embedding": vectors[0] if vectors else []})

    def _keep(self, request: Request, body: OllamaRequest) -> None:
        """Keep the model loaded for as long as the request says."""
        if body.keep_alive is not None:
            request.scope[KEEP_ALIVE](request, body.keep_alive)

    def _check(self, request: Request, body: OllamaGeneration, what: str) -> None:
        """Refuse features that the model lacks, worded so that clients recognise it and go on without.

        A model that does not think answers all the same, with a warning. Raises ApiError.
        """
        name = body.named_model
        if self._model.writer is None:
            raise ApiError(400, f'"{name}" does not support {what}', param="model")
        if body.thinks and not self._model.can_think:
            warn(request, f'think: "{name}" does not think')
        if body.tools and not self._model.can_call:
            raise ApiError(400, f'"{name}" does not support tools', param="tools")
        context = self._model.max_model_len
        if (body.options.num_ctx or 0) > context:
            warn(request, f"options.num_ctx: the context here is {context} tokens")

    def _begun(self, request: Request, body: OllamaGeneration, member: str) -> OllamaReply:
        self._keep(request, body)
        token_text = (lambda token: self._model.codec.decode([token])) if body.logprobs else None
        started, load_seconds = request.scope[STARTED], request.scope[WAITED]
        return OllamaReply(member, body.named_model, started, load_seconds, token_text)

    def _loaded(self, request: Request, body: OllamaGeneration, reply: OllamaReply) -> Response:
        """Reply to a request without a prompt, which loads or unloads the model."""
        ending = {"done": True, "done_reason": "unload" if body.unloads else "load"}
        if body.unloads and (reason := request.scope[KEEP_ALIVE](request, 0.0)) is not None:
            ending |= {"done_reason": "load", "warning": f"keep_alive: {reason}"}
            warn(request, f"keep_alive: {reason}")
        return lines_or_object(body, [{**reply.piece(), **ending}])

    async def _answer(
        self,
        request: Request,
        body: OllamaGeneration,
        reply: OllamaReply,
        prepared: Prepared,
        earlier: Sequence[int] = (),
    ) -> Response:
        """Submit the prompt and reply. `earlier`: tokens before the prompt."""
        prompt = await self._service.prompts.finish(request, prepared.prompt)
        if earlier:
            prompt = (
                prompt.after(earlier) if isinstance(prompt, PicturePrompt) else [*earlier, *prompt]
            )
        answers = await self._service.submit(
            request, body.options, [prompt], prepared.params, turn=prepared.turn
        )
        reply.answers = answers
        if reply.context is not None:
            # Without the rows of images, which are no tokens.
            context: Work[list[int]] = Work(
                len(prompt) / _TOKENS_PER_SECOND, lambda: [token for token in prompt if token >= 0]
            )
            reply.context = await run_fairly(request, context)
        return await self._service.reply(
            request, answers, reply, is_stream=body.stream, framing=JSON_LINES
        )

    async def _vectors(
        self, request: Request, body: OllamaEmbedRequest
    ) -> tuple[list[list[float]], int]:
        """Return (vectors, number of tokens)."""
        return await self._service.vectors.embed(
            request,
            getattr(body, body.prompt_field),
            field=body.prompt_field,
            dimensions=body.dimensions or None,
            is_cut=body.truncate is not False,
        )
