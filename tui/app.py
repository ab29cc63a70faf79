"""The terminal: `mlxserve chat`. Every key and command ends here, as an action.

    keys, slash commands, palette -> action -> exchange   asking and answering
                                            -> browsing   which chat and branch is open
                                            -> a dialog

Knows nothing of SQL, HTTP or Markdown.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.screen import Screen

from tui.actions.answering import Exchange
from tui.actions.browsing import Browsing
from tui.actions.copying import Copying
from tui.actions.draft import Writing
from tui.actions.model_switch import Choosing
from tui.actions.server_link import Link
from tui.chat.export import export, file_name, target
from tui.chat.messages import CAN_CONTINUE, Message, Role
from tui.chat.open_chat import Conversation
from tui.chat.store import Store, StoreError
from tui.commands import COMMANDS, Command, looks_like_command, parse
from tui.engine.panel import EnginePlace, Watched
from tui.home import Home
from tui.leaving import EndingSignals
from tui.opening import FirstFrame
from tui.paint.theme import DARK, LIGHT
from tui.takeover import driver_after
from tui.talk.connection import Connector
from tui.talk.models import Models
from tui.widgets.composer import Composer
from tui.widgets.dialogs import ChatsDialog, HelpDialog
from tui.widgets.message import MessageView
from tui.widgets.transcript import Transcript
from tui.widgets.window import ChatWindow

_FIND = "/find "
_SECOND_PRESS = 2.0  # Ctrl+C and Esc mean something else when pressed twice within this


class ChatApp(App[None]):
    """One window, one open chat, at most one answer coming."""

    TITLE = "mlxserve"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(",".join(command.keys), command.action, command.title, show=False)
        for command in COMMANDS
        if command.keys
    ]

    def __init__(
        self,
        connector: Connector,
        store: Store,
        home: Home,
        *,
        theme_name: str = DARK.name,
        warning: str = "",
        models: Models | None = None,
        frame: FirstFrame | None = None,
    ) -> None:
        super().__init__(driver_class=None if frame is None else driver_after(frame))
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = theme_name if theme_name in (DARK.name, LIGHT.name) else DARK.name
        self._home = home
        self._warning = warning
        self._conversation = Conversation(store)
        self.window = ChatWindow()
        self.exchange = Exchange(
            self._conversation, self.window, partial(self.run_worker, group="turn")
        )
        self.link = Link(
            connector, self.window, partial(self.run_worker, group="connect"), self._connected
        )
        self.exchange.link = self.link
        self.browsing = Browsing(self._conversation, self.exchange, self.window, self._opened)
        self._choosing = Choosing(
            self, self.link, self.exchange, models or Models(), self._show_model
        )
        self._copying = Copying(self)
        self._writing = Writing(self, self.window)
        self._engine_place = EnginePlace(self, self._watched)
        self._editing: Message | None = None
        self._is_leaving = False
        self._last_press: dict[str, float] = {}

    # The window

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            yield self.window

    async def on_mount(self) -> None:
        self._signals = EndingSignals(self._leave)
        self.exchange.start()
        self.window.composer.focus()
        await self.window.show(self._conversation)
        self._hint()
        if self._warning:
            await self.window.transcript.say(self._warning, is_error=True)
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """What the first picture need not wait for."""
        self.link.connect()
        self.run_worker(self._load_history())
        self.run_worker(self._engine_place.watch_pages(), group="pages")
        for module in ("markdown_it", "tui.paint.syntax"):
            self.run_worker(partial(import_module, module), thread=True)

    def on_resize(self, event: Resize) -> None:
        self._engine_place.resized(event.size)

    def on_descendant_focus(self) -> None:
        self._hint()

    def get_system_commands(
        self,
        screen: Screen[object],  # noqa: ARG002 (the palette passes it)
    ) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            yield SystemCommand(command.title, command.help, partial(self._run, command, ""))

    def _hint(self) -> None:
        self.window.hint(is_editing=self._editing is not None)

    def _show_model(self) -> None:
        self.window.show_model(self.link.model, has_system=bool(self._conversation.system))

    def _connected(self) -> None:
        """Connecting has ended, one way or the other."""
        self._show_model()
        if self.link.connection is None:
            self.exchange.give_queue_back()
        self.exchange.send_next()

    def _opened(self) -> None:
        """Another chat or branch is open."""
        self._stop_editing()
        self._show_model()

    # What the reader does

    @on(Composer.Sent)
    async def _sent(self, event: Composer.Sent) -> None:
        parsed = parse(event.text)
        if parsed is not None and parsed[1] and not parsed[0].argument:
            self.window.composer.write(event.text)
            self.notify(f"{parsed[0].usage} takes nothing after it.", markup=False)
        elif parsed is not None:
            await self._run(*parsed)
        elif looks_like_command(event.text):
            self.window.composer.write(event.text)
            self.notify("There is no such command. F1 shows them all.", markup=False)
        else:
            self._send(event.text)

    def _send(self, text: str) -> None:
        self.browsing.end_find()
        whole = self._writing.with_files(text)
        if whole is None:
            return
        if self._editing is not None:
            instead_of = self._editing
            self._stop_editing()
            self.exchange.turn_when_connected(partial(self.exchange.ask, whole, instead_of))
        else:
            self.exchange.send(whole)

    @on(ChatWindow.Chosen)
    async def _chosen(self, event: ChatWindow.Chosen) -> None:
        await self._run(event.command, "")

    @on(MessageView.Edit)
    def _edit(self, event: MessageView.Edit) -> None:
        question = self._question(event.message)
        if question is not None:
            self._editing = question
            self.window.composer.write(question.text)
            self.window.composer.focus()
            self._hint()

    @on(MessageView.Retry)
    def _retry(self, event: MessageView.Retry) -> None:
        question = self._question(event.message)
        if question is not None:
            self.exchange.turn_when_connected(partial(self.exchange.reply, question))

    def _question(self, message: Message) -> Message | None:
        """The message itself, or what it answers."""
        return message if message.role is Role.USER else self._conversation.question_of(message)

    @on(MessageView.Copy)
    def _copy(self, event: MessageView.Copy) -> None:
        self._copying.message(event.message)

    @on(MessageView.CopyCode)
    def _copy_code(self, event: MessageView.CopyCode) -> None:
        self._copying.next_code(event.message)

    @on(MessageView.ShowVersion)
    def _show_version(self, event: MessageView.ShowVersion) -> None:
        self.browsing.show_branch(event.message_id)

    @on(Transcript.WantsEarlier)
    async def _show_earlier(self) -> None:
        await self.window.transcript.show_earlier(self.window.palette)

    def _stop_editing(self) -> None:
        self._editing = None
        self._hint()

    async def _load_history(self) -> None:
        self.window.composer.use_history(await self._conversation.history())

    # Commands

    async def _run(self, command: Command, argument: str) -> None:
        if not command.argument:
            await self.run_action(f"app.{command.action}")
            return
        action = getattr(self, f"action_{command.action}")
        result = action(argument)
        if result is not None:
            await result

    def action_new_chat(self) -> None:
        self.browsing.new()

    def action_stop(self) -> None:
        """Esc: leave editing, stop the answer, go back to writing; twice: edit the last."""
        composer = self.window.composer
        if self._editing is not None:
            self._stop_editing()
            composer.load_text("")
        elif self.exchange.is_answering:
            self.exchange.stop()
        elif not composer.has_focus:
            composer.focus()
        elif composer.text.startswith(_FIND):
            composer.load_text("")
            self.browsing.end_find()
        elif not composer.text and self._is_second_press("escape"):
            self.action_edit_last()

    def action_retry(self) -> None:
        path = self._conversation.path
        if self.link.is_lost:
            self.link.connect()
        elif path:
            self._retry(MessageView.Retry(path[-1]))

    def action_edit_last(self) -> None:
        if self._conversation.path:
            self._edit(MessageView.Edit(self._conversation.path[-1]))

    def action_sibling(self, step: int) -> None:
        self.browsing.show_sibling(step)

    async def action_chats(self) -> None:
        try:
            chats = await self._conversation.chats()
        except StoreError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        browsing = self.browsing
        dialog = ChatsDialog(chats, self._conversation.search, browsing.delete)
        self.push_screen(dialog, browsing.open)

    async def action_find(self, words: str = "") -> None:
        if not words:
            self._writing.begin(_FIND)
        elif await self.browsing.find(words):
            self._writing.begin(f"{_FIND}{words}")  # Enter goes on to the one before
        else:
            self.notify("No message of this chat has these words.", markup=False)

    def action_rename(self, title: str = "") -> None:
        if self._conversation.chat is None:
            self.notify("This chat is still empty: ask something first.", markup=False)
        elif not title:
            self._writing.begin("/rename ")
        else:
            self.browsing.rename(title)

    def action_system(self, text: str = "") -> None:
        """Set the system prompt; without a text, put it where it can be changed."""
        if text:
            self.browsing.set_system("" if text == "off" else text)
        else:
            self._writing.begin(f"/system {self._conversation.system}")

    def action_thinking(self) -> None:
        is_open = self.exchange.is_thinking_open = not self.exchange.is_thinking_open
        for view in self.window.transcript.answers():
            view.open_thinking(is_open=is_open)

    def action_copy(self) -> None:
        self._copying.answer(self.exchange.last_answer)

    def action_copy_code(self, number: str = "") -> None:
        self._copying.code(self.exchange.last_answer, number)

    def action_continue_answer(self) -> None:
        path = self._conversation.path
        if not path or path[-1].state not in CAN_CONTINUE or not path[-1].text:
            self.notify(
                "There is nothing to go on with: no answer was stopped or cut off.", markup=False
            )
        else:
            self.exchange.turn_when_connected(partial(self.exchange.go_on, path[-1]))

    def action_export(self, argument: str = "") -> None:
        chat = self._conversation.chat
        if chat is None:
            self.notify("This chat is still empty: ask something first.", markup=False)
            return
        kind, to = target(argument)
        to = self._home.exports / file_name(chat, kind) if to is None else to
        try:
            export(chat, self._conversation.path, kind, to)
        except OSError as error:
            self.notify(
                f"Not exported: {error}. Name another file.", severity="error", markup=False
            )
        else:
            self.notify(f"Exported to {to}", markup=False)

    def action_model(self, name: str = "") -> None:
        self._choosing.choose(name)

    def action_attach(self, name: str = "") -> None:
        self._writing.attach(name)

    def action_editor(self) -> None:
        self._writing.in_editor()

    async def action_engine(self) -> None:
        """Show the engine beside the chat, or instead of it; or hide it again."""
        await self._engine_place.toggle()

    def _watched(self) -> Watched:
        connection, answer = self.link.connection, self.exchange.last_answer
        return Watched(
            engine=None if connection is None else connection.client.engine,
            figures=None if answer is None else answer.figures,
            request_id=self.exchange.request_id,
        )

    def action_theme(self) -> None:
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name
        self.window.transcript.use_palette(self.window.palette)
        self.run_worker(self._remember_theme(self.theme))

    async def _remember_theme(self, name: str) -> None:
        try:
            await self._conversation.set_setting("theme", name)
        except StoreError as error:
            self.notify(str(error), severity="error", markup=False)

    def action_help(self) -> None:
        self.push_screen(HelpDialog())

    def action_focus_message(self, step: int) -> None:
        self.window.focus_message(step)

    def action_scroll_transcript(self, step: int) -> None:
        if step < 0:
            self.window.transcript.scroll_page_up()
        else:
            self.window.transcript.scroll_page_down()

    # The end

    def action_help_quit(self) -> None:
        """Ctrl+C: copy what is selected, or stop the answer; twice: leave."""
        if self._copying.selection():
            return
        if self._is_second_press("ctrl+c"):
            self._leave()
        elif self.exchange.is_answering:
            self.exchange.stop()
        else:
            self.notify("Press Ctrl+C again to leave.", timeout=_SECOND_PRESS, markup=False)

    def _leave(self) -> None:
        self.run_worker(self.action_quit(), group="quit")

    async def action_quit(self) -> None:
        """Keep what has come, then leave."""
        if self._is_leaving:
            return
        self._is_leaving = True
        await self.exchange.finish()
        await self.link.close()
        await self._conversation.close()
        self.exit()

    def on_unmount(self) -> None:
        self._signals.restore()

    def _is_second_press(self, key: str) -> bool:
        now = time.monotonic()
        is_second = now - self._last_press.get(key, -_SECOND_PRESS) < _SECOND_PRESS
        self._last_press[key] = now
        return is_second
