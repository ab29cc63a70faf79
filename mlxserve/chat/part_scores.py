"""PartScores: how well the parts of documents match a question, by an embedding model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from mlxserve.core.errors import InvalidParameter, MlxServeError
from mlxserve.helpers.work import RunFairly, RunsIn, Work
from mlxserve.system.owned_cache import OwnedCache
from mlxserve.text.costs import encode_seconds

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

log = logging.getLogger("mlxserve.documents")

MAX_PARTS = 1_000  # of all documents of a request: more take too long before the first token
_MAX_KEPT = 8 << 20  # numbers of all vectors that are kept
_PRODUCTS_PER_SECOND = 10_000_000


class PartScores:
    """Compares texts by the cosine of their vectors. Vectors of parts are kept for each API key."""

    def __init__(self) -> None:
        self._kept = OwnedCache[bytes, list[float]](_MAX_KEPT, len)

    async def compare(
        self,
        model: TextModel,
        parts: Sequence[str],
        question: str,
        run_fairly: RunFairly,
        *,
        owner: str = "",
        client: str = "",
    ) -> list[float] | None:
        """Return the similarity of each part to the question; None if the model cannot tell.

        owner: id of the API key that sent the parts
        client: whose turn the vectors take in the model's engine
        """
        if not question.strip() or len(parts) > MAX_PARTS:
            return None
        keys = [_key(model.model_name, part) for part in parts]
        kept = {key: self._kept.get(owner, key) for key in keys}
        texts = {key: part for key, part in zip(keys, parts, strict=True) if kept[key] is None}
        try:
            asked, *vectors = await self._vectors(
                model, [question, *texts.values()], run_fairly, client
            )
        except MlxServeError as error:
            log.info("Parts of documents are chosen by their words: %s", error)
            return None
        new = dict(zip(texts, vectors, strict=True))
        for key, vector in new.items():
            self._kept.put(owner, key, vector)
        known = [kept[key] or new[key] for key in keys]
        comparing: Work[list[float]] = Work(
            len(known) * len(asked) / _PRODUCTS_PER_SECOND, partial(_products, asked, known)
        )
        return await run_fairly(comparing)

    async def _vectors(
        self, model: TextModel, texts: Sequence[str], run_fairly: RunFairly, client: str
    ) -> list[list[float]]:
        """Return the vectors of a question and of parts, of length one."""
        vectors = model.require_vectors()
        before = [_prompt(model, "query"), *[_prompt(model, "document")] * (len(texts) - 1)]
        limit = model.codec.max_characters
        whole = [(a + b)[:limit] for a, b in zip(before, texts, strict=True)]

        def encode() -> list[list[int]]:
            return [vectors.cut(model.codec.encode(text)) for text in whole]

        seconds = encode_seconds(sum(map(len, whole)))
        encoding: Work[list[list[int]]] = Work(seconds, encode, RunsIn.PROCESS)
        ids = await run_fairly(encoding)
        return [_unit(vector) for vector in await vectors.embed(ids, client=client)]


def _prompt(model: TextModel, kind: str) -> str:
    try:
        return model.require_vectors().prompt_for(kind)
    except InvalidParameter:
        # Most models have no such prompts.
        return ""


def _key(model_name: str, text: str) -> bytes:
    whole = model_name.encode() + b"\0" + text.encode(errors="replace")
    return blake2b(whole, digest_size=16).digest()


def _unit(vector: Sequence[float]) -> list[float]:
    length = max(sum(value * value for value in vector) ** 0.5, 1e-12)
    return [value / length for value in vector]


def _products(one: Sequence[float], others: Sequence[Sequence[float]]) -> list[float]:
    return [sum(a * b for a, b in zip(one, other, strict=True)) for other in others]
