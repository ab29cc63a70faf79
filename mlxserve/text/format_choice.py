"""Chooses the format of a model's calls: the row that reads what the chat template itself writes.

own (response_template)  ─┐
candidates by words       ├─ reads the calls back? ── yes ──▶ this row
learnt from the template  │
all other rows           ─┘                        ── none ─▶ the first candidate by words
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

from mlxserve.text.call_probes import CallTexts, reads
from mlxserve.text.learnt_formats import learnt_formats
from mlxserve.text.parsing.formats import FORMATS, CallFormat
from mlxserve.text.parsing.markup import template_text
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
    # Some templates write numbers as texts.
    row = _reader(candidates, texts) or _reader(candidates, texts.as_texts())
    return FormatChoice(row or first, row is not None)


def _reader(candidates: Sequence[CallFormat], texts: CallTexts) -> CallFormat | None:
    # Templates also write the beginning of what follows a call.
    row = next((row for row in candidates if _reads(row, texts, is_strict=False)), None)
    return row or _best([row for row in _others(texts) if _reads(row, texts)], texts)


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


# ---- candidates by words


def candidates_of(wrapper: Any) -> tuple[CallFormat, ...]:
    """Return the formats of calls of a model, likeliest first, by its template's words and its tokens."""
    settings = wrapper.init_kwargs
    named = settings.get("chat_template_type") or settings.get("tool_parser_type")
    return recognise(template_text(wrapper), wrapper.get_vocab(), named)


def recognise(
    template: str, vocabulary: Container[str] = (), named: str | None = None
) -> tuple[CallFormat, ...]:
    """The formats of calls that a chat template may ask for, likeliest first.

    vocabulary: the texts of the tokens
    named: what a tokenizer's own settings say, taken where the template says nothing
    """
    template = template.replace("\\n", "\n")
    by_cue = [row for row in FORMATS if _has_cue(row, template)]
    by_name = [row for row in FORMATS if row.name == named]
    known = [row for row in FORMATS if _are_known(row.known, vocabulary)]
    return tuple(dict.fromkeys([*by_cue, *by_name, *known]))


def _has_cue(row: CallFormat, template: str) -> bool:
    return any(all(word in template for word in words) for words in row.cues)


def _are_known(tokens: tuple[str, ...], vocabulary: Container[str]) -> bool:
    return bool(tokens) and all(token in vocabulary for token in tokens)
