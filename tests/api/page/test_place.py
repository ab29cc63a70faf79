"""Where the reader is in a chat: a redraw moves neither the text nor a selection nor the focus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxserve.history.messages import Role
from mlxserve.history.store import Store
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.page.visits import Open, Visit
from tests.api.serving import StartServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LONG = "\n\n".join(
    f"Paragraph **{number}** of an answer that is longer than the window." for number in range(60)
)
END = Delta("", (), (), FinishReason.STOP, Usage(5, 9, 0))
FROM_END = "log.scrollHeight - log.scrollTop - log.clientHeight"
# The paragraph at the top of the box, and where it stands.
PLACE = """() => {
  const log = document.getElementById("log"), top = log.getBoundingClientRect().top;
  const seen = [...log.querySelectorAll(".body p")].find((one) => one.getBoundingClientRect().bottom > top);
  return [seen.textContent, Math.round(seen.getBoundingClientRect().top - top)];
}"""


# The words that are marked: where they are in the box, the box's end, and what they are.
MARKED = """() => {
  const [range] = CSS.highlights.get("hit"), log = document.getElementById("log").getBoundingClientRect();
  return [range.getBoundingClientRect().top - log.top, log.height, range.toString()];
}"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for the chats of each test."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def wide(chat: FakeChat) -> None:
    chat.max_model_len = 100_000


def from_end(seen: Visit) -> float:
    return float(
        seen.page.evaluate(
            f"() => {{ const log = document.getElementById('log'); return {FROM_END}; }}"
        )
    )


def place(seen: Visit) -> Any:
    return seen.page.evaluate(PLACE)


def scroll_to(seen: Visit, paragraph: str) -> Any:
    """Where the reader is then."""
    seen.page.locator(".body p", has_text=paragraph).first.evaluate(
        "(one) => { document.getElementById('log').scrollTop += one.getBoundingClientRect().top - 100; }"
    )
    seen.page.evaluate("() => new Promise(requestAnimationFrame)")
    return place(seen)


def answered(seen: Visit, chat: FakeChat, question: str = "long") -> None:
    """With a long answer, of which the marks are drawn."""
    count = seen.page.locator(".assistant").count()
    chat.script = [Delta(LONG, (65,)), END]
    seen.ask(question)
    seen.wait_for_answers(count + 1)
    seen.page.locator(".assistant").last.locator("strong", has_text="59").wait_for()
    seen.page.wait_for_function("() => !document.querySelector('.rest, .assistant .plain')")


def test_a_reader_stays_while_an_answer_grows_and_ends(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.script = [Delta(LONG, (65,)), HOLD, Delta("\n\n" + LONG, (65,)), HOLD, END]
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.page.locator(".assistant strong", has_text="59").wait_for()
        assert from_end(seen) <= 1, "what grows is followed"
        before = scroll_to(seen, "Paragraph 20 ")
        chat.release()
        seen.wait_for_answers(1)
        seen.page.wait_for_function(
            "() => document.querySelectorAll('.assistant p').length === 120"
        )
        assert place(seen) == before
        assert from_end(seen) > 1_000


def test_a_reader_at_the_end_follows_an_answer_to_its_end(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.script = [Delta("Begun\n\n", (65,)), HOLD, Delta(LONG, (65,)), END]
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.until_text(".assistant .body", "Begun")
        chat.release()
        seen.wait_for_answers(1)
        seen.page.locator(".assistant strong", has_text="59").wait_for()
        assert from_end(seen) <= 1


def test_only_sending_moves_to_the_end(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        answered(seen, chat)
        chat.hold_again()
        chat.script = [Delta("Begun", (65,)), HOLD, Delta(" ended", (65,)), END]
        scroll_to(seen, "Paragraph 20 ")
        seen.ask("two")
        seen.until_text(".assistant .body", "Begun")
        assert from_end(seen) <= 1, "sent"
        before = scroll_to(seen, "Paragraph 20 ")
        seen.ask("three")
        seen.until_text("#queue", "three")
        chat.release()
        seen.wait_for_answers(3)
        assert place(seen) == before, "what waited is sent in its turn"


Act = Callable[[Visit, FakeChat], None]


def another_width(seen: Visit, _chat: FakeChat) -> None:
    seen.page.click("#engine-toggle")
    seen.page.wait_for_function("() => !document.body.classList.contains('with-engine')")


def another_window(seen: Visit, _chat: FakeChat) -> None:
    seen.page.set_viewport_size({"width": 700, "height": 500})
    seen.page.wait_for_function("() => innerWidth === 700")


def a_long_draft(seen: Visit, _chat: FakeChat) -> None:
    seen.page.fill("#text", "line\n" * 12)


def another_context(seen: Visit, chat: FakeChat) -> None:
    """The server is asked again once the engine's events end, and the page is drawn for what it says."""
    chat.max_model_len = 90_000
    chat.is_closed = True
    seen.is_alone = True
    seen.page.wait_for_function(
        "() => document.getElementById('context').textContent.includes('90,000')"
    )


def another_answer_below(seen: Visit, _chat: FakeChat) -> None:
    seen.page.locator(".assistant").last.get_by_text("Regenerate").evaluate(
        "(one) => one.focus({ preventScroll: true })"
    )
    seen.page.keyboard.press("Enter")
    seen.page.wait_for_function(
        "() => document.querySelector('.assistant:last-child .actions').textContent.includes('2/2')"
    )


@pytest.mark.parametrize(
    "act",
    [another_width, another_window, a_long_draft, another_context, another_answer_below],
)
def test_a_redraw_keeps_the_place(
    chat: FakeChat, start_server: StartServer, visit: Open, act: Act
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        answered(seen, chat)
        answered(seen, chat, "two")
        before = scroll_to(seen, "Paragraph 20 ")
        act(seen, chat)
        seen.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        assert place(seen) == before


def test_another_version_stands_where_the_one_before_stood(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        answered(seen, chat)
        answered(seen, chat, "two")
        page.get_by_text("Edit").nth(1).evaluate("(one) => one.click()")
        answered_versions = page.locator(".user .actions", has_text="2/2")
        seen.ask("zwei")
        answered_versions.wait_for()
        seen.wait_for_answers(2)
        earlier = page.get_by_label("Earlier version")
        earlier.evaluate("(one) => one.scrollIntoView({ block: 'center' })")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        before = earlier.bounding_box()
        assert before is not None
        assert from_end(seen) > 500
        earlier.focus()
        for key, label in (("Enter", "Later version"), ("Enter", "Earlier version")):
            page.keyboard.press(key)
            assert page.evaluate("() => document.activeElement.ariaLabel") == label
            after = page.get_by_label("Earlier version").bounding_box()
            assert after is not None
            assert abs(after["y"] - before["y"]) <= 1
            assert from_end(seen) > 500


def test_a_hit_of_the_search_is_opened_where_it_is(
    chat: FakeChat, start_server: StartServer, visit: Open, home: Path
) -> None:
    store = Store.open(home / "chat.sqlite")
    record = store.create_chat("Long ago")
    parent = None
    for number in range(12):
        text = f"{LONG}\n\nAbout {'walruses' if number == 5 else 'seals'}."
        parent = store.add(record.id, parent, Role.ASSISTANT if number % 2 else Role.USER, text).id
    # In a branch that is not shown: a version of the first question.
    store.add(record.id, None, Role.USER, "About narwhals.")
    store.show_leaf(record.id, parent)
    store.close()
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        for words, number in (("walruses", 5), ("narwhals", 0)):
            page.fill("#search", words)
            page.locator("#chat-list .open", has_text=words).click()
            hit = page.locator(".message.hit", has_text=words)
            hit.wait_for()
            page.wait_for_function("() => !document.querySelector('.body > .plain')")
            top, end, marked = page.evaluate(MARKED)
            assert 0 <= top < end, words
            assert marked == words
            assert (
                page.locator(".message")
                .nth(number)
                .evaluate("(one) => one.classList.contains('hit')")
            )
        page.fill("#search", "")
        page.locator("#chat-list .open", has_text="Long ago").click()
        page.wait_for_function("() => !document.querySelector('.hit')")
        assert from_end(seen) <= 1, "a chat opens at its end"


# ---- selection and focus

# All of an element's text: a mouse selects text, not elements.
SELECT = """(one) => {
  const texts = document.createTreeWalker(one, NodeFilter.SHOW_TEXT);
  const first = texts.nextNode();
  let last = first;
  while (texts.nextNode()) last = texts.currentNode;
  getSelection().setBaseAndExtent(first, 0, last, last.length);
}"""
GROWING = [
    ("| a | b |\n|---|---|\n| cell | 2 |\n", "| 3 | 4 |\n", "td >> nth=0", "cell"),
    ("```python\nx = 'finished'\n", "y = 2\n", ".string", "'finished'"),
    ("A finished paragraph.\n\n", "Another *one*.", "p >> nth=0", "A finished paragraph."),
    ("A paragraph that", " grows and *grows*", "p", "A paragraph that"),
    ("- a finished item\n- another", " that grows\n- third", "li >> nth=0", "a finished item"),
    ("# A title\n\ntext", " and more", "h1", "A title"),
    ("> quoted text\n\nand", " more", "blockquote p", "quoted text"),
    ("**strong** text", " and more", "strong", "strong"),
    ("$x^2$ is a formula", " and more", "msup", "𝑥2"),
]


def test_a_selection_survives_an_answer_that_grows_and_ends(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        for first, more, selector, words in GROWING:
            end = Delta("\n\nThe end.", (65,))
            chat.script = [Delta(first, (65,)), HOLD, Delta(more, (65,)), HOLD, end, END]
            chat.hold_again()
            page.click("#new")
            seen.ask("one")
            chosen = page.locator(f".assistant .body {selector}")
            chosen.wait_for()
            chosen.evaluate(SELECT)
            selected = "() => getSelection().toString().replace(/\\s+/g, '')"
            assert page.evaluate(selected) == words.replace(" ", ""), first
            chat.release()
            seen.wait_for_answers(1)
            page.wait_for_function("() => !document.querySelector('.rest')")
            seen.until_text(".assistant .body", "The end.")
            assert page.evaluate(selected) == words.replace(" ", ""), first
            page.click("#engine-toggle")
            assert page.evaluate(selected) == words.replace(" ", ""), first


def test_a_selection_in_thinking_and_in_a_text_without_marks_survives(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.script = [
        Delta("", (65,), reasoning="Let me see"),
        HOLD,
        Delta("", (65,), reasoning=" whether it stays."),
        Delta("Answer", (65,)),
        END,
    ]
    with visit(start_server().url) as seen:
        page = seen.page
        page.route("**/api/v1/render", lambda route: route.fulfill(status=503, json={}))
        seen.is_alone = True  # Chromium logs the 503
        seen.until("Ready")
        seen.ask("one")
        page.click(".assistant .thinking summary")
        page.locator(".assistant .thoughts").evaluate(SELECT)
        chat.release()
        seen.wait_for_answers(1)
        assert page.inner_text(".assistant .thoughts") == "Let me see whether it stays."
        assert page.evaluate("() => getSelection().toString()") == "Let me see"
        assert page.inner_text(".assistant .body") == "Answer"


def test_the_focus_stays_on_a_message_when_an_answer_ends(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.wait_for_answers(1)
        chat.script = [Delta("Begun", (65,)), HOLD, Delta(" ended", (65,)), END]
        seen.ask("two")
        seen.until_text(".assistant .body", "Begun")
        seen.page.locator(".assistant").first.get_by_text("Copy").focus()
        chat.release()
        seen.wait_for_answers(2)
        assert seen.page.evaluate("() => document.activeElement.textContent") == "Copy"
        assert seen.texts == ["one", "Hello", "two", "Begun ended"]


def test_a_question_typed_before_the_reply_to_the_last_one_is_asked(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    """An answer may end before the page has the reply to its question."""
    held: list[Any] = []
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.page.route("**/answers", lambda route: held.append((route, route.fetch())), times=1)
        seen.ask("one")
        seen.wait_for_answers(1)
        seen.ask("two")
        seen.until_text("#queue", "two")
        [(route, reply)] = held
        route.fulfill(response=reply)
        seen.wait_for_answers(2)
        assert seen.texts == ["one", "Hello", "two", "Hello"]


def test_a_stored_text_is_plain_until_the_server_has_parsed_it(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    held: list[Any] = []
    chat.script = [Delta("**Bold** and", (65,)), HOLD, Delta(" the rest", (65,)), END]
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        seen.ask("one")
        page.locator(".assistant strong").wait_for()
        chat.release()
        seen.wait_for_answers(1)
        assert page.inner_text(".assistant .body") == "Bold and the rest", (
            "whole as soon as it ends"
        )
        page.route("**/api/v1/render", lambda route: held.append(route))
        seen.reload()
        wait_until(lambda: page.title() and held)  # each look lets Playwright hear the browser
        assert page.inner_text(".assistant .body") == "**Bold** and the rest"
        held[0].continue_()
        page.locator(".assistant strong").wait_for()
        assert page.inner_text(".assistant .body") == "Bold and the rest"
