"""Syntax highlighting: which code is coloured, and that no code holds up the terminal."""

from __future__ import annotations

import signal
import time

import pytest
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from mlxserve.system.code_languages import LEXERS, NAMES, lexer_name
from tui.paint import syntax
from tui.paint.markdown import MarkdownStream
from tui.paint.painter import HIGHLIGHT_SIZE, Painter
from tui.paint.syntax import MAX_SECONDS, spans
from tui.paint.theme import palette

PALETTE = palette(dark=True)
# Bash's rule for $'…' reads two backslashes in two ways: 60 of them take years, in one call of `re`.
ENDLESS = "$'" + "\\" * 400


@pytest.fixture(autouse=True)
def no_slow_lexers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    slow: set[str] = set()
    monkeypatch.setattr(syntax, "slow_lexers", slow)
    return slow


def test_every_language_is_one_of_pygments() -> None:
    for name in LEXERS:
        assert get_lexer_by_name(name)


def test_a_name_is_that_of_the_lexer_that_pygments_has_for_it() -> None:
    others = {"jsonc", "json5"}  # Pygments has a lexer of its own for JSON5 alone
    for name in NAMES:
        try:
            found = get_lexer_by_name(name)
        except ClassNotFound:
            continue
        if name not in others:
            assert type(found) is type(get_lexer_by_name(lexer_name(name) or "")), name


def test_languages_have_no_case_and_others_are_plain() -> None:
    assert spans("x = 1", "Python", PALETTE) == spans("x = 1", "py", PALETTE) != []
    for language in ["html+ng2", "klingon", "", "text", "python3.11", "a" * 100_000]:
        assert spans("x = 1", language, PALETTE) == []


def test_spans_lie_in_the_code_one_after_the_other() -> None:
    code = 'def f(x):\n    return "a" + 1  # é'
    places = [(start, end) for _, start, end in spans(code, "python", PALETTE)]
    assert places == sorted(places)
    assert all(0 <= start < end <= len(code) for start, end in places)
    assert {code[start:end] for start, end in places} >= {"def", "f", "return", "1", "# é"}


def test_a_lexer_that_does_not_end_is_stopped_and_not_used_again(no_slow_lexers: set[str]) -> None:
    handler = signal.getsignal(signal.SIGVTALRM)
    began = time.process_time()
    assert spans(ENDLESS, "bash", PALETTE) == []
    assert time.process_time() - began < 10 * MAX_SECONDS
    assert no_slow_lexers == {"bash"}
    assert spans("echo 1 # comment", "sh", PALETTE) == []
    assert spans("x = 1", "python", PALETTE) != []
    assert signal.getsignal(signal.SIGVTALRM) is handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_an_error_of_a_lexer_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def get_tokens_unprocessed(self, _code: str) -> None:
            raise ZeroDivisionError

    monkeypatch.setattr(syntax, "get_lexer_by_name", lambda *_, **__: Broken())
    with pytest.raises(ZeroDivisionError):
        spans("x", "graphql", PALETTE)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_an_answer_with_hostile_code_is_painted() -> None:
    """As 20,000 brackets in html+ng2, which took 16 s, and what takes for ever in Bash."""
    for language, code in [("html+ng2", "(" * 20_000), ("bash", ENDLESS)]:
        answer = MarkdownStream.whole(f"```{language}\n{code}\n```\ndone", Painter(80, PALETTE))
        shown = "".join(answer.line(y).text for y in range(answer.num_lines))
        assert code[:50] in shown
        assert "done" in shown


def test_long_code_is_plain() -> None:
    assert HIGHLIGHT_SIZE <= 50_000, "more takes longer than MAX_SECONDS on a slow machine"
