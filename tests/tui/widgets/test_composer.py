import asyncio
from collections.abc import Awaitable, Callable

import pytest
from textual.app import App, ComposeResult
from textual.events import Paste
from textual.pilot import Pilot

from tui.widgets import composer
from tui.widgets.composer import Composer


class Desk(App[None]):
    """A composer, and the texts it sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def compose(self) -> ComposeResult:
        yield Composer()

    def on_composer_sent(self, event: Composer.Sent) -> None:
        self.sent.append(event.text)

    @property
    def composer(self) -> Composer:
        return self.query_one(Composer)


def write(story: Callable[[Desk, Pilot[None]], Awaitable[None]]) -> None:
    async def run() -> None:
        desk = Desk()
        async with desk.run_test() as pilot:
            await story(desk, pilot)

    asyncio.run(run())


@pytest.mark.parametrize("key", ["shift+enter", "ctrl+j", "alt+enter"])
def test_three_keys_start_a_new_line(key: str) -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        await pilot.press("a", key, "b", "enter")
        assert desk.sent == ["a\nb"]

    write(story)


def test_a_key_types_one_character() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        await pilot.press("a", "b", "backspace", "left", "c")
        assert desk.composer.text == "ca"

    write(story)


def test_sending_empties_it_and_strips_empty_lines() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        desk.composer.write("\n\n  text\n\n")
        await pilot.press("enter", "enter")
        assert desk.sent == ["  text"]
        assert desk.composer.text == ""

    write(story)


def test_sent_text_is_cleaned() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        desk.composer.insert("a\x1b[31m\u202e")
        await pilot.press("enter")
        assert desk.sent == ["a␛[31m⟨U+202E⟩"]

    write(story)


def test_an_empty_message_is_not_sent() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        await pilot.press("space", "ctrl+j", "space", "enter")
        assert desk.sent == []

    write(story)


def test_pasted_text_is_cleaned() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        desk.composer.post_message(Paste("one\r\n\x1b[31mtwo\u202e"))
        await pilot.pause()
        assert desk.composer.text == "one\n␛[31mtwo⟨U+202E⟩"

    write(story)


LONG = "\n".join(f"line {number}" for number in range(120))


def paste(desk: Desk, text: str) -> None:
    desk.composer.post_message(Paste(text))


def test_a_long_paste_is_folded_and_sent_whole() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        await pilot.press("a")
        paste(desk, LONG)
        await pilot.pause()
        assert desk.composer.text == "a[pasted 120 lines]"
        await pilot.press("b", "enter")
        assert desk.sent == [f"a{LONG}b"]
        assert desk.composer.text == ""
        desk.composer.write(f"again {LONG}")
        assert desk.composer.text == "again [pasted 120 lines]"

    write(story)


def test_a_folded_paste_is_unfolded_edited_and_folded_by_a_key() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        paste(desk, LONG)
        await pilot.press("f6")
        assert desk.composer.text == LONG
        await pilot.press("f6")
        assert desk.composer.text == "[pasted 120 lines]"
        await pilot.press("f6", "x", "f6")
        assert desk.composer.text == "[pasted 120 lines]x"

    write(story)


@pytest.mark.parametrize(("key", "at"), [("backspace", 19), ("delete", 1)])
def test_a_folded_paste_is_deleted_as_one(key: str, at: int) -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        await pilot.press("a")
        paste(desk, LONG)
        await pilot.press("b")
        desk.composer.move_cursor((0, at))
        await pilot.press(key)
        assert desk.composer.text == "ab"
        await pilot.press("ctrl+z", "enter")
        assert desk.sent == [f"a{LONG}b"]

    write(story)


def test_short_pastes_are_shown_as_they_are() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        paste(desk, "one\ntwo")
        await pilot.pause()
        assert desk.composer.text == "one\ntwo"

    write(story)


def test_a_key_empties_a_draft_of_several_rows_and_another_brings_it_back() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        await pilot.press("a", "ctrl+j", "b", "up", "ctrl+u")
        assert desk.composer.text == ""
        await pilot.press("ctrl+z")
        assert desk.composer.text == "a\nb"

    write(story)


def test_history_keeps_the_draft_and_stops_at_its_ends() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        desk.composer.use_history(["one", "two"])
        desk.composer.write("draft")
        seen = []
        for key in ("up", "up", "up", "down", "down", "down"):
            await pilot.press(key)
            seen.append(desk.composer.text)
        assert seen == ["two", "one", "one", "two", "draft", "draft"]

    write(story)


def test_arrows_move_inside_several_lines() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        desk.composer.use_history(["before"])
        desk.composer.write("one\ntwo")
        await pilot.press("up")
        assert desk.composer.text == "one\ntwo"
        await pilot.press("up")
        assert desk.composer.text == "before"

    write(story)


def test_a_repeated_question_is_the_newest_and_listed_once() -> None:
    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        desk.composer.use_history(["one", "two"])
        desk.composer.remember("one")
        await pilot.press("up")
        assert desk.composer.text == "one"
        await pilot.press("up")
        assert desk.composer.text == "two"

    write(story)


def test_the_cursor_blinks_for_a_while_after_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composer, "BLINK_SECONDS", 0.05)

    async def story(desk: Desk, pilot: Pilot[None]) -> None:
        async def until_still() -> None:
            while desk.composer.cursor_blink:
                await pilot.pause()

        assert desk.composer.cursor_blink
        await until_still()
        assert desk.composer.cursor_blink is False
        blinks = list[bool]()

        def note(blink: bool) -> None:
            blinks.append(blink)

        desk.watch(desk.composer, "cursor_blink", note, init=False)
        await pilot.press("a")
        await until_still()
        assert blinks == [True, False]
        desk.set_focus(None)
        desk.composer.focus()
        await pilot.pause()
        await until_still()
        assert blinks == [True, False] * 2

    write(story)
