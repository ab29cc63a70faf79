"""What a reader meets: directions, links, print, targets of a finger, the theme, shortcuts and the clipboard."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from pypdf import PdfReader

from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import FakeChat
from tests.api.page.visits import Open
from tests.api.serving import StartServer

pytestmark = pytest.mark.slow

END = Delta("", (), (), FinishReason.STOP, Usage(5, 9, 0))
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Buttons, fields and summaries that are shown and smaller than WCAG 2.5.8 allows.
SMALL = """() => [...document.querySelectorAll("button, input, select, summary, textarea")]
  .map((one) => [one.outerHTML.slice(0, 60), one.getBoundingClientRect()])
  .filter(([, { width, height }]) => width && height && (width < 24 || height < 24)).map(([html]) => html)"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    return tmp_path


def test_each_paragraph_has_the_direction_of_its_text(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    text = "مرحبا بالعالم.\n\n- שלום\n\n| أ | b |\n|---|---|\n| ج | d |\n\nAnd English."
    chat.script = [Delta(text, (65,)), END]
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("مرحبا")
        seen.wait_for_answers(1)
        for selector, direction in (
            (".user p", "rtl"),
            (".assistant p >> nth=0", "rtl"),
            (".assistant li", "rtl"),
            (".assistant th >> nth=0", "rtl"),
            (".assistant td >> nth=1", "ltr"),
            (".assistant p >> nth=-1", "ltr"),
        ):
            found = seen.page.locator(selector).evaluate("(one) => getComputedStyle(one).direction")
            assert found == direction, selector
        seen.page.fill("#text", "مرحبا")
        field = seen.page.locator("#text")
        assert field.evaluate("(one) => getComputedStyle(one).direction") == "rtl"


def test_bare_addresses_are_links_and_tasks_have_boxes(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    text = "See https://example.org/a?b=1, `https://no.example`.\n\n- [x] done\n- [ ] to do"
    chat.script = [Delta(text, (65,)), END]
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.wait_for_answers(1)
        links = seen.page.locator(".assistant a")
        assert links.evaluate_all("all => all.map((one) => one.href)") == [
            "https://example.org/a?b=1"
        ]
        assert seen.page.locator(".assistant li").all_inner_texts() == ["☑ done", "☐ to do"]


def test_print_has_the_whole_chat_and_nothing_of_the_frame(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    text = "\n\n".join(f"Paragraph {number} of the answer." for number in range(120))
    chat.script = [Delta(text, (65,)), END]
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("Print me")
        seen.wait_for_answers(1)
        sheets = PdfReader(BytesIO(seen.page.pdf())).pages
        printed = "\n".join(sheet.extract_text() for sheet in sheets)
        for words in ("Print me", "Paragraph 0 of", "Paragraph 60 of", "Paragraph 119 of"):
            assert words in printed, words
        for words in ("Engine", "Prefill", "Settings", "Regenerate", "Search chats"):
            assert words not in printed, words


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_what_is_pressed_has_24_pixels(
    chat: FakeChat, start_server: StartServer, visit: Open, width: int
) -> None:
    chat.script = [
        Delta("", (66,), reasoning="Let me see."),
        Delta("```python\nx = 1\n```\n", (65,)),
        END,
    ]
    with visit(start_server().url, width=width) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.wait_for_answers(1)
        seen.page.get_by_role("button", name="Regenerate").click()
        seen.page.get_by_label("Earlier version").wait_for()
        seen.wait_for_answers(1)
        assert seen.page.evaluate(SMALL) == []
        seen.page.click("#settings-open")
        assert seen.page.evaluate(SMALL) == []
        assert seen.page.evaluate(OVERFLOW) == 0


def test_the_engine_is_closed_for_a_first_visitor_and_stays_as_it_was_left(
    start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url, is_first=True) as seen:
        seen.until("Ready")
        assert seen.page.locator("#engine").is_hidden()
        seen.page.click("#engine-toggle")
        seen.page.locator("#engine").wait_for()
        seen.reload()
        seen.page.locator("#engine").wait_for()
        seen.page.click("#engine-toggle")
        seen.reload()
        seen.until("Ready")
        assert seen.page.locator("#engine").is_hidden()


def test_a_theme_is_chosen_over_that_of_the_system(start_server: StartServer, visit: Open) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    with visit(start_server().url, "light") as seen:
        page = seen.page
        seen.until("Ready")
        light = page.evaluate(back)
        page.click("#settings-open")
        page.select_option("#theme", "dark")
        dark = page.evaluate(back)
        assert dark != light
        seen.reload()
        page.wait_for_function(f"dark => {back} === dark", arg=dark)
        page.emulate_media(color_scheme="dark")
        page.click("#settings-open")
        page.select_option("#theme", "light")
        assert page.evaluate(back) == light
        page.select_option("#theme", "")
        assert page.evaluate(back) == dark


def test_shortcuts_are_told_in_a_dialog_and_work(start_server: StartServer, visit: Open) -> None:
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        page.keyboard.press("F1")
        seen.until_text("#keys", "Shift+Enter")
        told = page.locator("#keys dt").all_inner_texts()
        assert {"Ctrl+O", "Alt+N", "F4", "F1", "Esc"} <= set(told)
        page.keyboard.press("Escape")
        seen.ask("one")
        seen.wait_for_answers(1)
        page.keyboard.press("Alt+n")
        page.locator("#welcome").wait_for()
        was_shown = page.locator("#engine").is_visible()
        page.keyboard.press("F4")
        page.locator("#engine").wait_for(state="hidden" if was_shown else "visible")
        page.click("#chats-toggle")
        page.keyboard.press("Control+o")
        assert page.evaluate("document.activeElement.id") == "search"
        page.click("#settings-open")
        page.click("#keys-open")
        seen.until_text("#keys", "Shift+Enter")
        assert seen.errors == []


def test_copying_works_on_plain_http(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    """As for a colleague, whose browser has no clipboard for http://192.168…"""
    chat.script = [Delta("**Bold** words", (65,)), END]
    with visit(start_server().url) as seen:
        page = seen.page
        page.add_init_script(
            "Object.defineProperty(Navigator.prototype, 'clipboard', { get: () => undefined })"
        )
        seen.reload()
        seen.until("Ready")
        seen.ask("one")
        seen.wait_for_answers(1)
        page.locator(".assistant").get_by_role("button", name="Copy").click()
        seen.until_text(".assistant .actions", "Copied")
        page.focus("#text")
        page.keyboard.press("Control+v")
        assert page.input_value("#text") == "**Bold** words"


def test_an_answer_names_its_model(chat: FakeChat, start_server: StartServer, visit: Open) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.until_text(".assistant .note", chat.model_name)
