"""No regular expression of the product takes more than linear time on any text.

`re` holds the interpreter's lock while it matches: what is quadratic stops every client of the server.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from tests.expressions import expressions, expressions_of, matcher, superlinear, timed_as


@pytest.mark.slow
def test_every_expression_of_the_product_is_linear() -> None:
    found = list(expressions())
    assert len(found) > 100, "some are not found"
    matchers = {
        (one.pattern, timed_as(method)): (one, run)
        for one in found
        for method, run in one.matchers.items()
    }
    slow = {}
    for (pattern, method), (one, run) in matchers.items():
        if text := superlinear(run, pattern):
            slow[f"{one.name} in {method}"] = text
    assert slow == {}, "by (before, repeated, after)"


def test_expressions_are_found_wherever_they_are() -> None:
    source = """
import re
_A, flags = re.compile("a+b", re.IGNORECASE), re.DOTALL
_B = re.compile(rb"b")
class C:
    def __init__(self): self._c = re.compile(f"c{1}", flags=re.ASCII)
    def c(self, text): return self._c.fullmatch(text), list(map(_B.match, text)), _B.split(text)
    field: Annotated[str, Field(pattern="^d$")]
re.sub(r"e", "", "")
"""
    found = list(expressions_of(ast.parse(source), "tests.expressions"))
    assert {(one.pattern.pattern, tuple(one.matchers)) for one in found} == {
        ("a+b", ("findall", "finditer", "fullmatch", "match", "search", "split", "sub", "subn")),
        (b"b", ("match", "split")),
        ("c1", ("fullmatch",)),
        ("^d$", ("validate",)),
        ("e", ("sub",)),
    }
    assert next(one for one in found if one.pattern.pattern == "a+b").pattern.flags & re.I


def test_what_cannot_be_found_is_an_error() -> None:
    for source, message in [
        ("from re import compile", "import re as a module"),
        ("import re\ndef f(a): re.match(a, '')", "LOCALS needs examples"),
    ]:
        with pytest.raises(AssertionError, match=message):
            list(expressions_of(ast.parse(source), "tests.test_expressions"))


_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_PART = rf"({_NUMBER})(ns|us|µs|ms|s|m|h)"
QUADRATIC: list[tuple[Any, str, re.RegexFlag]] = [
    # `keep_alive` as it was: 10.5 s for 20,000 digits
    (rf"([-+]?)(?:({_NUMBER})|((?:{_PART})+))", "fullmatch", re.ASCII),
    # trailing white space, which stopped Stack Overflow in 2016
    (r"^[\s\u200c]+|[\s\u200c]+$", "sub", re.NOFLAG),
    (r"<!--.*?-->", "findall", re.DOTALL),
    (r'"(?:[^"\\]|\\.)*"', "finditer", re.NOFLAG),
    (r"(.*)-\d{5}-of-(\d{5})", "search", re.NOFLAG),
    (r"(?:^|[-._])((?:I?Q|TQ)\d\w*|F32)$", "search", re.IGNORECASE),
    (r"^(-?)0+(?=\d+$)", "sub", re.NOFLAG),
    (r'name="([^\n]+?)\s*', "fullmatch", re.NOFLAG),
    (rb"not in model: *\n?\s*(wte|h)\.", "search", re.NOFLAG),
    (r".*.*=.*", "match", re.NOFLAG),
]
EXPONENTIAL = [r"(a+)+$", r"(?:a|ab|b)*c", r"([a-z0-9]+[._-]?)+@", r"(?:x+x+)+y"]
LINEAR = [
    (r"[^,]*+,", "match"),
    (r"\w+", "findall"),
    (r"(?s:.*)x", "fullmatch"),
    (r"(?<![ \t])[ \t]*+//.*", "sub"),
    (r"(\d++(?:\.\d*+)?|\.\d++)(ms|s)", "match"),
    (r"\s\w{0,30}$", "search"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "method", "flags"), QUADRATIC)
def test_an_expression_of_quadratic_time_is_found(
    source: Any, method: str, flags: re.RegexFlag
) -> None:
    pattern = re.compile(source, flags)
    assert superlinear(matcher(pattern, method), pattern)


@pytest.mark.slow
@pytest.mark.parametrize("source", EXPONENTIAL)
def test_an_expression_of_exponential_time_is_found_before_it_runs_for_ever(source: str) -> None:
    pattern = re.compile(source)
    assert superlinear(matcher(pattern, "match"), pattern)


@pytest.mark.parametrize(("source", "method"), LINEAR)
def test_an_expression_of_linear_time_is_not(source: str, method: str) -> None:
    pattern = re.compile(source)
    assert superlinear(matcher(pattern, method), pattern) is None
