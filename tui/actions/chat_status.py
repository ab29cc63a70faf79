"""ChatStatus: the header and the status line, from the open chat, the connection and the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxserve.history.context import ContextUse
from mlxserve.history.messages import Role, State, StoredMessage
from tui.actions.server_link import ServerLink
from tui.chat.live_answer import AnswerPhase, LiveAnswer
from tui.chat.open_chat import OpenChat
from tui.chat.progress import describe_calls, describe_stage
from tui.chat.stats_text import format_seconds, stats_lines
from tui.widgets.window import ChatWindow


class ChatStatus:
    """Shows the chat's state in the window. `settings` returns those to show in the header."""

    def __init__(
        self,
        open_chat: OpenChat,
        link: ServerLink,
        window: ChatWindow,
        settings: Callable[[], Sequence[str]],
    ) -> None:
        self._open_chat = open_chat
        self._link = link
        self._window = window
        self._settings = settings
        self._shown: tuple[str, float | None] = "", None  # the activity and its progress

    def begin(self) -> None:
        """Show the activity of a new answer, whatever was shown before."""
        self._shown = "", None

    def show_answer(self, answer: LiveAnswer) -> None:
        """Show what a running answer is doing, and its statistics."""
        words = {
            AnswerPhase.WAITING: describe_stage(answer.progress),
            AnswerPhase.THINKING: f"Thinking, {format_seconds(answer.seconds)}",
            AnswerPhase.WRITING: "Writing",
            AnswerPhase.CALLING: describe_calls(answer.rounds),
        }.get(answer.phase, "Done")
        progress = answer.progress if answer.phase is AnswerPhase.WAITING else None
        fraction = None if progress is None else progress.fraction
        if (words, fraction) != self._shown:
            self._shown = words, fraction
            self._window.status.say(f"{words} · Esc stops", progress=fraction)
        self._window.status.show_stats(stats_lines(answer.stats, is_live=True))

    def show_end(self, message: StoredMessage) -> None:
        """Show how an answer ended, and its statistics."""
        status = self._window.status
        status.show_stats(stats_lines(message.stats))
        if message.state is State.FAILED:
            status.say("Failed · Ctrl+R retries", style="$error")
        elif message.state is State.STOPPED:
            status.say("Stopped · /continue resumes · Ctrl+R retries")
        else:
            self.show_ready()

    def show_last(self) -> None:
        """Show the statistics of the open chat's last answer; nothing if it has none."""
        answers = (m for m in reversed(self._open_chat.path) if m.role is Role.ASSISTANT)
        last = next(answers, None)
        self._window.status.show_stats(() if last is None else stats_lines(last.stats))

    def show_full(self) -> None:
        """Show that the last question did not fit into the model's context."""
        self._window.status.say("This chat is full", style="$error")

    def show_ready(self) -> None:
        """Show that the next message can be sent, and warn if the context is nearly full."""
        use = self.context_use
        if use is None or self._link.is_lost:
            return
        words = "Ready"
        if use.is_nearly_full:
            words += f" · {use.fraction:.0%} of the context is used · /compact frees it"
        self._window.status.say(words)
        self.show_header()

    def show_header(self) -> None:
        """Show the model, the chat's use of its context, and the settings."""
        system = ["with a system prompt"] if self._open_chat.system else []
        settings = [*system, *self._settings()]
        self._window.show_header(self._link.model, self.context_use, self._link.address, settings)

    @property
    def context_use(self) -> ContextUse | None:
        """The open chat's use of the model's context; None while not connected."""
        connection = self._link.connection
        if connection is None:
            return None
        return ContextUse(self._open_chat.used_tokens, connection.context)
