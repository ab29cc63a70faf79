"""Encoding: computes a request's texts in batches of similar length, between other requests' batches."""

from __future__ import annotations

from collections.abc import Sequence

from metal_kernels.reading import read
from mlxserve.chat.embedding.encoder import Encoder, EncoderText
from mlxserve.core.errors import InvalidParameter
from mlxserve.model.dense_text import TextWork

BATCH_TOKENS = 2048  # with padding, of all texts of a batch; a longer text is one of its own


class Encoding(TextWork[list[list[float]]]):
    """The vectors of texts, in their order; from a cross-encoder lists of one score."""

    def __init__(
        self, encoder: Encoder, texts: Sequence[EncoderText], dimensions: int | None = None
    ) -> None:
        """dimensions: keep only the first components; None keeps all."""
        self._encoder: Encoder | None = encoder
        self._texts = texts
        self._dimensions = dimensions
        self._left = batches([len(text) for text in texts])
        self._results: list[list[float]] = [[] for _ in texts]

    def advance(self, _num_tokens: int) -> list[list[float]] | None:
        """Compute a batch, of any number of tokens; no answers run beside it in its engine.

        Raises InvalidParameter for more dimensions than the model has, and DeviceError.
        """
        assert self._encoder is not None, "not after `release`"
        numbers = self._left.pop()
        texts = [self._texts[number] for number in numbers]
        for number, values in zip(numbers, self._computed(self._encoder, texts), strict=True):
            self._results[number] = values
        self.num_done += sum(map(len, texts))
        return None if self._left else self._results

    def _computed(self, encoder: Encoder, texts: Sequence[EncoderText]) -> list[list[float]]:
        if encoder.rules.is_reranker:
            scores: list[float] = read(encoder.scores(texts)).tolist()
            return [[score] for score in scores]
        vectors: list[list[float]] = read(encoder.vectors(texts, self._dimensions)).tolist()
        if self._dimensions is not None and len(vectors[0]) < self._dimensions:
            raise InvalidParameter("dimensions", f"this model's vectors have {len(vectors[0])}")
        return vectors

    def release(self) -> None:
        self._encoder = None


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices of texts into batches. `pop` returns the batch with the longest texts first."""
    grouped: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        last = grouped[-1] if grouped else []
        if last and (len(last) + 1) * lengths[number] <= BATCH_TOKENS:
            last.append(number)
        else:
            grouped.append([number])
    return grouped
