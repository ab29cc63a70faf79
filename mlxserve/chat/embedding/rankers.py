"""Rankers of documents for a query, by kind of model.

VectorRanker    cosine between vectors             an embedding model
PairRanker      score of each pair                 a cross-encoder
JudgeRanker     probability of the answer "yes"    a language model trained as a reranker
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mlxserve.chat.codec import TextCodec
from mlxserve.chat.embedding.encoder import EncoderText
from mlxserve.chat.embedding.encoder_engine import EncoderEngine
from mlxserve.chat.embedding.encoder_vectors import EncoderVectors
from mlxserve.chat.embedding.judging import Judging
from mlxserve.core.errors import InvalidParameter, InvalidRequest

_PAIR = "query", "document"  # names of prompts, as sentence-transformers gives them


class VectorRanker:
    """Ranks by cosine. The query is the first text."""

    def __init__(
        self,
        encoder: EncoderEngine,
        codec: TextCodec,
        vectors: EncoderVectors,
        prompts: Mapping[str, str],
    ) -> None:
        """prompts: the prompts that the model expects before texts, by type."""
        self._encoder = encoder
        self._codec = codec
        self._vectors = vectors
        self._before = [prompts.get(name, "") for name in _PAIR]

    def prepare(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> tuple[list[EncoderText], int]:
        _refuse_instruction(instruction)
        max_characters, max_len = self._codec.max_characters, self._codec.max_model_len
        before_query, before_document = self._before
        texts = [
            before_query + query,
            *(before_document + text[:max_characters] for text in documents),
        ]
        ids = [self._codec.encode(text[:max_characters]) for text in texts]
        num_cut = sum(len(text) > max_len for text in ids)
        return [EncoderText(self._vectors.cut(text)) for text in ids], num_cut

    async def rank(self, texts: Sequence[EncoderText], *, client: str = "") -> list[float]:
        """Return the cosine between the query's vector and each document's."""
        vectors = await self._encoder.compute(texts, client=client)
        query, *documents = map(_unit, vectors)
        return [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in documents]


class PairRanker:
    """Ranks by a cross-encoder's score. Each text holds the query and a document."""

    def __init__(self, encoder: EncoderEngine, codec: TextCodec) -> None:
        self._encoder = encoder
        self._codec = codec

    def prepare(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> tuple[list[EncoderText], int]:
        _refuse_instruction(instruction)
        max_characters = self._codec.max_characters
        pairs = [self._pair(query, document[:max_characters]) for document in documents]
        return [text for text, _ in pairs], sum(is_cut for _, is_cut in pairs)

    def _pair(self, query: str, document: str) -> tuple[EncoderText, bool]:
        """Encode a pair, cutting the document to fit; True if it was cut.

        Raises InvalidRequest if the query leaves no room for a document.
        """
        ids, types, second = self._codec.tokenizer.encode_pair(query, document)
        max_len = self._codec.max_model_len
        excess = len(ids) - max_len
        if excess > 0:
            if excess >= len(second):
                raise InvalidRequest(
                    f"query: it has more tokens than the {max_len} of this model's context, beside which no "
                    "document fits"
                )
            dropped = frozenset(second[-excess:])
            kept = [number for number in range(len(ids)) if number not in dropped]
            ids, types = [ids[number] for number in kept], [types[number] for number in kept]
        return EncoderText(ids, types.index(1) if 1 in types else None), excess > 0

    async def rank(self, texts: Sequence[EncoderText], *, client: str = "") -> list[float]:
        """Return the model's score of each pair."""
        return await _scores(self._encoder, texts, client)


class JudgeRanker:
    """Ranks by judgement. Each text asks whether a document answers the query."""

    def __init__(self, encoder: EncoderEngine, codec: TextCodec) -> None:
        self._encoder = encoder
        self._codec = codec
        self._judging = Judging(codec.tokenizer)

    def prepare(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> tuple[list[EncoderText], int]:
        max_characters, max_len = self._codec.max_characters, self._codec.max_model_len
        prompts = [
            self._judging.prompt(query, document[:max_characters], instruction, max_len)
            for document in documents
        ]
        return [EncoderText(ids) for ids, _ in prompts], sum(is_cut for _, is_cut in prompts)

    async def rank(self, texts: Sequence[EncoderText], *, client: str = "") -> list[float]:
        """Return the probability of "yes" for each document."""
        return await _scores(self._encoder, texts, client)


async def _scores(encoder: EncoderEngine, texts: Sequence[EncoderText], client: str) -> list[float]:
    return [score for [score] in await encoder.compute(texts, client=client)]


def _refuse_instruction(instruction: str | None) -> None:
    if instruction is not None:
        raise InvalidParameter("instruction", "this model reads none; leave it out")


def _unit(vector: Iterable[float]) -> list[float]:
    values = list(vector)
    length = max(sum(value * value for value in values) ** 0.5, 1e-12)
    return [value / length for value in values]
