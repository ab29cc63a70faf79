import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import OptionList

from mlxserve.history.messages import Role, State
from mlxserve.history.store import Store
from mlxserve.hub.model_choices import Downloaded, Model, ModelCatalog, ModelOrigin
from mlxserve.text.documents.document import NOT_ALL_READ
from tests.images.files import file_of, picture
from tests.tui import scripts
from tests.tui.chats_on_disk import branch, delete_chat, write_chat
from tests.tui.fake_server import FakeServer, in_place_of_a_server
from tests.tui.terminals import Open, Terminal
from tui.chat.open_chat import OpenChat
from tui.home import Home
from tui.talk.connection import ConnectOptions, Connector
from tui.widgets.dialogs import ChatsDialog, HelpDialog
from tui.widgets.message import AnswerView
from tui.widgets.models_dialog import ModelsDialog
from tui.widgets.transcript import Transcript


def has_copied(t: Terminal, text: str) -> bool:
    return t.app.clipboard == text


def test_importing_the_app_imports_no_engine() -> None:
    script = (
        "import sys, tui.app\n"
        "heavy = {'mlx', 'numpy', 'transformers', 'tokenizers', 'torch', 'httpx'}\n"
        "ours = {'core', 'history', 'hub', 'mcp', 'system'}\n"
        "parts = [name.split('.') for name in sys.modules]\n"
        "rooms = {part[1] for part in parts if part[0] == 'mlxserve' and len(part) > 1}\n"
        "print(sorted(heavy & {part[0] for part in parts} | rooms - ours))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_an_answer_streams_onto_the_screen(t: Terminal, server: FakeServer) -> None:
    gate = scripts.Gate()
    server.script(
        *(scripts.say("# Sky\n\nIt is **bl"), gate, scripts.say("ue**.\n")),
        scripts.usage(1060, 5, cached=1024),
    )
    await t.ask("why?")
    await t.until_shown("It is")
    assert "Esc stops" in t.status
    gate.open()
    await t.until_shown("It is blue.")
    await t.until_ready()
    assert "**" not in t.screen
    assert "cached 1,024 of 1,060 prompt tokens" in t.status
    assert "first token" in t.status
    assert t.messages == ["why?", "# Sky\n\nIt is **blue**.\n"]


async def test_the_whole_conversation_is_sent(t: Terminal, server: FakeServer) -> None:
    await t.talk("one", "two")
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "two"},
    ]
    assert server.requests[1]["model"] == "small"


async def test_enter_sends_and_other_keys_start_a_new_line(t: Terminal, server: FakeServer) -> None:
    await t.type("a b\nc")
    await t.press("shift+enter")
    await t.type("d")
    assert t.composer.text == "a b\nc\nd"
    assert "Enter sends" in t.screen
    assert "Ctrl+J new line" in t.screen
    await t.press("enter")
    await t.until(lambda: len(server.requests) == 1)
    assert server.requests[0]["messages"][0]["content"] == "a b\nc\nd"
    assert t.composer.text == ""


async def test_esc_stops_the_answer_and_keeps_its_text(
    terminal: Open, server: FakeServer, home: Home, patience: float
) -> None:
    gate = scripts.Gate()
    server.script(scripts.say("half of it"), gate)

    async with terminal() as t:
        await t.ask("why?")
        await t.until_shown("half of it")
        await t.press("escape")
        await t.until(lambda: "Stopped" in t.status)
        assert "half of it" in t.screen
        assert "stopped" in t.screen
        assert t.views[-1].message.state is State.STOPPED
    assert server.disconnects.acquire(timeout=patience), "the server is told"
    assert branch(home)[-1].text == "half of it"


async def test_the_question_is_on_disk_before_it_is_sent(
    t: Terminal, server: FakeServer, home: Home
) -> None:
    gate = scripts.Gate()
    server.script(gate, scripts.say("x"))
    await t.ask("remember me")
    await t.until(gate.reached.is_set)
    assert [(m.text, m.state) for m in branch(home)] == [
        *(("remember me", State.DONE), ("", State.WRITING))
    ]
    gate.open()
    await t.until_shown("x")


async def test_an_error_is_one_sentence_with_what_to_do(t: Terminal, server: FakeServer) -> None:
    server.script(scripts.refuse(429, "64 requests are waiting"))
    await t.ask("why?")
    await t.until_shown("64 requests are waiting")
    assert "Ctrl+R" in t.status
    await t.press("ctrl+r")
    await t.until_shown("Yes.")
    await t.until_shown("version 2 of 2")


async def test_a_lost_connection_keeps_the_text_so_far(t: Terminal, server: FakeServer) -> None:
    server.script(scripts.say("half"), scripts.hang_up, reason=None)
    await t.ask("why?")
    await t.until_shown("before the answer was complete")
    assert t.messages[-1] == "half"


async def test_a_failed_connection_is_reported_and_retried(
    terminal: Open, server: FakeServer
) -> None:
    server.models = []

    async with terminal(is_ready=False) as t:
        await t.until_shown("has no model")
        assert "Not connected" in t.status
        server.models = ["small"]
        await t.press("ctrl+r")
        await t.until_ready()
        assert "has no model" not in t.screen


async def test_a_message_sent_while_connecting_is_queued(
    terminal: Open, server: FakeServer
) -> None:
    server.health = (503, {"status": "loading", "progress": 0.25})

    async with terminal(is_ready=False) as t:
        await t.until(lambda: "Loading" in t.status)
        assert "25%" in t.status
        await t.ask("are you there?")
        await t.until_shown("queued: are you there?")
        server.health = (200, {})
        await t.until_shown("Yes.")
        assert "queued:" not in t.screen


async def test_messages_sent_during_an_answer_are_queued(t: Terminal, server: FakeServer) -> None:
    gate = scripts.Gate()
    server.script(scripts.say("first"), gate)
    server.script(scripts.say("second"))
    await t.ask("one")
    await t.until_shown("first")
    await t.ask("two")
    await t.until_shown("queued: two")
    assert len(server.requests) == 1
    gate.open()
    await t.until_shown("second")
    await t.until(lambda: t.messages == ["one", "first", "two", "second"])


async def test_stopping_the_answer_returns_queued_messages(t: Terminal, server: FakeServer) -> None:
    server.script(scripts.say("first"), scripts.Gate())
    await t.ask("one")
    await t.until_shown("first")
    await t.ask("two")
    await t.press("escape")
    await t.until(lambda: t.composer.text == "two")
    assert len(server.requests) == 1


async def test_a_new_chat_stops_the_answer_and_keeps_both(t: Terminal, server: FakeServer) -> None:
    server.script(scripts.say("first"), scripts.Gate())
    await t.ask("one")
    await t.until_shown("first")
    await t.press("ctrl+n")
    await t.until(lambda: t.messages == [])
    await t.talk("two")
    await t.open(ChatsDialog, "ctrl+o")
    await t.press("down", "enter")
    await t.until(lambda: t.messages == ["one", "first"])
    await t.until_shown("stopped")


async def test_thinking_is_closed_until_it_is_opened(t: Terminal, server: FakeServer) -> None:
    gate = scripts.Gate()
    server.script(scripts.think("secret ", "thoughts"), gate, scripts.say("the answer"))
    await t.ask("why?")
    await t.until_shown("▸ Thinking")
    assert "secret" not in t.screen
    gate.open()
    await t.until_shown("the answer")
    await t.until_ready()
    assert "▸ Thought" in t.screen
    await t.press("ctrl+t")
    await t.until_shown("secret thoughts")
    await t.press("ctrl+t")
    await t.until(lambda: "secret" not in t.screen)


async def test_thinking_opened_while_it_streams_continues(t: Terminal, server: FakeServer) -> None:
    gate = scripts.Gate()
    server.script(scripts.think("one "), gate, scripts.think("two"), scripts.say("done"))
    await t.ask("why?")
    await t.until_shown("▸ Thinking")
    await t.press("ctrl+t")
    await t.until_shown("│ one")
    gate.open()
    await t.until_shown("│ one two")
    await t.until_shown("done")


async def test_an_edited_question_starts_a_branch(t: Terminal, server: FakeServer) -> None:
    await t.talk("one")
    await t.press("escape", "escape")
    await t.until(lambda: t.composer.text == "one")
    await t.ask("uno")
    await t.until(lambda: t.messages == ["uno", "Yes."])
    await t.until_shown("version 2 of 2")
    await t.until_ready()
    await t.press("alt+left")
    await t.until(lambda: t.messages == ["one", "Yes."])
    assert server.requests[1]["messages"] == [{"role": "user", "content": "uno"}]


async def test_esc_twice_edits_only_if_nothing_was_typed_between(t: Terminal) -> None:
    await t.talk("one")
    await t.press("escape")
    await t.ask("/rename A title")
    await t.until_shown("A title")
    await t.press("escape")
    await t.pilot.pause()
    assert t.composer.text == ""
    await t.press("escape")
    await t.until(lambda: t.composer.text == "one")


async def test_esc_twice_with_another_key_between_edits_nothing(t: Terminal) -> None:
    await t.talk("one")
    await t.press("escape", "tab", "escape", "escape")
    await t.pilot.pause()
    assert t.composer.text == ""
    await t.press("escape")
    await t.until(lambda: t.composer.text == "one")


async def test_one_message_at_a_time_is_shown_below_a_command_that_is_not_sent(
    t: Terminal, server: FakeServer
) -> None:
    await t.ask("/frobnicate")
    await t.until_shown("Unknown command. F1 lists all commands.")
    assert t.composer.text == "/frobnicate"
    assert "Ready" not in t.screen
    t.composer.load_text("")
    await t.ask("/retry now")
    await t.until_shown("/retry takes no argument.")
    assert t.composer.text == "/retry now"
    assert server.requests == []
    assert "Unknown command" not in t.screen
    assert t.screen.rstrip().split("\n")[-1].strip() == "/retry takes no argument."
    t.app.window.status.end_message()
    await t.until_shown("Ready")


async def test_messages_of_one_cause_are_shown_together_and_as_plain_text(t: Terminal) -> None:
    for words in ("First of three.", "Second of three.", "Third of three.", "Third of three."):
        t.app.notify(words)
    await t.until_shown("Third of three.")
    assert [line.strip() for line in t.screen.rstrip().split("\n")[-2:]] == [
        "Second of three.",
        "Third of three.",
    ]
    t.app.notify("[bold]two\x1b[31m words[/]", title="Tools")
    await t.until_shown("Tools: [bold]two␛[31m words[/]")


@pytest.mark.parametrize(("size", "column"), [((100, 30), 100), ((200, 50), 132)])
async def test_a_wide_window_has_a_wider_column(
    t: Terminal, size: tuple[int, int], column: int
) -> None:
    assert t.composer.region.width == min(column, size[0] - 1)
    await t.press("f4")
    if size[0] == 200:
        await t.until(lambda: bool(t.app.query("EnginePanel")))
        await t.until(lambda: t.app.query_one("EnginePanel").region.width == 64)
        await t.until(lambda: t.composer.region.width == column)


async def test_esc_cancels_a_command_that_was_begun_and_an_edit(t: Terminal) -> None:
    await t.ask("/find")
    await t.until(lambda: t.composer.text == "/find ")
    await t.press("escape")
    await t.until(lambda: t.composer.text == "")
    await t.talk("one")
    await t.ask("/edit")
    await t.until(lambda: t.composer.text == "one")
    await t.press("escape")
    assert t.composer.text == ""
    await t.ask("two")
    await t.until(lambda: len(t.messages) == 4)


async def test_keys_act_on_the_focused_message(t: Terminal, server: FakeServer) -> None:
    await t.talk("one", "two")
    await t.press("tab")
    assert t.app.focused is t.views[-1]
    await t.press("tab")
    assert t.app.focused is t.composer
    await t.press("shift+tab", "up", "up")
    assert t.app.focused is t.views[1]
    await t.press("r")
    await t.until_shown("2 later messages stay with the version before: Alt+Left")
    await t.until(lambda: len(server.requests) == 3)
    await t.until(lambda: t.messages == ["one", "Yes."])
    assert isinstance(t.app.focused, AnswerView)
    await t.until_shown("version 2 of 2")
    await t.until_ready()
    await t.press("left")  # the focus has stayed there
    await t.until(lambda: t.messages == ["one", "Yes.", "two", "Yes."])


async def test_search_finds_words_in_every_chat(t: Terminal) -> None:
    for text in ("the lighthouse", "the harbour"):
        await t.press("ctrl+n")
        await t.until(lambda: t.messages == [])
        await t.ask(text)
        await t.until(lambda: "Ready" in t.status and t.messages[-1:] == ["Yes."])
    await t.open(ChatsDialog, "ctrl+o")
    await t.type("ghtho")
    await t.until(lambda: t.app.screen.query_one(OptionList).option_count == 1)
    await t.until(lambda: re.search(r"\d\d \w{3}  the lighthouse +the li", t.screen) is not None)
    await t.press("enter")
    await t.until(lambda: t.messages == ["the lighthouse", "Yes."])


async def test_the_status_line_has_the_figures_of_the_chat_that_is_open(
    t: Terminal, server: FakeServer
) -> None:
    server.script(scripts.say("one"), scripts.usage(1060, 5, cached=1024))
    await t.ask("first")
    await t.until(lambda: "cached 1,024 of 1,060" in t.status)
    await t.ask("/new")
    await t.until(lambda: "cached" not in t.status)
    server.script(scripts.say("two"), scripts.usage(20, 5, cached=7))
    await t.ask("second")
    await t.until(lambda: "cached 7 of 20" in t.status)
    await t.open(ChatsDialog, "ctrl+o")
    await t.press("down", "enter")
    await t.until(lambda: t.messages == ["first", "one"])
    await t.until(lambda: "cached 1,024 of 1,060" in t.status)


async def test_a_chat_is_deleted_on_the_second_press(t: Terminal) -> None:
    await t.talk("one")
    await t.open(ChatsDialog, "ctrl+o")
    await t.press("ctrl+d")
    await t.until_shown("again to delete")
    await t.press("ctrl+d")
    await t.until_shown("No chats yet")
    await t.press("escape")
    await t.until(lambda: t.messages == [])


async def test_a_deleted_chat_takes_its_cached_pages_with_it(
    terminal: Open, server: FakeServer
) -> None:
    server.model_fields = {"owned_by": "mlxserve"}
    forgotten = {"models": ["large"], "pages": 3, "pages_on_disk": 2}
    server.engine["/api/v1/cache/forget"] = forgotten

    async with terminal() as t:
        await t.until_ready()
        await t.talk("one")
        await t.open(ChatsDialog, "ctrl+o")
        await t.press("ctrl+d", "ctrl+d")
        await t.until_shown("No chats yet")
        await t.until(lambda: len(server.requests) == 2)
        answer = {"role": "assistant", "content": "Yes.", "reasoning_content": ""}
        question = {"role": "user", "content": "one"}
        assert server.requests[1] == {"conversations": [[question, answer]], "kept": []}
        await t.press("escape")
        await t.until_shown("The chat is deleted, with 3")


async def test_a_system_prompt_is_set_changed_and_removed(t: Terminal, server: FakeServer) -> None:
    await t.ask("/system Rhyme.")
    await t.until_shown("with a system prompt")
    await t.talk("one")
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "Rhyme."}
    await t.ask("/system")
    await t.until_shown("System prompt of this chat")
    await t.until_shown("Rhyme.")
    await t.press("escape")
    await t.until(lambda: t.composer.has_focus)
    assert t.composer.text == ""
    await t.until_shown("with a system prompt")
    await t.ask("/system")
    await t.until_shown("System prompt of this chat")
    await t.press("ctrl+u", "enter")
    await t.until(lambda: "with a system prompt" not in t.screen)
    await t.ask("two")
    await t.until(lambda: len(server.requests) == 2)
    assert server.requests[1]["messages"][0]["role"] == "user"
    await t.until_ready()


async def test_an_attached_file_is_shown_in_the_composer(
    t: Terminal, server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("1 + 1\n")
    await t.ask(f"/attach {tmp_path}/b.py")
    await t.until_shown("is not a file")
    await t.ask(f"/attach {tmp_path}/a.py")
    await t.until(lambda: t.composer.text == "a.py:\n```py\n1 + 1\n```\n\n")
    await t.type("why?")
    await t.press("enter")
    await t.until(lambda: len(server.requests) == 1)
    assert server.requests[0]["messages"][0]["content"].endswith("```\n\nwhy?")


async def test_a_message_to_a_chat_deleted_elsewhere_is_returned(t: Terminal, home: Home) -> None:
    await t.talk("one")
    delete_chat(home)
    await t.ask("two")
    await t.until_shown("This chat was deleted")
    assert t.composer.text == "two"
    await t.press("ctrl+n", "enter")
    await t.until(lambda: t.messages == ["two", "Yes."])


async def test_an_answer_in_a_chat_deleted_elsewhere_continues_with_a_notice(
    t: Terminal, server: FakeServer, home: Home
) -> None:
    gate = scripts.Gate()
    server.script(scripts.say("half "), gate, scripts.say("whole"))
    await t.ask("one")
    await t.until_shown("half")
    delete_chat(home)
    await t.until_shown("This chat was deleted")
    gate.open()
    await t.until_shown("half whole")


async def test_the_arrow_keys_recall_earlier_questions(t: Terminal) -> None:
    await t.talk("one", "two")
    await t.type("draft")
    await t.press("up")
    assert t.composer.text == "two"
    await t.press("up", "up")
    assert t.composer.text == "one"
    await t.press("down", "down")
    assert t.composer.text == "draft"


async def test_commands_are_suggested_and_run(t: Terminal) -> None:
    await t.type("/hel")
    await t.until_shown("Show all keys")
    await t.press("enter")
    await t.until(lambda: isinstance(t.app.screen, HelpDialog))
    assert t.composer.text == ""
    assert "Ctrl+J" in t.screen
    await t.press("escape")
    await t.type("/the")
    await t.press("tab")
    assert t.composer.text == "/theme "
    await t.press("enter")
    await t.until(lambda: t.app.theme == "mlxserve-light")


async def test_a_slash_alone_and_a_path_are_messages(t: Terminal) -> None:
    await t.talk("/ ", "/etc/hosts is what?")


async def test_the_theme_is_remembered(terminal: Open, home: Home) -> None:
    async with terminal() as t:
        await t.press("f2")
        await t.until(lambda: t.app.theme == "mlxserve-light")
    store = Store.open(home.chats)
    assert store.setting("theme") == "mlxserve-light"
    store.close()


async def test_a_model_is_chosen(t: Terminal, server: FakeServer) -> None:
    await t.ask("/model")
    await t.until(lambda: isinstance(t.app.screen, ModelsDialog))
    await t.press("down", "enter")
    await t.until_shown("large")
    await t.talk("one")
    assert server.requests[0]["model"] == "large"
    await t.ask("/model nonsense")
    await t.until_shown("no such model")


async def test_a_chat_is_renamed_and_exported(t: Terminal, tmp_path: Path) -> None:
    await t.talk("one")
    await t.ask("/rename Better title")
    await t.until_shown("Better title")
    await t.ask(f"/export {tmp_path / 'chat.json'}")
    await t.until((tmp_path / "chat.json").exists)
    await t.ask(f"/export {tmp_path / 'chat.json'}")
    await t.until_shown("Export failed")


async def test_a_chat_is_pinned_and_put_into_a_folder(t: Terminal, home: Home) -> None:
    await t.ask("/pin")
    await t.until_shown("This chat is empty")
    await t.talk("one")
    await t.ask("/pin")
    await t.until_shown("This chat is pinned")
    await t.ask("/folder Work")
    await t.until_shown("in the folder Work")
    await t.ask("/folder " + "x" * 61)
    await t.until_shown("may have 60 characters")
    assert t.composer.text.startswith("/folder x")
    await t.press("ctrl+n")
    await t.until(lambda: t.messages == [])
    await t.talk("two")
    await t.open(ChatsDialog, "ctrl+o")
    await t.until_shown("Work / one")
    assert re.search(r"★ Work / one.*\n.*two", t.screen) is not None
    await t.press("enter")
    await t.until(lambda: t.messages == ["one", "Yes."])
    await t.ask("/folder off")
    await t.until_shown("in no folder")
    await t.ask("/pin")
    await t.until_shown("no longer pinned")
    with closing(Store.open(home.chats)) as store:
        assert [(chat.folder, chat.is_pinned) for chat in store.chats()] == [("", False)] * 2


async def test_the_last_chat_is_opened_again_though_another_is_pinned(
    terminal: Open, home: Home
) -> None:
    for title in ("pinned", "last"):
        write_chat(home, title, title, "Yes.")
    with closing(Store.open(home.chats)) as store:
        store.place(1, is_pinned=True)
    async with terminal(continues=True) as t:
        await t.until(lambda: t.messages == ["last", "Yes."])


async def test_copying_is_explicit_and_safe(
    t: Terminal, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.actions.clipboard.shutil.which", lambda name: None)
    server.script(scripts.say("run:\n\n```sh\nls\x1b[2J\n```\n"))
    await t.press("f3")
    await t.until_shown("Nothing to copy")
    await t.ask("how?")
    await t.until_shown("run:")
    await t.until_ready()
    assert t.app.clipboard == ""
    await t.ask("/code")
    await t.until(lambda: t.app.clipboard == "ls␛[2J\n")


async def test_hostile_text_stays_text(terminal: Open, server: FakeServer) -> None:
    hostile = "\x1b]52;c;x\x07 [red]x[/] [@click=app.quit]y[/] \u202e \x9b2J"
    server.script(scripts.think(hostile), scripts.say(hostile))
    server.models = ["\x1b[31m[bold]evil"]

    async with terminal() as t:
        await t.ask(hostile)
        await t.until_shown("[@click=app.quit]y[/]")
        await t.press("ctrl+t")
        await t.until_ready()
        assert "␛[31m[bold]evil" in t.screen
        assert all(c.isprintable() or c == "\n" for c in t.screen)


async def test_a_click_on_the_thinking_opens_it(t: Terminal, server: FakeServer) -> None:
    server.script(scripts.think("secret"), scripts.say("answer"))
    await t.ask("why?")
    await t.until_shown("answer")
    await t.until_ready()
    await t.pilot.click(AnswerView, offset=(4, 0))
    await t.until_shown("secret")


async def test_a_click_on_a_link_opens_it_and_only_web_pages_are_links(
    t: Terminal, server: FakeServer
) -> None:
    server.script(
        scripts.say("[page](https://a.example/x) [file](file:///etc/passwd) [m](mailto:a@b)")
    )
    opened: list[str] = []
    t.app.open_url = opened.append  # type: ignore[assignment,method-assign]
    await t.ask("where?")
    await t.until_shown("page (https://a.example/x)")
    await t.until_ready()
    for column in range(3, 70, 2):
        await t.pilot.click(AnswerView, offset=(column, 0))
    assert set(opened) == {"https://a.example/x"}
    assert len(opened) == len("page") // 2


async def test_every_screen_works_in_a_small_window(terminal: Open, server: FakeServer) -> None:
    server.script(scripts.say("# A\n\n- b\n\n```py\nc\n```\n\n|d|e|\n|-|-|\n|f|g|\n\nthe end"))

    async with terminal(size=(30, 12)) as t:
        await t.ask("why?")
        await t.until_shown("the end")
        for key, dialog in (("f1", HelpDialog), ("ctrl+o", ChatsDialog)):
            await t.open(dialog, key)
            assert len(t.screen.split("\n")) == 12
            await t.press("escape")
        await t.press("f4")
        await t.until_shown("does not report its")
        await t.press("f4")
        await t.until(lambda: "does not report its" not in t.screen)
        await t.pilot.resize_terminal(40, 20)
        await t.until_shown("the end")


async def test_a_scroll_position_is_kept_while_text_arrives(
    t: Terminal, server: FakeServer
) -> None:
    gate = scripts.Gate()
    server.script(scripts.say("line\n\n" * 60), gate, scripts.say("more\n\n" * 60))
    await t.ask("why?")
    await t.until(gate.reached.is_set)
    await t.until(lambda: t.app.window.transcript.max_scroll_y > 60)
    await t.press("pageup")
    await t.pilot.wait_for_scheduled_animations()
    at = t.app.window.transcript.scroll_y
    gate.open()
    await t.until_ready()
    assert t.app.window.transcript.scroll_y == at
    assert t.app.window.transcript.max_scroll_y > at + 60


async def test_a_long_chat_is_shown_from_its_end_and_extended_when_scrolling_up(
    terminal: Open, home: Home
) -> None:
    store = Store.open(home.chats)
    chat = store.create_chat("long")
    parent = None
    for number in range(2 * Transcript.WINDOW + 10):
        parent = store.add(chat.id, parent, Role.USER, f"number {number:03}").id
    store.close()

    async with terminal() as t:
        await t.press("ctrl+o", "enter")
        await t.until_shown("number 057")
        assert len(t.views) == Transcript.WINDOW
        await t.press("shift+tab", "up")
        t.app.window.transcript.scroll_home(animate=False)
        await t.until(lambda: len(t.views) == 2 * Transcript.WINDOW)
        await t.until_shown("number 034")
        await t.until(lambda: t.app.window.transcript.scroll_y > 0)
        t.app.window.transcript.scroll_home(animate=False)
        await t.until(lambda: t.messages[0] == "number 000")
        await t.until(lambda: "earlier message" not in t.screen)
        await t.open(ChatsDialog, "ctrl+o")
        await t.type("number 003")
        await t.until(lambda: t.app.screen.query_one(OptionList).option_count == 1)
        await t.press("enter")
        await t.until(lambda: t.app.focused in t.views)
        await t.until_shown("number 003")


async def test_a_long_answer_shows_its_end_first_and_then_all_of_it(
    terminal: Open, home: Home
) -> None:
    text = "# Title\n\n" + "some *words* of prose\n\n" * 900 + "the **end**"
    write_chat(home, "long", "tell me", text)
    async with terminal() as t:
        await t.press("ctrl+o", "enter")
        await t.until_shown("end")
        await t.until(lambda: t.views[-1].num_lines == 2 * 902 - 1)
        assert "the end" in t.screen, "Markdown, not its source"
        await t.pilot.resize_terminal(60, 20)
        await t.until(lambda: "the end" in t.screen)


@pytest.mark.slow
async def test_a_large_piece_is_painted_in_parts(t: Terminal, server: FakeServer) -> None:
    gate = scripts.Gate()
    server.script(scripts.say("some words\n\n" * 4_000), gate, scripts.say("the end"))
    numbers: list[int] = []
    await t.ask("go")
    await t.until(gate.reached.is_set)
    while not numbers or numbers[-1] < 7_990:
        await t.pilot.pause(0)
        numbers.append(t.views[-1].num_lines)
    gate.open()
    await t.until_shown("the end")
    steps = sorted(set(numbers))
    assert max(b - a for a, b in pairwise(steps)) < 4_000


def test_without_a_usable_file_the_chat_works_in_memory(home: Home) -> None:
    from tui.launch import open_store

    home.folder.mkdir()
    home.chats.write_text("no database " * 1000)
    store, warning = open_store(home)
    assert "MLXSERVE_HOME" in warning
    store.create_chat("works")
    store.close()


def test_a_terminal_is_needed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tui.launch import main; exit(main(url=None, model=None))"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "MLXSERVE_HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr


async def test_ctrl_c_copies_the_selection(
    t: Terminal, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.actions.clipboard.shutil.which", lambda name: None)
    server.script(scripts.say("some *words* here"))
    await t.ask("why?")
    await t.until_shown("some words here")
    await t.until_ready()
    await t.pilot.mouse_down(AnswerView, offset=(2, 0))
    await t.pilot.hover(AnswerView, offset=(11, 0))
    await t.pilot.mouse_up(AnswerView, offset=(11, 0))
    await t.until(lambda: t.app.screen.get_selected_text() == "some words")
    await t.press("ctrl+c")
    await t.until(lambda: t.app.clipboard == "some words")


async def test_an_editor_that_cannot_open_is_reported(t: Terminal) -> None:
    await t.type("draft")
    await t.press("ctrl+g")
    await t.until_shown("cannot open an editor")
    assert t.composer.text == "draft"


async def test_a_question_is_asked_again_when_its_server_has_died(
    server: FakeServer, home: Home, terminal: Open
) -> None:
    gate = scripts.Gate()
    server.script(scripts.say("half"), gate, scripts.hang_up, reason=None)
    connector = Connector(ConnectOptions(), home, in_place_of_a_server(server))

    async with terminal(connector) as t:
        await t.ask("why?")
        await t.until_shown("half")
        process = connector.server
        assert process is not None
        process.stop()
        gate.open()
        await t.until(lambda: t.messages == ["why?", "Yes."])
        await t.until_ready()
        await t.until_shown("version 2 of 2")
        assert "✗" not in t.screen


async def test_a_server_that_dies_is_restarted_once_and_then_reported_with_its_log(
    server: FakeServer, home: Home, terminal: Open
) -> None:
    connector = Connector(ConnectOptions(), home, in_place_of_a_server(server))

    async with terminal(connector) as t:
        process = connector.server
        assert process is not None
        process.stop()
        await t.until_shown("The server was killed by signal")
        await t.until(lambda: connector.server is not process)
        await t.until_ready()
        again = connector.server
        assert again is not None
        again.stop()
        await t.until(lambda: "Not connected" in t.status)
        await t.until_shown("The full log is")
        await t.press("ctrl+r")
        await t.until(lambda: connector.server is not again)
        await t.until_ready()
        assert "The full log is" not in t.screen


async def test_a_server_that_is_stopped_stays_stopped_until_it_is_wanted(
    server: FakeServer, home: Home, terminal: Open
) -> None:
    asked = (
        f"trap 'exit 0' TERM; echo mlxserve is ready at {server.url}; while :; do sleep 0.02; done"
    )
    connector = Connector(ConnectOptions(), home, in_place_of_a_server(server, asked))

    async with terminal(connector) as t:
        process = connector.server
        assert process is not None
        process.stop()  # as `mlxserve stop` does
        await t.until_shown("The server was stopped and its memory is free.")
        await t.until(lambda: "Ctrl+R reconnects" in t.status)
        assert connector.server is process
        await t.press("ctrl+r")
        await t.until_ready()
        assert connector.server is not process
        await t.talk("still there?")


class Known(ModelCatalog):
    """Finds every model at once, and keeps what is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    async def download(self, name: str) -> AsyncGenerator[Downloaded | Model, None]:
        yield Model(name, ModelOrigin.DOWNLOADED)

    async def use(self, name: str) -> None:
        self.used.append(name)


@pytest.mark.parametrize("starts", [True, False])
async def test_a_model_that_a_found_server_lacks_gets_a_server_of_its_own(
    server: FakeServer, home: Home, terminal: Open, starts: bool
) -> None:
    create = in_place_of_a_server(server, "" if starts else "exit 3")
    connector = Connector(ConnectOptions(url=server.url, is_found=True), home, create)
    models = Known()

    async with terminal(connector, models=models) as t:
        await t.ask("/model org/other")
        if starts:
            await t.until(lambda: models.used == ["org/other"])
            await t.until_shown("keeps its model")
            assert connector.options.url is None
        else:
            await t.until_shown("org/other did not start, so small answers.")
            assert connector.options.url == server.url
            assert models.used == []
        await t.until_ready()
        await t.talk("still there?")
    with closing(Store.open(home.chats)) as store:
        assert store.last_model() == ("org/other" if starts else "small")


async def test_the_chat_goes_on_with_the_usual_model_where_its_own_cannot_be_had(
    server: FakeServer, home: Home, terminal: Open
) -> None:
    usual = ConnectOptions(url=server.url, is_found=True)
    wanted = replace(usual, model="org/gone")
    create = in_place_of_a_server(server, "exit 3")
    connector = Connector(wanted, home, create, instead=usual)

    async with terminal(connector) as t:
        await t.until_shown("org/gone did not start, so small answers.")


async def test_a_question_that_finds_its_server_gone_is_asked_again_once_there_is_another(
    server: FakeServer, home: Home, terminal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = Connector(ConnectOptions(), home, in_place_of_a_server(server))
    ask = OpenChat.ask

    async with terminal(connector) as t:

        async def ask_while_it_dies(*args: Any, **options: Any) -> Any:
            question = await ask(*args, **options)
            await t.app.link.close()  # as when the end of the server has just been noticed
            return question

        monkeypatch.setattr(OpenChat, "ask", ask_while_it_dies)
        await t.ask("why?")
        await t.until_shown("Not connected. Press Ctrl+R")
        t.app.link.connect()
        await t.until(lambda: t.messages == ["why?", "Yes."])
        await t.until_ready()
        assert "✗" not in t.screen


async def test_ctrl_c_alone_does_not_quit(t: Terminal) -> None:
    await t.press("ctrl+c")
    await t.until_shown("Press Ctrl+C again to quit")
    assert t.app.is_running


async def test_a_stopped_answer_is_continued(
    terminal: Open, server: FakeServer, home: Home
) -> None:
    server.script(scripts.say("one, two, "), scripts.Gate())
    server.script(scripts.say("three"))

    async with terminal() as t:
        await t.ask("/continue")
        await t.until_shown("Nothing to continue")
        await t.ask("count")
        await t.until_shown("one, two,")
        await t.press("escape")
        await t.until(lambda: "/continue resumes" in t.status)
        await t.ask("/continue")
        await t.until_shown("one, two, three")
        await t.until_ready()
        assert t.messages == ["count", "one, two, three"]
        last = server.requests[1]
        assert last["messages"][-1] == {"role": "assistant", "content": "one, two, "}
        assert last["continue_final_message"] is True
    last = branch(home)[-1]
    assert (last.text, last.state) == ("one, two, three", State.DONE)


async def test_a_file_is_mentioned_completed_and_sent(
    t: Terminal, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("1 + 1\n")
    (tmp_path / "bad.bin").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    await t.type("why @s")
    await t.until_shown("src/")
    await t.press("tab")
    await t.until_shown("src/main.py")
    await t.press("enter")
    await t.until(lambda: t.composer.text == "why @src/main.py ")
    await t.press("enter")
    await t.until(lambda: len(server.requests) == 1)
    sent = server.requests[0]["messages"][0]["content"]
    assert sent == "why src/main.py \n\nmain.py:\n```py\n1 + 1\n```"
    await t.ask("and @bad.bin")
    await t.until_shown("bad.bin is not a UTF-8 text file")
    assert t.composer.text == "and @bad.bin"
    await t.ask("read @missing.txt")
    await t.until_shown("There is no file missing.txt")
    assert t.composer.text == "read @missing.txt"
    assert len(server.requests) == 1
    await t.press("enter")
    await t.until(lambda: len(server.requests) == 2)


async def test_a_picture_is_mentioned_shown_and_sent(
    t: Terminal, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(file_of(picture()))
    await t.ask("/attach a.png")
    await t.until(lambda: t.composer.text == "@a.png ")
    await t.type("what is it?")
    await t.press("enter")
    await t.until_shown("Yes.")
    await t.until_ready()
    await t.until_shown("[a.png]")
    await t.until_shown("▀▀▀")
    image, text = server.requests[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text == {"type": "text", "text": "a.png what is it?"}
    await t.ask("and its colour?")
    await t.until(lambda: len(server.requests) == 2)
    assert server.requests[1]["messages"][0]["content"][0] == image


async def test_documents_and_folders_are_mentioned_shown_and_sent(
    terminal: Open, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "notes").mkdir()
    (tmp_path / "old.txt").write_bytes(b"caf\xe9")
    server.model_fields = {"capabilities": ["completion"], "owned_by": "mlxserve"}
    server.warning = f"fitted: x; 1 of 2 pages of a.pdf {NOT_ALL_READ}"

    def read(path: Path, typed: str) -> tuple[str, str]:
        if path.name == "bad.docx":
            raise ValueError(f"{typed} is damaged.")
        return path.name, f"data:text/plain;base64,{b64encode(typed.encode()).decode()}"

    async with terminal(read_document=read) as t:
        await t.ask("/attach a.pdf")
        await t.until(lambda: t.composer.text == "@a.pdf ")
        await t.type("and @notes/ and @old.txt now")
        await t.press("enter")
        await t.until_shown("[a.pdf]")
        await t.until_shown("1 of 2 pages of a.pdf were read")
        *files, text = server.requests[0]["messages"][0]["content"]
        assert [part["file"]["filename"] for part in files] == ["a.pdf", "notes", "old.txt"]
        assert text == {"type": "text", "text": "a.pdf and notes/ and old.txt now"}
        (tmp_path / "bad.docx").write_bytes(b"PK")
        await t.ask("and @bad.docx")
        await t.until_shown("bad.docx is damaged.")
        assert t.composer.text == "and @bad.docx"


async def test_a_server_that_reads_no_documents_gets_their_texts(
    terminal: Open, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    url = f"data:text/plain;base64,{b64encode(b'It ends in May.').decode()}"
    server.model_fields = {"owned_by": "another"}
    async with terminal(read_document=lambda path, typed: (path.name, url)) as t:
        await t.ask("When, @a.pdf ?")
        await t.until_answered()
    [message] = server.requests[-1]["messages"]
    assert message["content"] == "a.pdf:\nIt ends in May.\n\nWhen, a.pdf ?"


async def test_a_model_that_reads_text_only_gets_no_picture(
    terminal: Open, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(file_of(picture()))
    server.model_fields = {"capabilities": ["completion"]}

    async with terminal() as t:
        await t.until_ready()
        await t.ask("what is @a.png")
        await t.until_shown("small reads text only. Choose a model that sees images")
        assert t.composer.text == "what is @a.png"
        assert server.requests == []


async def test_code_blocks_are_copied_one_after_the_other(
    t: Terminal, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.actions.clipboard.shutil.which", lambda name: None)
    server.script(scripts.say("```\none\n```\n\nand\n\n```\ntwo\n```\n"))
    await t.ask("how?")
    await t.until_shown("two")
    await t.until_ready()
    await t.press("shift+tab")
    for expected in ("two\n", "one\n", "two\n"):
        await t.press("c")
        await t.until(partial(has_copied, t, expected))
    await t.press("escape")
    await t.until(lambda: t.app.focused is t.composer)
    await t.ask("/code 1")
    await t.until(lambda: t.app.clipboard == "one\n")
    await t.ask("/code 3")
    await t.until_shown("has 2 code blocks")


def has_found(t: Terminal, line: str) -> bool:
    """Whether the message with this first line is the only one marked as found."""
    marked = [view.message.text for view in t.views if view.has_class("found")]
    return [text.split("\n")[0] for text in marked] == [line]


async def test_find_goes_from_the_last_match_to_earlier_ones(terminal: Open, home: Home) -> None:
    store = Store.open(home.chats)
    chat = store.create_chat("long")
    parent = None
    for number in range(2 * Transcript.WINDOW):
        words = f"number {number}" + ("\n\n" * 40 + "a Lighthouse" if number in (3, 40) else "")
        parent = store.add(chat.id, parent, Role.USER, words).id
    store.close()

    async with terminal() as t:
        await t.press("ctrl+o", "enter")
        await t.until_shown("number 47")
        await t.press("f5")
        assert t.composer.text == "/find "
        for expected in ("number 40", "number 3", "number 40"):
            await t.ask("/find lighthouse")
            await t.until(partial(has_found, t, expected))
            await t.until_shown("a Lighthouse")
            assert t.composer.text == "/find lighthouse"
        await t.ask("/find harbour")
        await t.until_shown("No match in this chat")


async def test_a_dialog_is_closed_and_ctrl_q_quits_from_it(t: Terminal) -> None:
    for key in ("ctrl+c", "escape"):
        await t.open(HelpDialog, "f1")
        await t.press(key)
        await t.until(lambda: not isinstance(t.app.screen, HelpDialog))
    await t.open(HelpDialog, "f1")
    await t.press("ctrl+q")
    await t.until(lambda: not t.app.is_running)


async def test_sampling_is_set_shown_sent_and_remembered(
    terminal: Open, server: FakeServer, home: Home
) -> None:
    home.create()
    home.presets.write_text('[creative]\ntemperature = 1.1\nsystem = "Rhyme."\n')

    async with terminal() as t:
        await t.ask("/set")
        await t.until_shown("the model's defaults apply")
        await t.ask("/set temperature 0.3")
        await t.until_shown("temperature 0.3 ·")
        await t.ask("why?")
        await t.until(lambda: len(server.requests) == 1)
        assert server.requests[0]["temperature"] == 0.3
        await t.until_ready()
        await t.ask("/set temperature warm")
        await t.until_shown("temperature is a number from 0 to 2")
        assert t.composer.text == "/set temperature warm"
        t.composer.write("")
        await t.ask("/set preset creative")
        await t.until_shown("temperature 1.1")
        await t.ask("and now?")
        await t.until(lambda: len(server.requests) == 2)
        assert server.requests[1]["messages"][0] == {"role": "system", "content": "Rhyme."}
        await t.until_ready()
    async with terminal() as t:
        await t.until_shown("temperature 1.1 ·")
        await t.ask("/set temperature off")
        await t.until(lambda: "temperature 1.1" not in t.screen)


async def test_the_last_chat_is_continued_and_a_draft_is_kept(terminal: Open) -> None:
    async with terminal() as t:
        await t.talk("why?")
        await t.type("half a thought")
    assert t.app.has_chat
    async with terminal(continues=True) as t:
        await t.until(lambda: t.messages == ["why?", "Yes."])
        assert t.composer.text == "half a thought"
        t.composer.write("")
    assert t.app.has_chat
    async with terminal() as t:
        assert t.messages == []
        assert t.composer.text == ""
    assert not t.app.has_chat


async def test_scrolled_up_the_end_is_one_key_away(t: Terminal, server: FakeServer) -> None:
    server.script(scripts.say("\n\n".join(f"line {number}" for number in range(80))))
    await t.ask("count")
    await t.until_shown("line 79")
    await t.until_ready()
    assert "more lines" not in t.screen
    await t.press("pageup", "pageup")
    await t.until_shown("more lines · Ctrl+End")
    await t.press("ctrl+end")
    await t.until_shown("line 79")
    await t.until(lambda: "more lines" not in t.screen)


async def test_the_palette_knows_the_names_of_the_commands(t: Terminal) -> None:
    await t.press("ctrl+p")
    await t.type("retry")
    await t.until_shown("/retry  Ctrl+R")


async def test_enter_pressed_while_the_list_of_commands_empties_sends_the_text(t: Terminal) -> None:
    """What is typed at once, as a paste by a terminal or tmux, outruns the list."""
    await t.until_ready()
    t.composer.load_text("/export json /no/such/folder/chat.json")
    await t.pilot.pause()
    t.composer.has_suggestions = True  # as after "/export"
    await t.press("enter")
    await t.until_shown("This chat is empty")
    assert t.composer.text == ""
