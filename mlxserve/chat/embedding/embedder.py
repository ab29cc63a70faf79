"""Embedder: the Chat of a model that embeds or ranks texts. What would write an answer is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mlxserve.chat.chat import Chat
from mlxserve.chat.embedding.encoder import Encoder, EncoderText
from mlxserve.chat.embedding.encoding import Encoding
from mlxserve.chat.embedding.judging import Judging
from mlxserve.core.errors import InvalidParameter, InvalidRequest, PromptTooLong
from mlxserve.hub.text_encoders import TextEncoder

if TYPE_CHECKING:
    from mlxserve.engine.async_engine import AsyncEngine
    from mlxserve.engine.engine import Engine
    from mlxserve.request import Pooling
    from mlxserve.text.tokenizer import Tokenizer

_PAIR = "query", "document"  # names of prompts, as sentence-transformers gives them


class Embedder(Chat):
    """Over an engine whose model is an `Encoder`. Methods may be called from any event loop."""

    can_write = False
    can_rank = True

    def __init__(
        self, engine: AsyncEngine, tokenizer: Tokenizer, rules: TextEncoder, **options: Any
    ) -> None:
        """`options`: as Chat's."""
        super().__init__(engine, tokenizer, **options)
        self.can_embed = not rules.is_reranker
        self._rules = rules
        self._judging = Judging(tokenizer) if rules.judges else None
        self._end = _marks_after(tokenizer)

    def prompt_of(self, input_type: str | None) -> str:
        """What the model wants before texts of a type: "query", "document" or another that its files name."""
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
        """The first tokens that fit, with the marks at the end."""
        most = self.max_model_len
        if len(token_ids) <= most:
            return list(token_ids)
        end = self._end if list(token_ids[len(token_ids) - len(self._end) :]) == self._end else []
        return [*token_ids[: most - len(end)], *end]

    # ---- vectors

    async def embed(
        self,
        token_ids: Sequence[int],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        client: str = "",
    ) -> list[float]:
        """A text as a vector, as the model's files say. Raises what `embed_all` raises."""
        [vector] = await self.embed_all(
            [token_ids], pooling=pooling, dimensions=dimensions, client=client
        )
        return vector

    async def embed_all(
        self,
        texts: Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        client: str = "",
    ) -> list[list[float]]:
        """A vector of each text, computed in batches.

        Raises InvalidRequest, InvalidParameter, PromptTooLong, EngineStopped.
        """
        if not self.can_embed:
            raise InvalidRequest(
                f"{self.model_name} is a reranker, which ranks documents (/v1/rerank) and makes no vectors. Name "
                "an embedding model."
            )
        if pooling is not None:
            raise InvalidParameter("pooling", "this model's files say how it pools; leave it out")
        return await self._computed([EncoderText(ids) for ids in texts], dimensions, client)

    async def _computed(
        self, texts: Sequence[EncoderText], dimensions: int | None, client: str
    ) -> list[list[float]]:
        for text in texts:
            if not text.ids:
                raise InvalidRequest("input: it is empty; at least one token is needed")
            if len(text) > self.max_model_len:
                raise PromptTooLong.for_embedding(len(text), self.max_model_len)
            self._check_ids(text.ids, "input")
        if not texts:
            return []

        def encoding(engine: Engine) -> Encoding:
            assert isinstance(engine.model, Encoder)
            return Encoding(engine.model, texts, dimensions)

        return await self.engine.compute(client, sum(map(len, texts)), encoding)

    # ---- ranks

    def rank_texts(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> tuple[list[EncoderText], int]:
        """What `rank` takes, and how many documents were cut to fit. Of an embedding model the query is the
        first; of a reranker each has the query and a document.

        instruction: what makes a document relevant, for a model that reads one; None for its usual one
        Raises InvalidRequest, InvalidParameter.
        """
        documents = [text[: self.most_characters] for text in documents]
        if self._judging is not None:
            most = self.max_model_len
            asked = [self._judging.prompt(query, one, instruction, most) for one in documents]
            return [EncoderText(ids) for ids, _ in asked], sum(is_cut for _, is_cut in asked)
        if instruction is not None:
            raise InvalidParameter("instruction", "this model reads none; leave it out")
        if self.can_embed:
            before = [self._rules.prompts.get(name, "") for name in _PAIR]
            every = [before[0] + query, *(before[1] + text for text in documents)]
            ids = [self.encode(text[: self.most_characters]) for text in every]
            num_cut = sum(len(one) > self.max_model_len for one in ids)
            return [EncoderText(self.cut(one)) for one in ids], num_cut
        pairs = [self._pair(query, document) for document in documents]
        return [text for text, _ in pairs], sum(is_cut for _, is_cut in pairs)

    def _pair(self, query: str, document: str) -> tuple[EncoderText, bool]:
        """The document is cut where both do not fit. Raises InvalidRequest where the query alone does not."""
        ids, types, second = self._tokenizer.encode_pair(query, document)
        excess = len(ids) - self.max_model_len
        if excess > 0:
            if excess >= len(second):
                raise InvalidRequest(
                    f"query: it has more tokens than the {self.max_model_len} of this model's context, beside "
                    "which no document fits"
                )
            dropped = frozenset(second[-excess:])
            kept = [number for number in range(len(ids)) if number not in dropped]
            ids, types = [ids[number] for number in kept], [types[number] for number in kept]
        return EncoderText(ids, types.index(1) if 1 in types else None), excess > 0

    async def rank(self, texts: Sequence[EncoderText], *, client: str = "") -> list[float]:
        """How relevant each document is: a cross-encoder's score, or the cosine between the vectors."""
        found = await self._computed(texts, None, client)
        if not self.can_embed:
            return [score for [score] in found]
        query, *documents = map(_unit, found)
        return [sum(a * b for a, b in zip(query, one, strict=True)) for one in documents]


def _marks_after(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts after a text."""
    whole, plain = tokenizer.encode("a"), tokenizer.encode_plain("a")
    for end in range(len(plain), len(whole) + 1):
        if whole[end - len(plain) : end] == plain:
            return whole[end:]
    return []


def _unit(vector: Iterable[float]) -> list[float]:
    values = list(vector)
    length = max(sum(value * value for value in values) ** 0.5, 1e-12)
    return [value / length for value in values]
