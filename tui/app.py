"""The terminal: `mlxserve chat`. Wires keys and commands to the conversation and the server.

    keys, slash commands, palette -> action -> turn -> conversation (store) -> answer (client)
                                                    -> transcript

A turn is one change to the conversation; turns run one after another, and a turn that shows
something else stops the answer under way first. Knows nothing of SQL, HTTP or Markdown.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult, SuspendNotSupported, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static, TextArea

from tui.answer import Answer, Phase
from tui.attachment import AttachmentRefused, as_markdown
from tui.clipboard import copy
from tui.commands import COMMANDS, Command, looks_like_command, parse
from tui.connection import Connection, Connector, Waiting, Wanted
from tui.conversation import Conversation
from tui.editor import EditorFailed, edit_in_editor
from tui.events import ChatError
from tui.export import export, file_name, target
from tui.figures import figures_line, seconds_words
from tui.home import Home
from tui.markdown import last_code
from tui.messages import Message, Role, State, wire_messages
from tui.sanitise import clean, one_line
from tui.store import Store, StoreError
from tui.theme import DARK, LIGHT, Palette, palette
from tui.turns import Operation, Turns
from tui.widgets.composer import Composer
from tui.widgets.dialogs import ChatChoice, ChatsDialog, HelpDialog, ModelsDialog
from tui.widgets.message import AnswerView, MessageView
from tui.widgets.status import StatusLine
from tui.widgets.suggestions import Suggestions
from tui.widgets.transcript import Transcript

_FRAMES_PER_SECOND = 15
_HANG_UP_SECONDS = 3.0
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
    ) -> None:
        super().__init__()
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = theme_name if theme_name in (DARK.name, LIGHT.name) else DARK.name
        self._connector = connector
        self._connection: Connection | None = None
        self._conversation = Conversation(store)
        self._home = home
        self._warning = warning
        self._turns = Turns(partial(self.run_worker, group="turn"))
        self._view: AnswerView | None = None
        self._queue: list[str] = []
        self._editing: Message | None = None
        self._is_connecting = False
        self._is_thinking_open = False
        self._has_said_unsaved = False
        self._is_leaving = False
        self._last_press: dict[str, float] = {}

    # The window

    def compose(self) -> ComposeResult:
        with Container(id="top"), Horizontal():
            yield Static(id="title", markup=False)
            yield Static(id="model", markup=False)
        yield Transcript()
        with Vertical(id="bottom"):
            yield Static(id="queue", markup=False)
            yield Suggestions()
            yield Composer()
        yield StatusLine()

    async def on_mount(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._old_handlers = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGHUP)
        }
        self._ticker = self.set_interval(1 / _FRAMES_PER_SECOND, self._tick, pause=True)
        self._composer.focus()
        await self._show_path()
        self._hint()
        if self._warning:
            await self._transcript.say(self._warning, is_error=True)
        self._connect_in_background()
        self.run_worker(self._load_history())

    def on_resize(self) -> None:
        self._hint()

    def on_descendant_focus(self) -> None:
        self._hint()

    @property
    def _transcript(self) -> Transcript:
        return self.screen_stack[0].query_one(Transcript)

    @property
    def _composer(self) -> Composer:
        return self.screen_stack[0].query_one(Composer)

    @property
    def _status(self) -> StatusLine:
        return self.screen_stack[0].query_one(StatusLine)

    @property
    def _suggestions(self) -> Suggestions:
        return self.screen_stack[0].query_one(Suggestions)

    @property
    def _palette(self) -> Palette:
        return palette(dark=self.current_theme.dark)

    def get_system_commands(
        self,
        screen: Screen[object],  # noqa: ARG002 (the palette passes it)
    ) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            yield SystemCommand(command.title, command.help, partial(self._run, command, ""))

    def _hint(self) -> None:
        if self._editing is not None:
            words = Composer.EDIT_HINT
        elif isinstance(self.focused, MessageView):
            words = Composer.MESSAGE_HINT
        elif self.size.width >= 90:
            words = Composer.HINT
        else:
            words = Composer.SHORT_HINT
        self._composer.border_subtitle = words
        self._composer.border_title = "Editing" if self._editing is not None else ""

    async def _show_path(self, must_show: int | None = None) -> None:
        """Make the window show what the conversation holds."""
        conversation = self._conversation
        await self._transcript.show(
            conversation.path, conversation.places, self._palette, must_show=must_show
        )
        chat = conversation.chat
        title = self.screen_stack[0].query_one("#title", Static)
        title.update(Content(one_line(chat.title) if chat is not None else "New chat"))
        self._show_model()

    def _show_model(self) -> None:
        model = "" if self._connection is None else one_line(self._connection.model, 60)
        if self._conversation.system:
            model += " · with a system prompt"
        self.screen_stack[0].query_one("#model", Static).update(Content(model))

    def _show_queue(self) -> None:
        queue = self.screen_stack[0].query_one("#queue", Static)
        queue.display = bool(self._queue)
        queue.update(Content("\n".join(f"⋯ next: {one_line(text, 90)}" for text in self._queue)))

    # The server

    def _connect_in_background(self) -> None:
        if not self._is_connecting:
            self._is_connecting = True
            self.run_worker(self._connect(), group="connect")

    async def _connect(self) -> None:
        await self._disconnect()
        try:
            self._connection = await self._connector.connect(self._report)
        except ChatError as error:
            self._status.say("Not connected · Ctrl+R tries again", style="$error")
            await self._transcript.say(str(error), is_error=True)
            self._give_queue_back()
        else:
            await self._transcript.clear_notices()
            self._status.say("Ready")
            self._show_model()
        finally:
            self._is_connecting = False
        self._send_next()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.client.close()

    def _report(self, waiting: Waiting) -> None:
        self._status.say(waiting.words, progress=waiting.progress)

    # Turns

    def _turn(self, operation: Operation) -> None:
        """Stop what is coming and do this instead."""
        self._turns.begin(partial(self._guarded, operation), self._send_next)

    async def _guarded(self, operation: Operation) -> None:
        try:
            await operation()
        except StoreError as error:
            await self._transcript.say(str(error), is_error=True)

    @property
    def _is_busy(self) -> bool:
        return not self._turns.is_idle or self._connection is None

    def _send_next(self) -> None:
        if self._queue and not self._is_busy:
            text = self._queue.pop(0)
            self._show_queue()
            self._turn(partial(self._ask, text))

    def _give_queue_back(self) -> None:
        """What waits is not sent after an answer that did not come: the reader decides."""
        if self._queue:
            texts = [*self._queue, self._composer.text]
            self._queue = []
            self._show_queue()
            self._composer.write("\n\n".join(text for text in texts if text))

    async def _ask(self, text: str, instead_of: Message | None = None) -> None:
        try:
            question = await self._conversation.ask(text, instead_of=instead_of)
        except StoreError:
            self._queue.insert(0, text)
            self._give_queue_back()
            raise
        self._composer.remember(text)
        await self._reply(question)

    async def _reply(self, question: Message) -> None:
        connection = self._connection
        if connection is None:  # it was lost while the turn waited
            await self._show_path()
            await self._transcript.say("Not connected. Press Ctrl+R to try again.", is_error=True)
            return
        message = await self._conversation.begin_answer(question, connection.model)
        await self._show_path()
        self._composer.focus()
        view = self._transcript.view(message.id)
        assert isinstance(view, AnswerView), "an answer was just put there"
        path = self._conversation.path[:-1]
        pieces = connection.client.stream(
            wire_messages(path, self._conversation.system), model=connection.model
        )
        await self._follow(Answer(message, pieces, self._save), view)

    async def _follow(self, answer: Answer, view: AnswerView) -> None:
        self._view = view
        self._has_said_unsaved = False
        view.follow(answer)
        view.open_thinking(is_open=self._is_thinking_open)
        self._transcript.follow()
        self._ticker.resume()
        try:
            message = await self._turns.follow(answer)
        finally:
            self._ticker.pause()
            self._view = None
        await view.finish(message)
        self._show_end(message)
        server = self._connector.server
        if message.state is State.FAILED and server is not None and not server.is_running:
            await self._transcript.say(str(server.why_it_stopped()), is_error=True)

    async def _save(self, message: Message) -> None:
        try:
            await self._conversation.save(message)
        except StoreError as error:
            # The answer goes on; the reader is told once that it is not kept.
            if not self._has_said_unsaved:
                self._has_said_unsaved = True
                self.notify(str(error), severity="error", markup=False)

    def _tick(self) -> None:
        answer, view = self._turns.answer, self._view
        if answer is None or view is None:
            return
        view.tick()
        words = {
            Phase.WAITING: f"Reading the prompt, {answer.seconds:.0f} s",
            Phase.THINKING: f"Thinking, {seconds_words(answer.seconds)}",
            Phase.WRITING: "Writing",
        }.get(answer.phase, "Done")
        self._status.say(f"{words} · Esc stops")
        self._status.show_figures(figures_line(answer.figures, is_live=True))

    def _show_end(self, message: Message) -> None:
        self._status.show_figures(figures_line(message.figures))
        if message.state is State.FAILED:
            self._status.say("Failed · Ctrl+R asks again", style="$error")
        elif message.state is State.STOPPED:
            self._status.say("Stopped · Ctrl+R asks again")
        else:
            self._status.say("Ready")
            return
        self._give_queue_back()

    # What the reader does

    @on(Composer.Sent)
    async def _sent(self, event: Composer.Sent) -> None:
        parsed = parse(event.text)
        if parsed is not None and parsed[1] and not parsed[0].argument:
            self._composer.write(event.text)
            self.notify(f"{parsed[0].usage} takes nothing after it.", markup=False)
        elif parsed is not None:
            await self._run(*parsed)
        elif looks_like_command(event.text):
            self._composer.write(event.text)
            self.notify("There is no such command. F1 shows them all.", markup=False)
        elif self._editing is not None:
            instead_of = self._editing
            self._stop_editing()
            self._when_connected(partial(self._ask, event.text, instead_of))
        else:
            self._queue.append(event.text)
            self._show_queue()
            self._send_next()

    @on(TextArea.Changed, "#composer")
    def _typed(self, event: TextArea.Changed) -> None:
        self._composer.has_suggestions = self._suggestions.suggest(event.text_area.text)

    @on(Composer.Suggest)
    async def _suggest(self, event: Composer.Suggest) -> None:
        suggestions = self._suggestions
        command = suggestions.chosen
        match event.key:
            case "up":
                suggestions.action_cursor_up()
            case "down":
                suggestions.action_cursor_down()
            case "tab" if command is not None:
                self._composer.write(f"/{command.name} ")
            case "enter" if command is not None:
                if command.argument.startswith("[") or not command.argument:
                    self._composer.load_text("")
                    await self._run(command, "")
                else:
                    self._composer.write(f"/{command.name} ")
            case _:
                suggestions.close()
                self._composer.has_suggestions = False

    @on(Suggestions.OptionSelected, "#suggestions")
    async def _suggestion_clicked(self) -> None:
        await self._suggest(Composer.Suggest("enter"))

    @on(MessageView.Edit)
    def _edit(self, event: MessageView.Edit) -> None:
        question = event.message
        if question.role is Role.ASSISTANT:
            found = self._conversation.question_of(question)
            if found is None:
                return
            question = found
        self._editing = question
        self._composer.write(question.text)
        self._composer.focus()
        self._hint()

    @on(MessageView.Retry)
    def _retry(self, event: MessageView.Retry) -> None:
        message = event.message
        question = message if message.role is Role.USER else self._conversation.question_of(message)
        if question is not None:
            self._when_connected(partial(self._reply, question))

    @on(MessageView.Copy)
    def _copy(self, event: MessageView.Copy) -> None:
        self._put_in_clipboard(event.message.text, "the message")

    @on(MessageView.ShowVersion)
    def _show_version(self, event: MessageView.ShowVersion) -> None:
        self._turn(partial(self._show_branch, event.message_id))

    async def _show_branch(self, message_id: int) -> None:
        await self._conversation.show_branch(message_id)
        await self._show_path()
        view = self._transcript.view(message_id)
        if view is not None:
            view.focus()

    @on(Transcript.WantsEarlier)
    async def _show_earlier(self) -> None:
        await self._transcript.show_earlier(self._palette)

    def _when_connected(self, operation: Operation) -> None:
        if self._connection is None:
            self.notify("Not connected yet; try again when the server is ready.", markup=False)
        else:
            self._turn(operation)

    def _stop_editing(self) -> None:
        self._editing = None
        self._hint()

    async def _load_history(self) -> None:
        self._composer.use_history(await self._conversation.history())

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
        self._turn(self._new_chat)

    async def _new_chat(self) -> None:
        self._conversation.new()
        self._stop_editing()
        await self._show_path()
        self._status.show_figures("")
        self._composer.focus()

    def action_stop(self) -> None:
        """Esc: leave editing, stop the answer, go back to writing; twice: edit the last."""
        if self._editing is not None:
            self._stop_editing()
            self._composer.load_text("")
        elif self._turns.answer is not None:
            self._turns.stop_answer()
        elif not self._composer.has_focus:
            self._composer.focus()
        elif not self._composer.text and self._is_second_press("escape"):
            self.action_edit_last()

    def action_retry(self) -> None:
        path = self._conversation.path
        if self._connection is None or self._has_lost_server:
            self._connect_in_background()
        elif path:
            self._retry(MessageView.Retry(path[-1]))

    @property
    def _has_lost_server(self) -> bool:
        server = self._connector.server
        return server is not None and not server.is_running

    def action_edit_last(self) -> None:
        if self._conversation.path:
            self._edit(MessageView.Edit(self._conversation.path[-1]))

    def action_sibling(self, step: int) -> None:
        """Of the last message that has versions."""
        for place in reversed(self._conversation.places):
            message_id = place.neighbour(step)
            if message_id is not None:
                self._turn(partial(self._show_branch, message_id))
                return

    async def action_chats(self) -> None:
        try:
            chats = await self._conversation.chats()
        except StoreError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        conversation = self._conversation
        self.push_screen(ChatsDialog(chats, conversation.search, self._delete), self._open)

    async def _delete(self, chat_id: int) -> None:
        is_open = self._conversation.chat is not None and self._conversation.chat.id == chat_id
        await self._conversation.delete(chat_id)
        if is_open:
            self._turn(self._new_chat)

    def _open(self, choice: ChatChoice | None) -> None:
        if choice is not None:
            self._turn(partial(self._open_chat, choice))

    async def _open_chat(self, choice: ChatChoice) -> None:
        await self._conversation.open(choice.chat_id, choice.message_id)
        self._stop_editing()
        await self._show_path(choice.message_id)
        view = None if choice.message_id is None else self._transcript.view(choice.message_id)
        if view is None:
            self._transcript.follow()
            self._composer.focus()
        else:
            view.focus()

    async def action_rename(self, title: str = "") -> None:
        if self._conversation.chat is None:
            self.notify("This chat is still empty: ask something first.", markup=False)
        elif not title:
            self._composer.write("/rename ")
            self._composer.focus()
        else:
            self._turn(partial(self._rename, title))

    async def _rename(self, title: str) -> None:
        await self._conversation.rename(title)
        await self._show_path()

    async def action_system(self, text: str = "") -> None:
        """Set the system prompt; without a text, put it where it can be changed."""
        if text:
            self._turn(partial(self._set_system, "" if text == "off" else text))
        else:
            self._composer.write(f"/system {self._conversation.system}")
            self._composer.focus()

    async def _set_system(self, text: str) -> None:
        await self._conversation.set_system(text)
        self._show_model()

    def action_thinking(self) -> None:
        self._is_thinking_open = not self._is_thinking_open
        for view in self._transcript.answers():
            view.open_thinking(is_open=self._is_thinking_open)

    def action_copy(self) -> None:
        answer = self._last_answer
        self._put_in_clipboard("" if answer is None else answer.text, "the answer")

    def action_copy_code(self) -> None:
        answer = self._last_answer
        code = None if answer is None else last_code(answer.text)
        self._put_in_clipboard(code or "", "the code")

    @property
    def _last_answer(self) -> Message | None:
        if self._turns.answer is not None:
            return self._turns.answer.message
        path = self._conversation.path
        return next((m for m in reversed(path) if m.role is Role.ASSISTANT), None)

    def _put_in_clipboard(self, text: str, what: str) -> None:
        if not text:
            self.notify(f"There is nothing to copy: no sign of {what} yet.", markup=False)
            return
        copy(self, clean(text))
        self.notify(f"Copied {what}.", timeout=2, markup=False)

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
        connection = self._connection
        if connection is None:
            self.notify("Not connected yet; try again when the server is ready.", markup=False)
        elif not name:
            self.push_screen(ModelsDialog(connection.models, connection.model), self._use_model)
        elif name in connection.models:
            self._use_model(name)
        else:
            known = ", ".join(one_line(model, 60) for model in connection.models[:8])
            self.notify(f"The server has no such model. It has: {known}.", markup=False)

    def _use_model(self, name: str | None) -> None:
        if name is not None and self._connection is not None:
            self._connection.model = name
            self._show_model()

    def action_attach(self, name: str = "") -> None:
        """Put a file into the composer, to be sent with what is written below it."""
        if not name:
            self._composer.write("/attach ")
            self._composer.focus()
            return
        try:
            block = as_markdown(Path(os.path.expanduser(name)))
        except AttachmentRefused as error:
            self._composer.write(f"/attach {name}")
            self.notify(str(error), severity="error", markup=False)
        else:
            self._composer.write(f"{block}\n")

    def action_editor(self) -> None:
        """Write in the editor that $VISUAL or $EDITOR names."""
        try:
            with self.suspend():
                text = edit_in_editor(self._composer.text)
        except EditorFailed as error:
            self.notify(str(error), severity="error", markup=False)
        except SuspendNotSupported:
            self.notify("An editor cannot be opened from this kind of terminal.", markup=False)
        else:
            self._composer.write(text)

    def action_theme(self) -> None:
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name
        self._transcript.use_palette(self._palette)
        self.run_worker(self._remember_theme(self.theme))

    async def _remember_theme(self, name: str) -> None:
        try:
            await self._conversation.set_setting("theme", name)
        except StoreError as error:
            self.notify(str(error), severity="error", markup=False)

    def action_help(self) -> None:
        self.push_screen(HelpDialog())

    def action_focus_message(self, step: int) -> None:
        views = self._transcript.views
        if self.focused in views:
            at = views.index(self.focused) + step
            if at >= len(views):
                self._composer.focus()
            elif at >= 0:
                views[at].focus()

    def action_scroll_transcript(self, step: int) -> None:
        if step < 0:
            self._transcript.scroll_page_up()
        else:
            self._transcript.scroll_page_down()

    # The end

    def action_help_quit(self) -> None:
        """Ctrl+C: copy what is selected, or stop the answer; twice: leave."""
        if selected := self.screen.get_selected_text():
            self.screen.clear_selection()
            self._put_in_clipboard(selected, "the selection")
        elif self._is_second_press("ctrl+c"):
            self.run_worker(self.action_quit(), group="quit")
        elif self._turns.answer is not None:
            self._turns.stop_answer()
        else:
            self.notify("Press Ctrl+C again to leave.", timeout=_SECOND_PRESS, markup=False)

    async def action_quit(self) -> None:
        """Keep what has come, then leave."""
        if self._is_leaving:
            return
        self._is_leaving = True
        await self._turns.finish()
        await self._disconnect()
        await self._conversation.close()
        self.exit()

    def on_unmount(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Leave in order; when the window itself is gone, within some seconds in any case.

        A plain handler, not the loop's: writing to a window that is gone ends textual's writer
        thread, and whoever then fills its queue, the loop or the shutdown, waits for ever.
        """
        if number == signal.SIGHUP:
            deadline = Timer(_HANG_UP_SECONDS, os._exit, (128 + number,))
            deadline.daemon = True
            deadline.start()
        self._event_loop.call_soon_threadsafe(self._end_on_signal)

    def _end_on_signal(self) -> None:
        self.run_worker(self.action_quit(), group="quit")

    def _is_second_press(self, key: str) -> bool:
        now = time.monotonic()
        is_second = now - self._last_press.get(key, -_SECOND_PRESS) < _SECOND_PRESS
        self._last_press[key] = now
        return is_second


def main(*, url: str | None, model: str | None, server_args: Sequence[str] = ()) -> int:
    """Run the terminal until the reader leaves; the process's exit code.

    url: an OpenAI-compatible server to attach to; None: start one, and end it at the end
    model: the model to ask for; None: the server's first
    server_args: passed on to `mlxserve serve` when one is started
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("TERM") == "dumb":
        print(
            "mlxserve chat needs a terminal. For scripts, use `mlxserve run`, "
            "or `mlxserve serve` and its HTTP API.",
            file=sys.stderr,
        )
        return 2
    home = Home.from_environment()
    store, warning = _open_store(home)
    wanted = Wanted(
        url=url,
        model=model,
        server_args=server_args,
        api_key=os.environ.get("MLXSERVE_API_KEY"),
    )
    connector = Connector(wanted, home)
    app = ChatApp(
        connector, store, home, theme_name=store.setting("theme") or DARK.name, warning=warning
    )
    try:
        app.run()
    finally:
        connector.stop_server()
    return app.return_code or 0


def _open_store(home: Home) -> tuple[Store, str]:
    """The chats on disk; where that fails, a store that forgets and a sentence that says so."""
    try:
        return Store.open(home.chats), ""
    except StoreError as error:
        return Store.in_memory(), f"{error} Until then chats are forgotten when you leave."
