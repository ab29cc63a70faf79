"""EncoderEngine: an engine whose model is an `Encoder`, for whole requests of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxserve.chat.codec import TextCodec
from mlxserve.chat.embedding.encoder import Encoder, EncoderText
from mlxserve.chat.embedding.encoding import Encoding
from mlxserve.core.errors import InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from mlxserve.engine.async_engine import AsyncEngine
    from mlxserve.engine.engine import Engine


class EncoderEngine:
    """Computes texts in batches, in the client's turn."""

    def __init__(self, engine: AsyncEngine, codec: TextCodec) -> None:
        self._engine = engine
        self._codec = codec

    async def compute(
        self, texts: Sequence[EncoderText], *, dimensions: int | None = None, client: str = ""
    ) -> list[list[float]]:
        """Return the vector of each text, or from a cross-encoder a list with its score.

        Raises InvalidRequest, InvalidParameter, PromptTooLong, EngineStopped.
        """
        for text in texts:
            if not text.ids:
                raise InvalidRequest("input: it is empty; at least one token is needed")
            if len(text) > self._codec.max_model_len:
                raise PromptTooLong.for_embedding(len(text), self._codec.max_model_len)
            self._codec.check_ids(text.ids, "input")
        if not texts:
            return []

        def encoding(engine: Engine) -> Encoding:
            model = engine.side_work.model
            assert isinstance(model, Encoder)
            return Encoding(model, texts, dimensions)

        return await self._engine.compute(client, sum(map(len, texts)), encoding)
