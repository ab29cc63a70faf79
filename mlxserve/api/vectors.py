"""Vectors of texts and relevance of documents, for the routes that embed and rerank.

A language model's vector of a text is the mean of its tokens' last hidden states, or the last
token's, scaled to length one; an embedding model's files define its own. Texts of several clients
take turns (`mlxserve.engine.text_queue`), in pieces between which running answers continue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from mlxserve.api.access.security import client_name
from mlxserve.api.bodies.fields import Prompt
from mlxserve.api.errors import from_engine, invalid_value
from mlxserve.api.fair_work import cancel_on_disconnect, refusal, run_fairly
from mlxserve.api.prompts import Prompts
from mlxserve.api.server.retry_after import RetryAfter
from mlxserve.api.warnings import warn
from mlxserve.core.errors import ClientQueueFull, MlxServeError, PromptTooLong, QueueFull
from mlxserve.helpers.work import Work
from mlxserve.request import Pooling
from mlxserve.text.costs import encode_seconds

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

T = TypeVar("T")

MAX_TOKENS = 300_000  # of all texts of a request, as in OpenAI's API
MAX_WAITING, MAX_CLIENT_WAITING = 256, 64  # requests, of all clients and of one


class TextVectors:
    """The vectors and ranks of one `TextModel`."""

    def __init__(self, model: TextModel, prompts: Prompts) -> None:
        self._model = model
        self._prompts = prompts
        self._num_waiting: Counter[str] = Counter()  # requests of each client
        self._retry_after = RetryAfter()

    async def embed(
        self,
        request: Request,
        texts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        input_type: str | None = None,
        field: str = "input",
        is_cut: bool = False,
    ) -> tuple[list[list[float]], int]:
        """Return the vector of each text, and the number of tokens.

        pooling: None for the model's own, or the mean
        input_type: the name of the prompt that the model expects before each text
        is_cut: cut texts that exceed the context, with a warning, instead of refusing them

        Raises MlxServeError, ApiError, which names `field`, and ClientDisconnect.
        """
        if not texts:
            return [], 0
        model = self._model.require_vectors()
        before = model.prompt_for(input_type)
        if before:
            texts = [before + text if isinstance(text, str) else text for text in texts]
        tokens = await self._prompts.encode(request, texts, field, is_cut=is_cut)
        if is_cut and max(map(len, tokens)) > (context := self._model.max_model_len):
            warn(request, f"{field}: cut to {context} tokens")
            tokens = [model.cut(ids) for ids in tokens]
        client = client_name(request)
        self._check(tokens, client, field)
        computed = model.embed(tokens, pooling=pooling, dimensions=dimensions, client=client)
        vectors = await cancel_on_disconnect(request, self._counted(client, computed))
        return vectors, sum(map(len, tokens))

    async def ranks(
        self, request: Request, query: str, documents: Sequence[str], instruction: str | None
    ) -> tuple[list[float], int]:
        """Return the relevance of each document, and the number of tokens.

        A document that does not fit is cut, with a warning. Raises MlxServeError, ApiError and
        ClientDisconnect.
        """
        model = self._model
        try:
            ranker = model.require_ranker()
        except MlxServeError as error:
            raise from_engine(error, prompt_param="model") from error
        seconds = encode_seconds(len(documents) * len(query) + sum(map(len, documents)))
        client = client_name(request)
        preparing: Work[tuple[list[list[int]], int]] = Work(
            seconds, partial(ranker.prepare, query, documents, instruction)
        )
        texts, num_cut = await run_fairly(request, preparing)
        self._check(texts, client, "documents")
        computed = ranker.rank(texts, client=client)
        scores = await cancel_on_disconnect(request, self._counted(client, computed))
        if num_cut:
            warn(request, f"documents: {num_cut} cut to {model.max_model_len} tokens")
        return scores, sum(map(len, texts))

    async def _counted(self, client: str, computed: Awaitable[T]) -> T:
        """Count the request as waiting until its result is computed."""
        self._num_waiting[client] += 1
        try:
            return await computed
        finally:
            self._num_waiting[client] -= 1
            if not self._num_waiting[client]:
                del self._num_waiting[client]
            self._retry_after.ended()

    def _check(self, texts: Sequence[Sized], client: str, field: str) -> None:
        """Refuse invalid requests before anything is computed."""
        num_tokens = sum(map(len, texts))
        longest = max(map(len, texts))
        if longest > self._model.max_model_len:
            raise PromptTooLong.for_embedding(longest, self._model.max_model_len)
        if num_tokens > MAX_TOKENS:
            raise invalid_value(
                field, f"has {num_tokens} tokens; {MAX_TOKENS} are allowed in one request"
            )
        seconds = self._retry_after.seconds()
        if self._num_waiting[client] >= MAX_CLIENT_WAITING:
            message = "Too many embedding requests of yours are waiting. Wait for some to finish."
            raise refusal(ClientQueueFull(message, seconds=seconds))
        if self._num_waiting.total() >= MAX_WAITING:
            message = "Too many embedding requests are waiting."
            raise refusal(QueueFull(message, seconds=seconds))
