"""Long pastes, shown in the composer as one mark each: `[pasted 120 lines]`."""

from __future__ import annotations

import re
from collections import Counter

MAX_LINES, MAX_CHARACTERS = 10, 1_000  # bounds of a paste that is shown as it is
_KEPT = 20  # pastes, the newest


class Pastes:
    """Pasted texts by their marks."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._numbers = Counter[str]()  # numbers of marks, which are never used again

    def fold(self, text: str) -> str:
        """Return the mark of a pasted text; a short one is its own mark."""
        num_lines = text.count("\n") + 1
        if num_lines <= MAX_LINES and len(text) <= MAX_CHARACTERS:
            return text
        for mark, known in self._texts.items():
            if known == text:
                return mark
        what = f"{num_lines:,} lines" if num_lines > 1 else f"{len(text):,} characters"
        self._numbers[what] += 1
        number = self._numbers[what]
        mark = f"[pasted {what}]" if number == 1 else f"[pasted {what}, {number}]"
        while len(self._texts) >= _KEPT:
            del self._texts[next(iter(self._texts))]
        self._texts[mark] = text
        return mark

    def folded(self, text: str) -> str:
        """Replace every paste by its mark."""
        for mark, pasted in self._texts.items():
            text = text.replace(pasted, mark)
        return text

    def unfolded(self, text: str) -> str:
        """Replace every mark by its paste."""
        if not self._texts:
            return text
        marks = "|".join(map(re.escape, self._texts))
        return re.sub(marks, lambda match: self._texts[match[0]], text)

    def mark_before(self, text: str) -> str:
        """The mark with which a text ends; empty if there is none."""
        return next((mark for mark in self._texts if text.endswith(mark)), "")

    def mark_after(self, text: str) -> str:
        """The mark with which a text begins; empty if there is none."""
        return next((mark for mark in self._texts if text.startswith(mark)), "")
