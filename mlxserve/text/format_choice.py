"""Chooses the format of a model's calls: the row that reads what the chat template itself writes.

own (response_template)  ─┐
candidates by words       ├─ reads the calls back? ── yes ──▶ this row
learnt from the template  │
all other rows           ─┘                        ── none ─▶ the first candidate by words
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mlxserve.text.call_probes import CallTexts, reads
from mlxserve.text.learnt_formats import learnt_formats
from mlxserve.text.parsing.formats import FORMATS, CallFormat
from mlxserve.text.parsing.markup import candidates_of
from mlxserve.text.response_template import format_in


class FormatChoice(NamedTuple):
    """A format of calls, or None if none is known.

    reads_back: it reads the calls that the template writes; None for a template that shows none
    """

    row: CallFormat | None
    reads_back: bool | None = None


def choose_format(wrapper: Any, texts: CallTexts | None) -> FormatChoice:
    """Choose the format of the model whose tokenizer mlx-lm has wrapped.

    texts: what its template writes for known calls; None if it shows none
    """
    own = format_in(getattr(wrapper, "response_template", None))
    candidates = [*([own] if own is not None else ()), *candidates_of(wrapper)]
    return choose_among(candidates, texts)


def choose_among(candidates: Sequence[CallFormat], texts: CallTexts | None) -> FormatChoice:
    first = next(iter(candidates), None)
    if texts is None:
        return FormatChoice(first)
    # Templates also write the beginning of what follows a call.
    row = next((row for row in candidates if _reads(row, texts, is_strict=False)), None)
    row = row or _best([row for row in _others(texts) if _reads(row, texts)], texts)
    return FormatChoice(row or first, row is not None)


def _others(texts: CallTexts) -> Iterator[CallFormat]:
    """Learnt formats first, as they have the markers of the template."""
    yield from learnt_formats(texts)
    yield from FORMATS


def _reads(row: CallFormat, texts: CallTexts, *, is_strict: bool = True) -> bool:
    two = [] if texts.two is None else [texts.two]
    return all(reads(row, text, is_strict=is_strict) for text in (texts.one, *two))


def _best(rows: Sequence[CallFormat], texts: CallTexts) -> CallFormat | None:
    """The row that reads most of the values that are hard to write; the first of several."""

    def num_read(row: CallFormat) -> int:
        return sum(reads(row, text, is_strict=False) for text in texts.hard)

    return max(rows, key=num_read, default=None)
