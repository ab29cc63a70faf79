"""Every element that an answer can have is visible in windows of four widths, and no rule of the frame
reaches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.api.fake_chat import FakeChat
from tests.api.page.page_files import MARKDOWN_TAGS, MATH_TAGS
from tests.api.page.visits import Open, Visit
from tests.api.serving import StartServer

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytestmark = pytest.mark.slow

WIDTHS = (320, 390, 768, 1280)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
WITHOUT_BOX = ("br", "mspace")
INSIDE = {
    "li": ("ul",),
    "thead": ("table",),
    "tbody": ("table",),
    "tr": ("table", "tbody"),
    "td": ("table", "tbody", "tr"),
    "th": ("table", "thead", "tr"),
    "mtr": ("mtable",),
    "mtd": ("mtable", "mtr"),
}
NUM_CHILDREN = {
    "msup": 2,
    "msub": 2,
    "msubsup": 3,
    "mfrac": 2,
    "mroot": 2,
    "mover": 2,
    "munder": 2,
    "munderover": 3,
}
LEAVES = ("mi", "mo", "mn", "mtext")
LONG_WORD = "4,0960" * 20

# [element, what is wrong] of those in the text of messages, but for the bar above code.
HIDDEN = """(without) => {
  const clips = (value) => value === "hidden" || value === "clip";
  const wrong = (one) => {
    const box = one.getBoundingClientRect(), style = getComputedStyle(one);
    const least = one.localName === "hr" ? 0.5 : 3;
    if (box.width < least || box.height < least) return `${box.width} by ${box.height} pixels`;
    if (style.position !== "static" || style.clipPath !== "none" || style.opacity !== "1") return "taken out or cut";
    if (style.visibility !== "visible" && one.localName !== "mphantom" && !one.closest("mphantom")) return "hidden";
    for (let above = one.parentElement; above.id !== "log"; above = above.parentElement) {
      const outer = above.getBoundingClientRect(), { overflowX, overflowY } = getComputedStyle(above);
      if (overflowX === "auto" || overflowX === "scroll") return ""; // it can be scrolled to
      if (clips(overflowX) && (box.left < outer.left - 1 || box.right > outer.right + 1)) return "cut at a side";
      if (clips(overflowY) && (box.top < outer.top - 1 || box.bottom > outer.bottom + 1)) return "cut above or below";
    }
    const log = document.getElementById("log").getBoundingClientRect();
    return box.left < log.left - 1 || box.right > log.right + 1 ? "beside the window" : "";
  };
  return [...document.querySelectorAll(".body *")]
    .filter((one) => !one.closest(".head") && !without.includes(one.localName))
    .map((one) => [one.localName, wrong(one)]).filter(([, why]) => why);
}"""
# Selectors of the style sheet that match an element of a message's text and are not of such texts.
REACHING = """() => {
  const rules = (list) => [...list].flatMap((one) => one.selectorText ? [one] : rules(one.cssRules ?? []));
  const parts = [...document.styleSheets].flatMap((sheet) => rules(sheet.cssRules))
    .flatMap((rule) => rule.selectorText.split(/,(?![^(]*\\))/)).map((one) => one.trim());
  const texts = [...document.querySelectorAll(".body *")].filter((one) => !one.closest(".head"));
  return parts.filter((one) => !/\\.body\\b/.test(one) && !one.includes("::") && texts.some((text) => text.matches(one)));
}"""


def node(tag: str, text: str = "text") -> list[Any]:
    """An element of this kind with a text, in what it may stand in."""
    if tag in LEAVES or tag not in MATH_TAGS:
        made = [tag, {}, text] if tag not in ("br", "hr") else [tag, {}]
    else:
        made = [tag, {}, *[["mi", {}, text] for _ in range(NUM_CHILDREN.get(tag, 1))]]
    if tag == "mspace":
        made = [tag, {"width": "1em"}]
    for outer in reversed(INSIDE.get(tag, ())):
        made = [outer, {}, made]
    is_math = tag in MATH_TAGS and tag != "math"
    return ["p", {}, ["math", {"display": "block"}, made, ["mi", {}, text]]] if is_math else made


@pytest.fixture
def tree() -> list[Any]:
    every = [node(tag) for tag in (*MARKDOWN_TAGS, *MATH_TAGS)]
    wide = [node(tag, LONG_WORD) for tag in MARKDOWN_TAGS if tag not in ("br", "hr")]
    nested = ["blockquote", {}, ["ul", {}, ["li", {}, *[node(tag) for tag in MARKDOWN_TAGS]]]]
    return [*every, *wide, nested]


def shown(seen: Visit, nodes: list[Any]) -> None:
    """Each text of a stored chat has these blocks."""

    def fulfil(route: Route) -> None:
        texts = route.request.post_data_json["texts"]
        route.fulfill(json={"data": [nodes for _ in texts]})

    seen.page.route("**/api/v1/render", fulfil)
    seen.until("Ready")
    seen.ask("Show me")
    seen.wait_for_answers(1)
    seen.reload()


def test_every_element_of_an_answer_is_visible(
    chat: FakeChat, start_server: StartServer, visit: Open, tree: list[Any]
) -> None:
    with visit(start_server().url) as seen:
        page = seen.page
        shown(seen, tree)
        page.locator(".assistant h1").first.wait_for()
        tags = page.evaluate(
            "() => [...new Set([...document.querySelectorAll('.assistant .body *')].map((one) => one.localName))]"
        )
        assert {*MARKDOWN_TAGS, *MATH_TAGS} <= set(tags)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            if width < 900:
                page.evaluate("document.body.className = ''")
            assert page.evaluate(HIDDEN, WITHOUT_BOX) == [], width
            assert page.evaluate(OVERFLOW) == 0, width
        assert page.evaluate(REACHING) == ["*"], "the size of boxes"
        assert seen.errors == []


def test_what_hides_an_element_is_found(
    chat: FakeChat, start_server: StartServer, visit: Open, tree: list[Any]
) -> None:
    """As a rule of the frame did to titles in narrow windows."""
    with visit(start_server().url, bypass_csp=True) as seen:
        page = seen.page
        shown(seen, tree)
        page.locator(".assistant h1").first.wait_for()
        for tag in ("h1", "table", "code", "pre", "li"):
            rule = "position: absolute; width: 1px; height: 1px; overflow: hidden;"
            style = page.add_style_tag(content=f"{tag} {{ {rule} }}")
            assert tag in {name for name, _ in page.evaluate(HIDDEN, WITHOUT_BOX)}
            assert tag in page.evaluate(REACHING)
            style.evaluate("(one) => one.remove()")
        assert page.evaluate(HIDDEN, WITHOUT_BOX) == []


def test_words_of_a_table_are_not_broken(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    cells = [["td", {}, word] for word in ("40,960", "Context", "2.3", "mlx-community/Qwen3-4B")]
    table = ["table", {}, ["tbody", {}, *[["tr", {}, *cells * 3] for _ in range(2)]]]
    with visit(start_server().url, width=320) as seen:
        shown(seen, [table])
        seen.page.locator(".assistant td").first.wait_for()
        lines = seen.page.locator(".assistant td", has_text="40,960").first.evaluate(
            "(one) => { const range = document.createRange(); range.selectNodeContents(one); return range.getClientRects().length; }"
        )
        assert lines == 1
        box = ".assistant .table"
        assert seen.page.evaluate(
            f"() => {{ const one = document.querySelector('{box}'); return one.scrollWidth > one.clientWidth; }}"
        )
        assert seen.page.evaluate(OVERFLOW) == 0
