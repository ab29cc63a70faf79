"""The app of `mlxserve chat`.

    keys, slash commands, palette -> handler of the command -> one of tui/actions
    messages of widgets                                     -> the same

Every object of tui/actions owns some of the commands; here they are put together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.driver import Driver
from textual.events import Resize
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widgets import TextArea

from mlxserve.history.chat_file import StoreError
from mlxserve.history.store import Store
from mlxserve.hub.model_choices import ModelCatalog
from mlxserve.mcp.servers_file import usual_file
from mlxserve.mcp.toolbox import Toolbox
from tui.actions.answering import Answering
from tui.actions.browsing import Browsing
from tui.actions.copying import Copying
from tui.actions.draft import Draft
from tui.actions.loaded_models import LoadedModels
from tui.actions.model_switch import ModelSwitch
from tui.actions.placing import Placing
from tui.actions.prompt_choice import PromptChoice
from tui.actions.revising import Revising
from tui.actions.sampling_choice import SamplingChoice
from tui.actions.second_press import SECONDS, SecondPress
from tui.actions.server_link import ServerLink
from tui.actions.tool_use import ToolUse
from tui.actions.welcoming import Welcoming
from tui.chat.mentions import ReadDocument
from tui.chat.open_chat import OpenChat
from tui.commands import COMMAND_NAMED, COMMANDS, Command, looks_like_command, parse
from tui.engine.panel import PanelInput
from tui.engine.placement import PanelPlacement
from tui.home import Home
from tui.leaving import EndingSignals
from tui.opening import WIDE
from tui.paint.theme import DARK, LIGHT
from tui.talk.connection import Connector
from tui.widgets.composer import Composer
from tui.widgets.dialogs import ChatChoice, HelpDialog
from tui.widgets.message import MessageAct, MessageView
from tui.widgets.welcome import Welcome
from tui.widgets.window import ChatWindow
from tui.workers import start_worker

Handler = Callable[..., Awaitable[None] | None]  # gets the argument, if the command takes one
# Seconds in which workers have to end when the window closes.
_ENDING_SECONDS = 5.0


class ChatApp(App[None]):
    """One window, one open chat, at most one running answer."""

    TITLE = "mlxserve"
    CSS_PATH = "app.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 (as the base class)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(",".join(command.keys), f"command('{command.name}')", command.help, show=False)
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
        read_document: ReadDocument | None = None,
        driver: type[Driver] | None = None,
    ) -> None:
        super().__init__(driver_class=driver)
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = theme_name if theme_name in (DARK.name, LIGHT.name) else DARK.name
        self._warning = warning
        self._notice = notice
        self._continues = continues  # opens the last chat
        self._open_chat = chat = OpenChat(store)
        self.window = window = ChatWindow()
        models = models or ModelCatalog()
        self.link = ServerLink(connector, window)
        self._toolbox = Toolbox(usual_file(), chat)
        self._tools = ToolUse(self, self._toolbox)
        self.answering = Answering(chat, self.link, window, self._tools)
        self.answering.server.on_deleted = self._chat_deleted
        self._draft = Draft(self, window, chat, self.link, read_document)
        self.browsing = Browsing(chat, self.answering, self._draft, window, home.exports)
        placing = Placing(chat, self.answering.server, self._draft, window)
        self._revising = Revising(chat, self.link, self.answering, self._draft, window)
        self._sampling = SamplingChoice(chat, self.answering, self._draft, window, home.presets)
        self._model_switch = ModelSwitch(self, self.link, self.answering, models, chat)
        self._welcoming = Welcoming(self.link, chat, models, window)
        self._copying = Copying(self, self.answering)
        self._panel_placement = PanelPlacement(self, self._panel_input)
        self._is_quitting = False
        self._esc, self._ctrl_c = SecondPress(), SecondPress()
        self.handlers: dict[str, Handler] = {
            "new": self.browsing.new,
            "stop": self._stop,
            "retry": self._revising.retry_last,
            "continue": self.answering.continue_last,
            "compact": self.answering.compact,
            "edit": self._revising.edit_last,
            "previous": partial(self.browsing.show_sibling, -1),
            "next": partial(self.browsing.show_sibling, 1),
            "chats": self.browsing.show_chats,
            "find": self.browsing.find,
            "rename": self.browsing.rename,
            "pin": placing.pin,
            "folder": placing.move,
            "system": self.browsing.set_system,
            "prompts": PromptChoice(self, self.link, chat, self.answering, self._sampling).choose,
            "set": self._sampling.change,
            "attach": self._draft.attach,
            "editor": self._draft.in_editor,
            "thinking": self.window.toggle_thinking,
            "copy": self._copying.answer,
            "code": self._copying.code,
            "export": self.browsing.export,
            "model": self._model_switch.choose,
            "models": LoadedModels(self, self.link).show,
            "tools": self._tools.show,
            "engine": self._panel_placement.toggle,
            "theme": self._toggle_theme,
            "help": self._show_help,
            "quit": self.action_quit,
        }

    # The window

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            yield self.window

    async def on_mount(self) -> None:
        self._signals = EndingSignals(self._request_quit)
        self.window.composer.focus()
        await self.window.show(self._open_chat)
        if self._warning or self._notice:
            words = self._warning or self._notice
            await self.window.transcript.say(words, is_error=bool(self._warning))
        await self._draft.restore()
        if self._continues:
            self.answering.run(self.browsing.open_last)
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """Start what the first picture does not need."""
        if self._is_quitting:
            return
        self.link.connect()
        start_worker(self, self.link.watch, group="watch")
        start_worker(self, self._restore)
        start_worker(self, self._start_tools)
        start_worker(self, self._panel_placement.watch.run, group="pages")
        self.run_worker(_import_the_rest, thread=True)

    async def _restore(self) -> None:
        self.window.composer.use_history(await self._open_chat.history())
        await self._sampling.restore()

    async def _start_tools(self) -> None:
        await self._tools.start()
        self.window.suggest_more(self._tools.commands)
        self.answering.status.show_header()

    @property
    def has_chat(self) -> bool:
        """True if a chat with messages is open."""
        return self._open_chat.chat is not None

    def on_resize(self, event: Resize) -> None:
        self._panel_placement.resized(event.size)

    def get_system_commands(
        self,
        screen: Screen[object],  # noqa: ARG002 (the palette passes it)
    ) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            title = f"/{command.name}  {command.key_label}".rstrip()
            yield SystemCommand(title, command.help, partial(self._run, command))

    def _panel_input(self) -> PanelInput:
        connection, answer = self.link.connection, self.answering.last_answer
        return PanelInput(
            engine=None if connection is None else connection.client.engine,
            answer_stats=None if answer is None else answer.stats,
            request_id=self.answering.request_id,
        )

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,  # noqa: ARG002 (messages are shown as plain text)
    ) -> None:
        """Show a message below the composer, instead of a stack of toasts over the chat."""
        words = f"{title}: {message}" if title else message
        if self.window.status.is_mounted:
            self.window.status.tell(words, severity, timeout)

    # Messages

    @on(ServerLink.Connected)
    def _connected(self) -> None:
        self.answering.status.show_header()
        self.answering.server.retarget()
        start_worker(self, self._model_switch.connected, group="use", exclusive=True)
        if self.link.connection is None:
            self.answering.queue.return_to_composer()
        else:
            self.answering.ask_again()
            self._welcoming.begin()
        self.answering.send_next()

    @on(Browsing.Opened)
    def _opened(self) -> None:
        self._revising.end_edit()
        self.answering.server.retarget()
        self.answering.status.show_header()
        if self._open_chat.chat is None:
            self._welcoming.begin()

    def _chat_deleted(self) -> None:
        self.notify("This chat was deleted elsewhere.", severity="warning")
        self.browsing.new()

    @on(Welcome.Asked)
    @on(Composer.Sent)
    async def _sent(self, event: Composer.Sent | Welcome.Asked) -> None:
        self.window.composer.focus()
        self.window.status.begin_cause()
        parsed = parse(event.text)
        if self._tools.takes(event.text):
            await self._draft.fill(event.text, self._tools.offered_text)
        elif parsed is not None and parsed[1] and not parsed[0].argument:
            self.window.composer.write(event.text)
            self.notify(f"{parsed[0].usage} takes no argument.")
        elif parsed is not None:
            await self._run(*parsed)
        elif looks_like_command(event.text):
            self.window.composer.write(event.text)
            self.notify("Unknown command. F1 lists all commands.")
        else:
            self.browsing.end_find()
            self._revising.send(event.text)

    @on(TextArea.Changed, "#composer")
    def _typed(self) -> None:
        self._esc.forget()

    @on(Composer.SentNothing)
    def _sent_nothing(self) -> None:
        if not self.window.focus_ideas():
            self.answering.continue_shorter()

    @on(Composer.WantsBelow)
    def _wants_below(self) -> None:
        self.window.focus_ideas()

    @on(Welcome.Left)
    def _welcome_left(self, event: Welcome.Left) -> None:
        self.window.composer.focus()
        self.window.composer.insert(event.typed)

    @on(Welcome.Opened)
    def _recent_opened(self, event: Welcome.Opened) -> None:
        self.browsing.open(ChatChoice(event.chat_id))

    @on(Welcome.Wanted)
    def _model_wanted(self, event: Welcome.Wanted) -> None:
        self.window.composer.focus()
        self._model_switch.choose(event.model.name)

    @on(ChatWindow.Chosen)
    async def _chosen(self, event: ChatWindow.Chosen) -> None:
        await self._run(event.command)

    @on(MessageView.ActChosen)
    def _act_chosen(self, event: MessageView.ActChosen) -> None:
        acts = {
            MessageAct.EDIT: self._revising.edit,
            MessageAct.RETRY: self._revising.retry,
            MessageAct.COPY: self._copying.message,
            MessageAct.COPY_CODE: self._copying.next_code,
        }
        acts[event.act](event.message)

    @on(MessageView.ShowVersion)
    def _show_version(self, event: MessageView.ShowVersion) -> None:
        self.browsing.show_branch(event.message_id)

    # Commands

    async def action_command(self, name: str) -> None:
        await self._run(COMMAND_NAMED[name])

    async def _run(self, command: Command, argument: str = "") -> None:
        self.window.status.begin_cause()
        if command.name != "stop":
            self._esc.forget()
        handler = self.handlers[command.name]
        try:
            result = handler(argument) if command.argument else handler()
            if result is not None:
                await result
        except StoreError as error:
            self.notify(str(error), severity="error")

    def _stop(self) -> None:
        """Esc: cancel editing, stop the answer, focus the composer, or clear a typed command.

        Twice: edit the last message.
        """
        composer = self.window.composer
        if composer.has_focus and not composer.text and self._is_at_rest:
            if self._esc.press():
                self._revising.edit_last()
            return
        self._esc.forget()
        if self._revising.end_edit():
            composer.load_text("")
        elif self.answering.is_answering:
            self.answering.stop()
        elif not composer.has_focus:
            composer.focus()
        elif parse(composer.text) is not None:
            # A command that was begun.
            composer.load_text("")
            self.browsing.end_find()

    @property
    def _is_at_rest(self) -> bool:
        return not (self._revising.is_editing or self.answering.is_answering)

    async def _toggle_theme(self) -> None:
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name
        self.window.transcript.use_palette(self.window.palette)
        await self._open_chat.set_setting("theme", self.theme)

    def _show_help(self) -> None:
        self.push_screen(HelpDialog())

    def action_focus_message(self, step: int) -> None:
        self.window.focus_message(step)

    def action_scroll_transcript(self, step: int) -> None:
        if step < 0:
            self.window.transcript.scroll_page_up()
        else:
            self.window.transcript.scroll_page_down()

    def action_scroll_to_end(self) -> None:
        self.window.transcript.anchor()

    # Quitting

    def action_help_quit(self) -> None:
        """Ctrl+C: copy the selection, or stop the answer; twice: quit."""
        if self._copying.selection():
            return
        if self._ctrl_c.press():
            self._request_quit()
        elif self.answering.is_answering:
            self.answering.stop()
        else:
            self.notify("Press Ctrl+C again to quit.", timeout=SECONDS)

    def _request_quit(self) -> None:
        start_worker(self, self.action_quit, group="quit")

    async def action_quit(self) -> None:
        """Save the text so far, then quit."""
        if self._is_quitting:
            return
        self._is_quitting = True
        await self.answering.finish()
        await self.link.close()
        await self._toolbox.close()
        # There is no screen any more to report it on.
        with suppress(StoreError):
            await self._draft.keep()
        others = [worker for worker in self.workers if worker.group != "quit"]
        # None may use the chats once they are closed.
        for worker in others:
            worker.cancel()
        # Each first ends the process that it has started.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_SECONDS):
                await asyncio.gather(*(other.wait() for other in others), return_exceptions=True)
        await self._open_chat.close()
        self.exit()

    def on_unmount(self) -> None:
        self._signals.restore()


def _import_the_rest() -> None:
    """Import modules one after the other: two threads that import one package can deadlock.

    The client comes first, because a thread of the connector imports it as well.
    """
    for module in ("tui.talk.client", "markdown_it", "tui.paint.syntax"):
        import_module(module)
