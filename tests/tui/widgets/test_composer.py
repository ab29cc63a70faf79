from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from textual.app import App, ComposeResult
from textual.events import Paste
from textual.pilot import Pilot

from tui.widgets import composer
from tui.widgets.composer import Composer


class Desk(App[None]):
    """A composer, and the texts it sent."""

    pilot: Pilot[None]

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


@asynccontextmanager
async def opened() -> AsyncGenerator[Desk, None]:
    desk = Desk()
    async with desk.run_test() as desk.pilot:
        yield desk


@pytest.fixture
def desk() -> AbstractAsyncContextManager[Desk]:
    return opened()


@pytest.mark.parametrize("key", ["shift+enter", "ctrl+j", "alt+enter"])
async def test_three_keys_start_a_new_line(desk: Desk, key: str) -> None:
    await desk.pilot.press("a", key, "b", "enter")
    assert desk.sent == ["a\nb"]


async def test_a_key_types_one_character(desk: Desk) -> None:
    await desk.pilot.press("a", "b", "backspace", "left", "c")
    assert desk.composer.text == "ca"


async def test_sending_empties_it_and_strips_empty_lines(desk: Desk) -> None:
    desk.composer.write("\n\n  text\n\n")
    await desk.pilot.press("enter", "enter")
    assert desk.sent == ["  text"]
    assert desk.composer.text == ""


async def test_sent_text_is_cleaned(desk: Desk) -> None:
    desk.composer.insert("a\x1b[31m\u202e")
    await desk.pilot.press("enter")
    assert desk.sent == ["a␛[31m⟨U+202E⟩"]


async def test_an_empty_message_is_not_sent(desk: Desk) -> None:
    await desk.pilot.press("space", "ctrl+j", "space", "enter")
    assert desk.sent == []


async def test_pasted_text_is_cleaned(desk: Desk) -> None:
    desk.composer.post_message(Paste("one\r\n\x1b[31mtwo\u202e"))
    await desk.pilot.pause()
    assert desk.composer.text == "one\n␛[31mtwo⟨U+202E⟩"


LONG = "\n".join(f"line {number}" for number in range(120))


def paste(desk: Desk, text: str) -> None:
    desk.composer.post_message(Paste(text))


async def test_a_long_paste_is_folded_and_sent_whole(desk: Desk) -> None:
    await desk.pilot.press("a")
    paste(desk, LONG)
    await desk.pilot.pause()
    assert desk.composer.text == "a[pasted 120 lines]"
    await desk.pilot.press("b", "enter")
    assert desk.sent == [f"a{LONG}b"]
    assert desk.composer.text == ""
    desk.composer.write(f"again {LONG}")
    assert desk.composer.text == "again [pasted 120 lines]"


async def test_a_folded_paste_is_unfolded_edited_and_folded_by_a_key(desk: Desk) -> None:
    paste(desk, LONG)
    await desk.pilot.press("f6")
    assert desk.composer.text == LONG
    await desk.pilot.press("f6")
    assert desk.composer.text == "[pasted 120 lines]"
    await desk.pilot.press("f6", "x", "f6")
    assert desk.composer.text == "[pasted 120 lines]x"


@pytest.mark.parametrize(("key", "at"), [("backspace", 19), ("delete", 1)])
async def test_a_folded_paste_is_deleted_as_one(desk: Desk, key: str, at: int) -> None:
    await desk.pilot.press("a")
    paste(desk, LONG)
    await desk.pilot.press("b")
    desk.composer.move_cursor((0, at))
    await desk.pilot.press(key)
    assert desk.composer.text == "ab"
    await desk.pilot.press("ctrl+z", "enter")
    assert desk.sent == [f"a{LONG}b"]


async def test_short_pastes_are_shown_as_they_are(desk: Desk) -> None:
    paste(desk, "one\ntwo")
    await desk.pilot.pause()
    assert desk.composer.text == "one\ntwo"


async def test_a_key_empties_a_draft_of_several_rows_and_another_brings_it_back(desk: Desk) -> None:
    await desk.pilot.press("a", "ctrl+j", "b", "up", "ctrl+u")
    assert desk.composer.text == ""
    await desk.pilot.press("ctrl+z")
    assert desk.composer.text == "a\nb"


async def test_history_keeps_the_draft_and_stops_at_its_ends(desk: Desk) -> None:
    desk.composer.use_history(["one", "two"])
    desk.composer.write("draft")
    seen = []
    for key in ("up", "up", "up", "down", "down", "down"):
        await desk.pilot.press(key)
        seen.append(desk.composer.text)
    assert seen == ["two", "one", "one", "two", "draft", "draft"]


async def test_arrows_move_inside_several_lines(desk: Desk) -> None:
    desk.composer.use_history(["before"])
    desk.composer.write("one\ntwo")
    await desk.pilot.press("up")
    assert desk.composer.text == "one\ntwo"
    await desk.pilot.press("up")
    assert desk.composer.text == "before"


async def test_a_repeated_question_is_the_newest_and_listed_once(desk: Desk) -> None:
    desk.composer.use_history(["one", "two"])
    desk.composer.remember("one")
    await desk.pilot.press("up")
    assert desk.composer.text == "one"
    await desk.pilot.press("up")
    assert desk.composer.text == "two"


async def test_the_cursor_blinks_for_a_while_after_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composer, "BLINK_SECONDS", 0.05)
    async with opened() as desk:

        async def until_still() -> None:
            while desk.composer.cursor_blink:
                await desk.pilot.pause()

        assert desk.composer.cursor_blink
        await until_still()
        assert desk.composer.cursor_blink is False
        blinks = list[bool]()

        def note(blink: bool) -> None:
            blinks.append(blink)

        desk.watch(desk.composer, "cursor_blink", note, init=False)
        await desk.pilot.press("a")
        await until_still()
        assert blinks == [True, False]
        desk.set_focus(None)
        desk.composer.focus()
        await desk.pilot.pause()
        await until_still()
        assert blinks == [True, False] * 2
