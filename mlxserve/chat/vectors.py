"""Vectors of texts: the interface of all models that embed, and a language model's implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mlxserve.chat.codec import TextCodec
from mlxserve.chat.view import View
from mlxserve.core.errors import InvalidParameter, InvalidRequest, PromptTooLong
from mlxserve.request import Pooling

if TYPE_CHECKING:  # it imports mlx, which waits for machine.prepare()
    from mlxserve.engine.async_engine import AsyncEngine


class Vectors(Protocol):
    """Texts as vectors. Usable from any event loop."""

    def prompt_for(self, input_type: str | None) -> str:
        """Return the prompt before texts of a type. Raises InvalidParameter for an unknown type."""
        ...

    def cut(self, token_ids: Sequence[int]) -> list[int]:
        """Truncate token ids to the context."""
        ...

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        client: str = "",
    ) -> list[list[float]]:
        """Return the vector of each text, computed in the client's turn.

        pooling: None for the model's own
        dimensions: keep only the first components

        Raises InvalidRequest, InvalidParameter, PromptTooLong, EngineStopped.
        """
        ...


class LanguageVectors:
    """Vectors of length 1 from a language model's last hidden states."""

    def __init__(self, engine: AsyncEngine, codec: TextCodec, view: View) -> None:
        self._engine = engine
        self._codec = codec
        self._view = view

    def prompt_for(self, input_type: str | None) -> str:
        """Raises InvalidParameter for any type: language models have no such prompts."""
        if input_type is not None:
            raise InvalidParameter("input_type", "this model has no prompts; leave it out")
        return ""

    def cut(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids[: self._codec.max_model_len])

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        client: str = "",
    ) -> list[list[float]]:
        """Compute vectors in pieces between the steps of running answers.

        pooling: None for the mean
        """
        pooling = Pooling.MEAN if pooling is None else pooling
        return [await self._vector(text, pooling, dimensions, client) for text in texts]

    async def _vector(
        self, token_ids: Sequence[int], pooling: Pooling, dimensions: int | None, client: str
    ) -> list[float]:
        if not token_ids:
            raise InvalidRequest("input: it is empty; at least one token is needed")
        if len(token_ids) > self._codec.max_model_len:
            raise PromptTooLong.for_embedding(len(token_ids), self._codec.max_model_len)
        self._codec.check_ids(token_ids, "input")
        return await self._engine.embed(token_ids, pooling, dimensions, client, self._view.number)
