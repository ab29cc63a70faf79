"""Chooses the parts of a document that a question is about, by its words (BM25) if nothing better is known.

Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence

_K1, _B = 1.2, 0.75  # how a word's repetitions, and the length of a part, count
_WORD = re.compile(r"\w+")
# Endings that a question's word may lack, of which enough must be left; rules of English do little harm elsewhere.
_ENDINGS, _MIN_STEM = ("ing", "ed", "es", "s"), 3
_FIRST_IDEOGRAPH = "\u2e80"  # scripts from here on write words without spaces between them


def chosen_parts(
    parts: Sequence[str],
    sizes: Sequence[int],
    question: str,
    budget: int,
    first: Container[int] = (),
    scores: Sequence[float] | None = None,
) -> list[int]:
    """Return indices of the parts that match a question best, in the order of the document.

    sizes: of the parts in tokens; together at most `budget` are chosen
    first: parts that are taken before all others
    scores: how well each part matches; None to compare words

    Parts that match equally are taken from the beginning.
    """
    scores = _scores(parts, question) if scores is None else scores
    left, chosen = budget, []
    ranked = sorted(range(len(parts)), key=lambda at: (at not in first, -scores[at], at))
    for index in ranked:
        if sizes[index] <= left:
            left -= sizes[index]
            chosen.append(index)
    return sorted(chosen)


def _scores(parts: Sequence[str], question: str) -> list[float]:
    asked = set(_words(question))
    counts = [Counter(word for word in _words(part) if word in asked) for part in parts]
    lengths = [len(part) for part in parts]
    mean = sum(lengths) / max(1, len(lengths)) or 1.0
    weights = {word: _weight(sum(word in count for count in counts), len(parts)) for word in asked}
    return [
        sum(
            weights[word] * number * (_K1 + 1) / (number + _K1 * (1 - _B + _B * length / mean))
            for word, number in count.items()
        )
        for count, length in zip(counts, lengths, strict=True)
    ]


def _weight(num_with: int, num_parts: int) -> float:
    return math.log(1 + (num_parts - num_with + 0.5) / (num_with + 0.5))


def _words(text: str) -> Iterator[str]:
    """Words in lower case; of scripts without spaces, pairs of characters."""
    for match in _WORD.finditer(text.lower()):
        word = match[0]
        if word[0] < _FIRST_IDEOGRAPH or len(word) < 2:
            yield _stem(word)
        else:
            yield from (word[at : at + 2] for at in range(len(word) - 1))


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _MIN_STEM:
            return word.removesuffix(ending)
    return word
