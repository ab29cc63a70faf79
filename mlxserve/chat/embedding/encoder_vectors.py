"""EncoderVectors: the vectors of an embedding model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxserve.chat.codec import TextCodec
from mlxserve.chat.embedding.encoder import EncoderText
from mlxserve.chat.embedding.encoder_engine import EncoderEngine
from mlxserve.core.errors import InvalidParameter
from mlxserve.hub.text_encoders import TextEncoder

if TYPE_CHECKING:
    from mlxserve.request import Pooling
    from mlxserve.text.tokenizer import Tokenizer


class EncoderVectors:
    """Texts as vectors, by the rules in the model's files."""

    def __init__(self, encoder: EncoderEngine, codec: TextCodec, rules: TextEncoder) -> None:
        self._encoder = encoder
        self._codec = codec
        self._rules = rules
        self._end = _marks_after(codec.tokenizer)

    def prompt_for(self, input_type: str | None) -> str:
        """The prompt before texts of a type: "query", "document" or another of the model's files."""
        if input_type is None:
            return self._rules.prompts.get(self._rules.default_prompt or "", "")
        if input_type not in self._rules.prompts:
            known = ", ".join(sorted(self._rules.prompts)[:20])
            raise InvalidParameter(
                "input_type",
                f"must be one of: {known}" if known else "this model has no prompts; leave it out",
            )
        return self._rules.prompts[input_type]

    def cut(self, token_ids: Sequence[int]) -> list[int]:
        """Truncate token ids to the context, keeping the special tokens at the end."""
        max_len = self._codec.max_model_len
        if len(token_ids) <= max_len:
            return list(token_ids)
        end = self._end if list(token_ids[len(token_ids) - len(self._end) :]) == self._end else []
        return [*token_ids[: max_len - len(end)], *end]

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        client: str = "",
    ) -> list[list[float]]:
        """Compute vectors in batches. Raises InvalidParameter for any pooling."""
        if pooling is not None:
            raise InvalidParameter("pooling", "this model's files say how it pools; leave it out")
        return await self._encoder.compute(
            [EncoderText(ids) for ids in texts], dimensions=dimensions, client=client
        )


def _marks_after(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the tokenizer appends to a text."""
    whole, plain = tokenizer.encode("a"), tokenizer.encode_plain("a")
    for end in range(len(plain), len(whole) + 1):
        if whole[end - len(plain) : end] == plain:
            return whole[end:]
    return []
