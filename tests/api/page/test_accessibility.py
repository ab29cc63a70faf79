"""What a screen reader, a keyboard and weak eyes need of the page, in headless Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import FakeChat
from tests.api.page.visits import Open, Visit
from tests.api.serving import StartServer

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = pytest.mark.slow

ANSWER = (
    "A [link](https://example.org).\n\n```python\ndef f(): return 'a' + 1  # b\n```\n\n> quoted"
)
# [text, contrast] of what has less than 4.5, the least of WCAG 2.2's level AA for small text.
FAINT = r"""() => {
  const level = (x) => { x /= 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => 0.2126 * level(r) + 0.7152 * level(g) + 0.0722 * level(b);
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const back = (one) => {
    for (; one; one = one.parentElement) {
      const [r, g, b, alpha] = numbers(getComputedStyle(one).backgroundColor);
      if (alpha === undefined || alpha > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const hasText = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || !one.checkVisibility()) continue;
    const levels = [light(numbers(getComputedStyle(one).color)), light(back(one))];
    const contrast = (Math.max(...levels) + 0.05) / (Math.min(...levels) + 0.05);
    if (contrast < 4.5) found.push([one.textContent.slice(0, 30), contrast]);
  }
  return found;
}"""
NAMELESS = r"""() => [...document.querySelectorAll("button, input, textarea, select, nav, aside, dialog, article")]
  .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.length
    || one.getAttribute("aria-labelledby")))
  .map((one) => one.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_controls_have_names(
    chat: FakeChat, start_server: StartServer, visit: Open, scheme: str
) -> None:
    chat.model_name = "mlxserve-mini"
    chat.script = [Delta(ANSWER, (65,), (), FinishReason.STOP, Usage(5, 9, 2))]
    with visit(start_server().url, scheme) as seen:
        seen.until_text("#welcome", "included model")
        assert seen.page.evaluate(FAINT) == []
        seen.ask("Show me")
        seen.page.wait_for_selector(".assistant .keyword")
        assert seen.page.evaluate(FAINT) == []
        assert seen.page.evaluate(NAMELESS) == []
        seen.page.click("#settings-open")
        assert seen.page.evaluate(FAINT) == []


def test_the_keyboard_reaches_everything_and_the_end_is_announced(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("Show me")
        seen.wait_for_answers(1)
        assert seen.page.inner_text("#announce") == "Answer: Hello"
        focused = "document.activeElement.id || document.activeElement.textContent"
        reached = {seen.page.evaluate(focused)}
        assert reached == {"text"}
        wanted = {
            "send",
            "attach",
            "new",
            "settings-open",
            "chats-toggle",
            "engine-toggle",
            "search",
            "Copy",
            "Edit",
            "Regenerate",
        }
        for _ in range(200):  # about twenty stops, more once the chat is listed
            if wanted <= reached:
                break
            seen.page.keyboard.press("Tab")
            reached.add(seen.page.evaluate(focused))
        assert wanted <= reached
        seen.page.focus("#settings-open")
        seen.page.keyboard.press("Enter")
        assert seen.page.locator("#settings").is_visible()
        seen.page.keyboard.press("Escape")
        assert seen.page.locator("#settings").is_hidden()


def kept_chat(seen: Visit) -> Locator:
    """Return the button of the only chat's menu."""
    seen.until("Ready")
    seen.ask("Stay here")
    seen.wait_for_answers(1)
    return seen.page.get_by_role("button", name="Menu of Stay here")


def draw_again(seen: Visit) -> None:
    """Have the list of chats asked for and drawn, as when the window comes to the front."""
    with seen.page.expect_response("**/api/v1/chats"):
        seen.page.evaluate("dispatchEvent(new Event('focus'))")
    seen.page.evaluate("() => new Promise(requestAnimationFrame)")


def test_a_button_that_is_pressed_while_the_list_is_drawn_again_is_clicked(
    start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        kept_chat(seen).hover()
        seen.page.mouse.down()
        draw_again(seen)
        seen.page.mouse.up()
        seen.page.get_by_role("menuitem", name="Rename").wait_for()


def test_the_keyboard_stays_in_the_list_of_chats_when_it_is_drawn_again(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        menu = kept_chat(seen)
        menu.focus()
        draw_again(seen)
        assert seen.page.evaluate("document.activeElement.ariaLabel") == "Menu of Stay here"
        seen.page.click("#new")
        seen.page.on("dialog", lambda dialog: dialog.accept())
        menu.focus()
        seen.page.keyboard.press("Enter")
        seen.page.wait_for_function("() => document.activeElement.textContent === 'Pin'")
        seen.page.keyboard.press("ArrowUp")  # from the first item to the last
        seen.page.keyboard.press("Enter")
        menu.wait_for(state="detached")
        assert seen.page.evaluate("document.activeElement.id") == "search"
