"""Markdown as a tree of elements: what it knows, and that no text makes markup or takes long."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.testclient import TestClient

from mlxserve.api.app import create_app
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.page import rendering
from mlxserve.api.page.highlighting import Node
from mlxserve.api.page.markdown import MAX_MARKED, Markdown, code_elements, unmarked
from mlxserve.api.page.markdown_worker import MarkdownWorker
from mlxserve.api.page.rendering import MAX_CHARACTERS, MAX_TEXTS
from mlxserve.helpers.fair_executor import Lane, lane_of
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.work import RunsIn, Work
from tests.api.fake_chat import FakeChat

PATIENCE = 60.0  # seconds of a processor


def nodes(text: str) -> list[Any]:
    found = Markdown().nodes(text, PATIENCE)
    assert found is not None
    return found


def elements(found: list[Any]) -> Iterator[list[Any]]:
    for node in found:
        if isinstance(node, list):
            yield node
            yield from elements(node[2:])


def text_of(found: list[Any]) -> str:
    return "".join(node if isinstance(node, str) else text_of(node[2:]) for node in found)


def test_what_commonmark_knows() -> None:
    for text, expected in [
        ("# A *b* **c**", ["h1", {}, "A ", ["em", {}, "b"], " ", ["strong", {}, "c"]]),
        ("- a\n- b", ["ul", {}, ["li", {}, "a"], ["li", {}, "b"]]),
        ("3. a", ["ol", {"start": "3"}, ["li", {}, "a"]]),
        ("> a", ["blockquote", {}, ["p", {}, "a"]]),
        ("a\\\nb\nc", ["p", {}, "a", ["br", {}], "b", "\n", "c"]),
        ("---", ["hr", {}]),
        ("~~a~~ `b`", ["p", {}, ["s", {}, "a"], " ", ["code", {}, "b"]]),
        ("[a](https://b.c)", ["p", {}, ["a", {"href": "https://b.c"}, "a"]]),
        ("![a](https://b.c/d.png)", ["p", {}, ["a", {"href": "https://b.c/d.png"}, "a"]]),
        ("```\na <b>\n```", ["pre", {"language": ""}, "a <b>"]),
        ("    a", ["pre", {"language": ""}, "a"]),
    ]:
        assert nodes(text) == [expected], text


def test_a_table_has_its_alignment() -> None:
    [table] = nodes("| a | b |\n|:--|--:|\n| 1 | `x` |")
    assert table[2] == [
        "thead",
        {},
        ["tr", {}, ["th", {"class": "left"}, "a"], ["th", {"class": "right"}, "b"]],
    ]
    assert text_of([table]) == "ab1x"


def test_code_is_one_text_with_its_language() -> None:
    code = "def f(x):\n\n    return 1"
    assert nodes(f"```python\n{code}\n```") == [["pre", {"language": "python"}, code]]
    assert nodes("~~~a b\n~~~") == [["pre", {"language": "a"}, ""]]
    assert nodes(f"```{'a' * 50}\nb\n```") == [["pre", {"language": "a" * 40}, "b"]]


def test_elements_of_code_are_found_at_any_depth() -> None:
    found = nodes("```a\n1\n```\n- > ~~~b\n  > 2\n  > ~~~\n\n`c`\n\n    3")
    assert [element[2] for element in code_elements(found)] == ["1", "2", "3"]


def test_a_formula_is_mathml() -> None:
    for text in ["$x^2$", "\\(x^2\\)", "a $x^2$, b", "$$x^2$$", "\\[x^2\\]"]:
        made = [one for one in elements(nodes(text)) if one[0] == "math"]
        assert [one[2] for one in made] == [
            ["mrow", {}, ["msup", {}, ["mi", {}, "x"], ["mn", {}, "2"]]]
        ], text
        is_block = text[:2] in ("$$", "\\[")
        assert made[0][1]["display"] == ("block" if is_block else "inline"), text


def test_a_formula_of_several_lines_is_no_list() -> None:
    [math] = nodes("$$\na\n- b\n+ \\frac{1}{2}\n$$")
    assert math[0] == "math"
    assert "−" in text_of([math])
    assert "mfrac" in {one[0] for one in elements([math])}


def test_dollars_are_no_formulas() -> None:
    for text in ["$5 and $6", "cost: $5, $6", "a$ b$", "$ a $", "\\$a$", "$$", "$"]:
        assert "math" not in {one[0] for one in elements(nodes(text))}, text


@pytest.mark.parametrize(
    "text", ["$\\frac{$", "$x_1_2$", "$\\left($", "$" + "{" * 500 + "}" * 500 + "$"]
)
def test_what_cannot_be_converted_is_shown_as_it_is(text: str) -> None:
    assert nodes(text) == [["p", {}, ["code", {}, text]]]


def test_a_formula_keeps_no_link_and_no_style() -> None:
    found = nodes("$\\href{javascript:alert(1)}{x} \\style{color:red}{y} \\class{a}{z}$")
    assert text_of(found) == "xyz"
    assert {name for one in elements(found) for name in one[1]} == {"display"}


# ---- hostile texts

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a <b onclick='x'>b</b>",
    "&lt;script&gt;",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](&#106;avascript:alert(1))",
    "[a](data:text/html,x)",
    "[a](vbscript:x)",
    "[a](//evil.example)",
    "[a](/v1/models)",
    "[a](file:///etc/passwd)",
    "![a](data:image/png;base64,AAAA)",
    "<javascript:alert(1)>",
    "[a]: javascript:alert(1)\n\n[a]",
    "```html\n<script>alert(1)</script>\n```",
    "$\\text{<script>alert(1)</script>}$",
)
TAGS = frozenset(
    [
        "p",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "ul",
        "ol",
        "li",
        "blockquote",
        "br",
        "hr",
        "s",
        "em",
        "strong",
        "code",
        "pre",
        "span",
        "div",
        "a",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "math",
        "mrow",
        "mi",
        "mo",
        "mn",
        "msup",
        "msub",
        "msubsup",
        "mfrac",
        "msqrt",
        "mroot",
        "mtext",
        "mtable",
        "mtr",
        "mtd",
        "mstyle",
        "mover",
        "munder",
        "munderover",
        "mspace",
        "mpadded",
        "mphantom",
        "menclose",
        "mmultiscripts",
        "merror",
    ]
)


def assert_harmless(text: str) -> None:
    found = nodes(text)
    for one in elements(found):
        assert one[0] in TAGS
        assert not any(name.startswith("on") or name in ("src", "style", "id") for name in one[1])
        if "href" in one[1]:
            assert one[0] == "a"
            assert one[1]["href"].lower().startswith(("https://", "http://", "mailto:"))
    json.dumps(found)


def test_no_text_makes_markup_or_a_link_that_runs() -> None:
    for text in HOSTILE:
        assert_harmless(text)
        assert "a" not in {one[0] for one in elements(nodes(text))}, text


@given(st.lists(st.sampled_from([*HOSTILE, "$", "$$", "\\(", "`", "```", "|", "- ", "> ", "\n"])))
@settings(max_examples=50, deadline=None)
def test_no_mixture_of_them_does(parts: list[str]) -> None:
    assert_harmless("".join(parts))


def seconds_of(text: str) -> float:
    """Measure the parser with a limit of 0.02 s, in seconds of the processor, which other programs prolong."""
    began = time.thread_time()
    Markdown().nodes(text, 0.02)
    return time.thread_time() - began


@pytest.mark.parametrize("before", ["", "|a|\n|-|\n", "- ", "> "])
def test_a_text_that_takes_long_is_given_up(before: str) -> None:
    for piece in [
        "[",
        "![[",
        "[a](",
        "*a _b",
        "> ",
        "- ",
        "|a|b|\n|-|-|\n",
        "|\n",
        "a|b\n-|-\n",
        "\\(",
        "$a ",
        "$$\n",
        "~~a",
        "`a",
        "a\n",
        f"${'&' * 1900}$",
    ]:
        text = before + piece * (MAX_MARKED // len(piece) - 2)
        assert any(seconds_of(text) < 0.4 for _ in range(5)), "tables took 0.8 s, in their own loop"
        found = Markdown().nodes(text, 0.02)
        assert found is None or text_of(found).strip() or not text.strip("> -\n$`|a"), piece


def test_deep_nesting_ends() -> None:
    assert nodes("> " * 5_000 + "a")
    assert nodes("- " * 5_000 + "a")
    assert nodes("*" * 5_000 + "a" + "*" * 5_000)


def test_a_text_beyond_the_limit_is_plain() -> None:
    text = "*a* " * (MAX_MARKED // 4 + 1)
    assert nodes(text) == unmarked(text) == [["div", {"class": "plain"}, text]]


# ---- the route


def test_the_route_parses_several_texts(client: TestClient) -> None:
    reply = client.post("/api/v1/render", json={"texts": ["*a*", "", "b"]})
    assert reply.status_code == 200
    assert reply.json() == {"data": [[["p", {}, ["em", {}, "a"]]], [], [["p", {}, "b"]]]}


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    """The process of the route, in the place of the one that all servers of these tests share."""
    helper = Helper(f"{__name__}:Parser", name="Markdown", memory=256 << 20)
    monkeypatch.setattr(rendering, "TEXT_SECONDS", 0.5)
    monkeypatch.setattr(rendering, "markdown_helper", lambda: helper)
    yield helper
    helper.close()


class Parser(MarkdownWorker):
    """Never ends with the text `ENDLESS`, as a parser with a hole would."""

    def __init__(self) -> None:
        super().__init__(PATIENCE)

    def trees(
        self, texts: Sequence[str], seconds: float
    ) -> Generator[list[Node] | None, None, float]:
        used = 0.0
        for text in texts:
            while text == ENDLESS:
                pass
            used += yield from super().trees([text], seconds - used)
        return used


ENDLESS = "never"
MARKED = [["p", {}, ["em", {}, "a"]]]


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Lane, RunsIn]]:
    """Where the work of the route was done."""
    works: list[tuple[Lane, RunsIn]] = []

    async def noted(request: Request, work: Work[object]) -> object:
        works.append((lane_of(work.seconds), work.place))
        return await run_fairly(request, work)

    monkeypatch.setattr(rendering, "run_fairly", noted)
    return works


def test_usual_texts_are_short_work_of_another_process(
    parser: Helper, chat: FakeChat, works: list[tuple[Lane, RunsIn]]
) -> None:
    with TestClient(create_app(chat), base_url="http://127.0.0.1") as client:  # type: ignore[arg-type]
        client.post("/api/v1/render", json={"texts": ["*a*"]})
        works.clear()
        client.post("/api/v1/render", json={"texts": ["*a* `b` $c$\n"] * 20})
    assert parser.num_started == 1
    assert works == [(Lane.SHORT, RunsIn.PROCESS), (Lane.SHORT, RunsIn.THREAD)]


@pytest.mark.slow
def test_a_text_that_does_not_end_is_plain_and_the_others_are_not(
    parser: Helper, chat: FakeChat
) -> None:
    with TestClient(create_app(chat), base_url="http://127.0.0.1") as client:  # type: ignore[arg-type]
        reply = client.post("/api/v1/render", json={"texts": ["*a*", ENDLESS, "*a*"]})
    assert reply.json() == {"data": [MARKED, unmarked(ENDLESS), MARKED]}
    assert parser.num_started == 2


def test_what_is_left_when_the_time_is_over_is_plain() -> None:
    hard = "![" * 10_000
    assert list(MarkdownWorker(0.0).trees([hard, "*a*"], PATIENCE)) == [None, None]
    assert list(MarkdownWorker(PATIENCE).trees([hard, "*a*"], 0.0)) == [None], "the turn is over"


def test_the_route_refuses_what_is_no_list_of_bounded_texts(client: TestClient) -> None:
    for body in [
        {},
        {"texts": "a"},
        {"texts": [1]},
        {"texts": ["a"] * (MAX_TEXTS + 1)},
        {"texts": ["a" * MAX_CHARACTERS, "a"]},
    ]:
        reply = client.post("/api/v1/render", json=body)
        assert reply.status_code == 400, body
        assert reply.json()["error"]["param"].startswith("texts"), body
