"""Two models side by side on the page, in headless Chromium."""

from __future__ import annotations

import pytest

from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import FakeChat
from tests.api.page.visits import Open
from tests.api.serving import StartServer
from tests.api.several_models import serving_several

pytestmark = pytest.mark.slow

BOXES = """() => [...document.querySelectorAll(".column")].map((one) => {
  const { left, top, width } = one.getBoundingClientRect();
  return [left, top, width];
})"""


def answer(text: str) -> list[Delta]:
    return [
        Delta(text, (65,)),
        Delta("", (66,), (), FinishReason.STOP, Usage(5, 9, 0)),
    ]


def test_both_models_answer_and_the_chat_goes_on_from_the_chosen_one(visit: Open) -> None:
    scripts = {"first": answer("One says"), "second": answer("Two says")}
    with serving_several(scripts) as (server, models), visit(server.url) as seen:
        page = seen.page
        seen.until("Ready")
        page.click("#settings-open")
        page.select_option("#second", "second")
        page.click("#settings .main")
        seen.until_text("#beside", "Questions go to first, then to second")
        seen.ask("Who?")
        seen.wait_for_answers(2)
        assert seen.texts == ["Who?", "One says", "Two says"]
        columns = page.locator(".column")
        assert [one.split("\n")[0] for one in columns.all_inner_texts()] == ["first", "second"]
        for name, note in zip(
            scripts, page.locator(".column .note").all_inner_texts(), strict=True
        ):
            assert name in note
        (left, top, width), (right, other_top, _) = page.evaluate(BOXES)
        assert (right >= left + width, top) == (True, other_top)
        page.set_viewport_size({"width": 320, "height": 800})
        (left, top, width), (other_left, below, _) = page.evaluate(BOXES)
        assert (left, below > top, left + width <= 320) == (other_left, True, True)
        page.set_viewport_size({"width": 1280, "height": 800})
        go_on = columns.first.get_by_text("Continue from here")
        assert go_on.get_attribute("aria-pressed") == "false"
        go_on.click()
        columns.first.locator("[aria-pressed=true]").wait_for()
        seen.ask("And then?")
        seen.wait_for_answers(4)
        for name, chat in models.chats.items():
            asked = [one["content"] for one in chat.rendered[-1].messages]
            assert asked == ["Who?", "One says", "And then?"], name
        seen.reload()
        seen.wait_for_answers(4)
        assert page.locator(".columns").count() == 2, "this tab still shows two columns"
        page.locator(".column").last.get_by_text("Regenerate").click()
        seen.until_text(".column .actions", "3/3")
        assert len(models.chats["second"].rendered) == 3
        page.click("#beside-off")
        page.locator(".columns").first.wait_for(state="detached")
        assert page.locator(".assistant").count() == 2
        assert seen.errors == []


def test_a_second_model_that_cannot_answer_leaves_the_first_ones_answer(visit: Open) -> None:
    scripts = {"first": answer("One says"), "broken": None}
    with serving_several(scripts) as (server, _), visit(server.url) as seen:
        page = seen.page
        seen.until("Ready")
        page.click("#settings-open")
        page.select_option("#second", "broken")
        page.click("#settings .main")
        seen.ask("Who?")
        seen.until_text(".failed .note", "broken needs 9.00 GiB")
        assert seen.texts[:2] == ["Who?", "One says"]
        assert page.input_value("#text") == ""
        seen.ask("And then?")
        seen.until_text(".user .body", "And then?")
        assert seen.errors == []


def test_one_model_has_nothing_beside_it(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.page.click("#settings-open")
        assert seen.page.locator("#prompt").is_visible()
        assert seen.page.locator("#second").is_hidden()
