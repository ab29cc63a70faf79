"""Texts as vectors, from the hidden states of the served model: what the routes for embeddings share.

A text's vector is the mean of its tokens' last hidden states, or the last token's, scaled to length
one. Texts of several clients are computed in turns (`mlxserve.engine.text_queue`), each in pieces
between which running answers continue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from mlxserve.api.access.security import client_name
from mlxserve.api.bodies.fields import Prompt
from mlxserve.api.errors import from_engine, invalid_value
from mlxserve.api.prompts import Prompts
from mlxserve.api.server.retry_after import RetryAfter
from mlxserve.api.turns import refusal, unless_left
from mlxserve.api.warnings import warn
from mlxserve.errors import ClientQueueFull, MlxServeError, PromptTooLong, QueueFull
from mlxserve.request import Pooling

if TYPE_CHECKING:
    from mlxserve.chat.chat import Chat

MAX_TOKENS = 300_000  # of all texts of a request, as in OpenAI's API
MAX_WAITING, MAX_CLIENT_WAITING = 256, 64  # requests, of all clients and of one


class Vectors:
    """Those of one `Chat`."""

    def __init__(self, chat: Chat, prompts: Prompts) -> None:
        self._chat = chat
        self._prompts = prompts
        self._num_waiting: Counter[str] = Counter()  # requests of each client
        self._retry_after = RetryAfter()

    async def of_texts(
        self,
        request: Request,
        texts: Sequence[Prompt],
        *,
        pooling: Pooling = Pooling.MEAN,
        dimensions: int | None = None,
        field: str = "input",
        is_cut: bool = False,
    ) -> tuple[list[list[float]], int]:
        """(a vector of each text, their tokens). Raises ApiError, which names `field`, and
        ClientDisconnect.

        is_cut: what is longer than the context is cut with a warning, instead of being refused
        """
        if not texts:
            return [], 0
        tokens = await self._prompts.of_texts(request, texts, field)
        if is_cut and max(map(len, tokens)) > (context := self._chat.max_model_len):
            warn(request, f"{field}: cut to {context} tokens")
            tokens = [ids[:context] for ids in tokens]
        client = client_name(request)
        self._check(tokens, client, field)
        try:
            vectors = await unless_left(
                request, self._computed(tokens, pooling, dimensions, client)
            )
        except MlxServeError as error:
            raise from_engine(error, prompt_param=field) from error
        return vectors, sum(map(len, tokens))

    async def _computed(
        self,
        texts: Sequence[Sequence[int]],
        pooling: Pooling,
        dimensions: int | None,
        client: str,
    ) -> list[list[float]]:
        """Text by text. Raises what `Chat.embed` raises."""
        self._num_waiting[client] += 1
        try:
            return [
                await self._chat.embed(text, pooling=pooling, dimensions=dimensions, client=client)
                for text in texts
            ]
        finally:
            self._num_waiting[client] -= 1
            if not self._num_waiting[client]:
                del self._num_waiting[client]
            self._retry_after.ended()

    def _check(self, texts: Sequence[Sequence[int]], client: str, field: str) -> None:
        """Refuse what can be refused before anything is computed."""
        num_tokens = sum(map(len, texts))
        longest = max(map(len, texts))
        if longest > self._chat.max_model_len:
            too_long = PromptTooLong.for_embedding(longest, self._chat.max_model_len)
            raise from_engine(too_long, prompt_param=field)
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
