"""The app of `mlxserve chat`.

    keys, slash commands, palette -> action -> answering   asking and answering
                                            -> browsing    opening chats and branches
                                            -> a dialog

Every key and every command becomes an action here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.driver import Driver
from textual.events import Resize
from textual.screen import Screen

from tui.actions.answering import Answering
from tui.actions.browsing import Browsing
from tui.actions.copying import Copying
from tui.actions.draft import Draft
from tui.actions.model_switch import ModelSwitch
from tui.actions.server_link import ServerLink
from tui.chat.export import export, file_name, target
from tui.chat.messages import CAN_CONTINUE, ChatRecord, Role, StoredMessage
from tui.chat.open_chat import OpenChat
from tui.chat.sampling import NAMES, PRESET, Sampling, SamplingRefused, preset
from tui.chat.store import Store, StoreError
from tui.commands import COMMANDS, Command, key_words, looks_like_command, parse
from tui.engine.panel import PanelInput
from tui.engine.placement import PanelPlacement
from tui.home import Home
from tui.importing import import_in_turn
from tui.leaving import EndingSignals
from tui.paint.theme import DARK, LIGHT
from tui.talk.connection import Connector
from tui.talk.errors import ChatError
from tui.talk.models import BUNDLED, Model, ModelCatalog, best_of
from tui.widgets.composer import Composer
from tui.widgets.dialogs import ChatChoice, ChatsDialog, HelpDialog
from tui.widgets.message import MessageView
from tui.widgets.transcript import Transcript
from tui.widgets.welcome import MAX_RECENT, Welcome, WelcomeFacts
from tui.widgets.window import ChatWindow

_FIND = "/find "
_SECOND_PRESS = 2.0  # seconds in which pressing Ctrl+C or Esc twice means something else


class ChatApp(App[None]):
    """One window, one open chat, at most one running answer."""

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
        notice: str = "",
        continues: bool = False,
        models: ModelCatalog | None = None,
        driver: type[Driver] | None = None,
    ) -> None:
        super().__init__(driver_class=driver)
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = theme_name if theme_name in (DARK.name, LIGHT.name) else DARK.name
        self._home = home
        self._warning = warning
        self._notice = notice
        self._continues = continues  # opens the last chat
        self._open_chat = OpenChat(store)
        self.window = ChatWindow()
        self.link = ServerLink(
            connector, self.window, partial(self.run_worker, group="connect"), self._connected
        )
        self.answering = Answering(
            self._open_chat,
            self.link,
            self.window,
            partial(self.run_worker, group="operation"),
            self._show_header,
        )
        self.browsing = Browsing(self._open_chat, self.answering, self.window, self._opened)
        self._models = models or ModelCatalog()
        self._best: Model | None = None  # that this machine runs, once it was looked for
        self._model_switch = ModelSwitch(
            self,
            self.link,
            self.answering,
            self._models,
            self._show_header,
            partial(self.run_worker, group="model", exclusive=True),
        )
        self._copying = Copying(self)
        self._draft = Draft(self, self.window, self._open_chat)
        self._panel_placement = PanelPlacement(self, self._panel_input)
        self._editing: StoredMessage | None = None
        self._is_quitting = False
        self._last_press: dict[str, float] = {}

    # The window

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            yield self.window

    async def on_mount(self) -> None:
        self._signals = EndingSignals(self._request_quit)
        self.window.composer.focus()
        await self.window.show(self._open_chat)
        self._hint()
        if self._warning or self._notice:
            words = self._warning or self._notice
            await self.window.transcript.say(words, is_error=bool(self._warning))
        await self._draft.restore()
        if self._continues:
            await self._open_last_chat()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """Start what the first picture does not need."""
        self.link.connect()
        self.run_worker(self.link.watch(), group="watch")
        self.run_worker(self._load_history())
        self.run_worker(self._panel_placement.watch_pages(), group="pages")
        for module in ("markdown_it", "tui.paint.syntax"):
            self.run_worker(partial(import_in_turn, module), thread=True)

    async def _open_last_chat(self) -> None:
        if chats := await self._chats():
            self.browsing.open(ChatChoice(chats[0].id))

    @property
    def has_chat(self) -> bool:
        """Whether a chat is open that has messages."""
        return self._open_chat.chat is not None

    def on_resize(self, event: Resize) -> None:
        self._panel_placement.resized(event.size)

    def on_descendant_focus(self) -> None:
        self._hint()

    def get_system_commands(
        self,
        screen: Screen[object],  # noqa: ARG002 (the palette passes it)
    ) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            keys = " ".join(key_words(key) for key in command.keys)
            title = f"/{command.name}  {keys}".rstrip()
            yield SystemCommand(title, command.help, partial(self._run, command, ""))

    def _hint(self) -> None:
        self.window.hint(is_editing=self._editing is not None)

    def _show_header(self) -> None:
        self.window.show_header(
            self.link.model,
            self.answering.context_use,
            self.link.address,
            [
                *(["with a system prompt"] if self._open_chat.system else []),
                self.answering.sampling.words,
            ],
        )

    def _connected(self) -> None:
        """Called after connecting, successful or not."""
        self._show_header()
        if self.link.connection is None:
            self.answering.return_queue()
        else:
            self.answering.ask_again()
            self.run_worker(self._fill_welcome(), group="welcome", exclusive=True)
        self.answering.send_next()

    async def _fill_welcome(self) -> None:
        """What an empty chat says, once the model is known; looking for a larger one takes a while."""
        facts = WelcomeFacts(self.link.model, recent=(await self._chats() or [])[:MAX_RECENT])
        self.window.transcript.welcome(facts)
        if facts.model != BUNDLED or not self.link.can_change_model:
            return
        if self._best is None:
            try:
                self._best = best_of(await self._models.find())
            except ChatError:
                return  # the list of models, on demand, says why
        self.window.transcript.welcome(replace(facts, recommended=self._best))

    async def _chats(self) -> list[ChatRecord] | None:
        """The earlier chats; None if they cannot be read, which is said."""
        try:
            return await self._open_chat.chats()
        except StoreError as error:
            self.notify(str(error), severity="error", markup=False)
            return None

    @on(Welcome.Asked)
    def _idea_asked(self, event: Welcome.Asked) -> None:
        self.window.composer.focus()
        self._send(event.text)

    @on(Welcome.Opened)
    def _recent_opened(self, event: Welcome.Opened) -> None:
        self.browsing.open(ChatChoice(event.chat_id))

    @on(Welcome.Wanted)
    def _model_wanted(self, event: Welcome.Wanted) -> None:
        self.window.composer.focus()
        self._model_switch.choose(event.model.name)

    def _opened(self) -> None:
        """Called after another chat or branch was opened."""
        self._stop_editing()
        self._show_header()
        if self._open_chat.chat is None:
            self.run_worker(self._fill_welcome(), group="welcome", exclusive=True)

    # Messages

    @on(Composer.Sent)
    async def _sent(self, event: Composer.Sent) -> None:
        parsed = parse(event.text)
        if parsed is not None and parsed[1] and not parsed[0].argument:
            self.window.composer.write(event.text)
            self.notify(f"{parsed[0].usage} takes no argument.", markup=False)
        elif parsed is not None:
            await self._run(*parsed)
        elif looks_like_command(event.text):
            self.window.composer.write(event.text)
            self.notify("Unknown command. F1 lists all commands.", markup=False)
        else:
            self._send(event.text)

    def _send(self, text: str) -> None:
        self.browsing.end_find()
        message = self._draft.with_files(text)
        if message is None:
            return
        if self._editing is not None:
            instead_of = self._editing
            self._stop_editing()
            self.answering.run_when_connected(partial(self.answering.ask, message, instead_of))
        else:
            self.answering.send(message)

    @on(Composer.SentNothing)
    def _sent_nothing(self) -> None:
        """Enter continues a full chat without its oldest messages."""
        if self.answering.is_full and not self.answering.is_answering:
            self.answering.run_when_connected(self.answering.go_on_shorter)

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
            self._say_what_moves(question)
            self.answering.run_when_connected(partial(self.answering.reply, question))

    def _say_what_moves(self, question: StoredMessage) -> None:
        """Messages behind an answer that is regenerated stay with its old version."""
        path = self._open_chat.path
        later = len(path) - path.index(question) - 2 if question in path else 0
        if later > 0:
            noun = "message stays" if later == 1 else "messages stay"
            self.notify(
                f"{later} later {noun} with the version before: Alt+Left shows it.", markup=False
            )

    def _question(self, message: StoredMessage) -> StoredMessage | None:
        """The message if it is a question, else the question that it answers."""
        return message if message.role is Role.USER else self._open_chat.question_of(message)

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
        self.window.composer.use_history(await self._open_chat.history())
        self.answering.sampling = Sampling.from_text(await self._open_chat.setting("sampling"))
        self._show_header()

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
        """Esc: cancel editing, stop the answer, or focus the composer; twice: edit the last message."""
        composer = self.window.composer
        if self._editing is not None:
            self._stop_editing()
            composer.load_text("")
        elif self.answering.is_answering:
            self.answering.stop()
        elif not composer.has_focus:
            composer.focus()
        elif composer.text.startswith(_FIND):
            composer.load_text("")
            self.browsing.end_find()
        elif not composer.text and self._is_second_press("escape"):
            self.action_edit_last()

    def action_retry(self) -> None:
        path = self._open_chat.path
        if self.link.is_lost:
            self.link.connect()
        elif path:
            self._retry(MessageView.Retry(path[-1]))

    def action_edit_last(self) -> None:
        if self._open_chat.path:
            self._edit(MessageView.Edit(self._open_chat.path[-1]))

    def action_sibling(self, step: int) -> None:
        self.browsing.show_sibling(step)

    async def action_chats(self) -> None:
        chats = await self._chats()
        if chats is None:
            return
        browsing = self.browsing
        dialog = ChatsDialog(chats, self._open_chat.search, browsing.delete)
        self.push_screen(dialog, browsing.open)

    async def action_find(self, words: str = "") -> None:
        if not words:
            self._draft.begin(_FIND)
        elif await self.browsing.find(words):
            self._draft.begin(f"{_FIND}{words}")  # Enter goes to the previous match
        else:
            self.notify("No match in this chat.", markup=False)

    def action_rename(self, title: str = "") -> None:
        if self._open_chat.chat is None:
            self.notify("This chat is empty: send a message first.", markup=False)
        elif not title:
            self._draft.begin("/rename ")
        else:
            self.browsing.rename(title)

    def action_system(self, text: str = "") -> None:
        """Set the system prompt; without a text, put the current one into the composer."""
        if text:
            self.browsing.set_system("" if text == "off" else text)
        else:
            self._draft.begin(f"/system {self._open_chat.system}")

    async def action_set_sampling(self, argument: str = "") -> None:
        """Change how answers are sampled; without an argument, show how."""
        name, _, value = argument.partition(" ")
        sampling = self.answering.sampling
        if not name:
            set_now = sampling.words or "nothing; the model's defaults apply"
            self.notify(f"Set: {set_now}. Names: {', '.join(NAMES)}, {PRESET}.", markup=False)
            return
        try:
            changed = (
                preset(self._home.presets, value.strip())
                if name == PRESET
                else sampling.changed(name, value.strip())
            )
        except SamplingRefused as error:
            self._draft.begin(f"/set {argument}")
            self.notify(str(error), severity="error", markup=False)
            return
        self.answering.sampling = changed
        self._show_header()
        await self._remember("sampling", changed.as_text())

    def action_thinking(self) -> None:
        is_open = self.answering.is_thinking_open = not self.answering.is_thinking_open
        for view in self.window.transcript.answers():
            view.open_thinking(is_open=is_open)

    def action_copy(self) -> None:
        self._copying.answer(self.answering.last_answer)

    def action_copy_code(self, number: str = "") -> None:
        self._copying.code(self.answering.last_answer, number)

    def action_continue_answer(self) -> None:
        path = self._open_chat.path
        if not path or path[-1].state not in CAN_CONTINUE or not path[-1].text:
            self.notify(
                "Nothing to continue: the last answer was not stopped or cut off.", markup=False
            )
        else:
            self.answering.run_when_connected(partial(self.answering.continue_answer, path[-1]))

    def action_compact(self) -> None:
        if self._open_chat.path:
            self.answering.run_when_connected(self.answering.compact)
        else:
            self.notify("This chat is empty: send a message first.", markup=False)

    def action_export(self, argument: str = "") -> None:
        chat = self._open_chat.chat
        if chat is None:
            self.notify("This chat is empty: send a message first.", markup=False)
            return
        kind, to = target(argument)
        to = self._home.exports / file_name(chat, kind) if to is None else to
        try:
            export(chat, self._open_chat.path, kind, to)
        except OSError as error:
            self.notify(
                f"Export failed: {error}. Choose another file.", severity="error", markup=False
            )
        else:
            self.notify(f"Exported to {to}", markup=False)

    def action_model(self, name: str = "") -> None:
        self._model_switch.choose(name)

    def action_attach(self, name: str = "") -> None:
        self._draft.attach(name)

    def action_editor(self) -> None:
        self._draft.in_editor()

    async def action_engine(self) -> None:
        """Show the engine beside the chat or instead of it, or hide it."""
        await self._panel_placement.toggle()

    def _panel_input(self) -> PanelInput:
        connection, answer = self.link.connection, self.answering.last_answer
        return PanelInput(
            engine=None if connection is None else connection.client.engine,
            answer_stats=None if answer is None else answer.stats,
            request_id=self.answering.request_id,
        )

    def action_theme(self) -> None:
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name
        self.window.transcript.use_palette(self.window.palette)
        self.run_worker(self._remember("theme", self.theme))

    async def _remember(self, name: str, value: str) -> None:
        try:
            await self._open_chat.set_setting(name, value)
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

    def action_scroll_to_end(self) -> None:
        self.window.transcript.follow()

    # Quitting

    def action_help_quit(self) -> None:
        """Ctrl+C: copy the selection, or stop the answer; twice: quit."""
        if self._copying.selection():
            return
        if self._is_second_press("ctrl+c"):
            self._request_quit()
        elif self.answering.is_answering:
            self.answering.stop()
        else:
            self.notify("Press Ctrl+C again to quit.", timeout=_SECOND_PRESS, markup=False)

    def _request_quit(self) -> None:
        self.run_worker(self.action_quit(), group="quit")

    async def action_quit(self) -> None:
        """Save the text so far, then quit."""
        if self._is_quitting:
            return
        self._is_quitting = True
        await self.answering.finish()
        await self.link.close()
        with suppress(StoreError):  # there is no screen any more to report it on
            await self._draft.keep()
        await self._open_chat.close()
        self.exit()

    def on_unmount(self) -> None:
        self._signals.restore()

    def _is_second_press(self, key: str) -> bool:
        now = time.monotonic()
        is_second = now - self._last_press.get(key, -_SECOND_PRESS) < _SECOND_PRESS
        self._last_press[key] = now
        return is_second
