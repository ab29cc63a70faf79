"""The contents of an empty chat: the model, questions to ask, a larger model, recent chats.

The first lines are shown immediately, the rest when the server is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.events import Key
from textual.message import Message as Event
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from mlxserve.history.messages import ChatRecord
from mlxserve.hub.model_choices import BUNDLED, Model
from mlxserve.system.terminal_text import one_line

_DEMO = (
    "mlxserve-mini, the included model of 6 MB, answers questions about mlxserve and little else."
)
_DEMO_IDEAS = (
    "What can you do?",
    "What is a page?",
    "Remember the code word plum-42. What is the code word?",
)
_IDEAS = (
    "Explain how a paged KV cache works.",
    "Write a Python function that parses an ISO date.",
    "What are three good questions to ask a local model?",
)
_HOW = "   ↓ selects, Enter confirms"
MAX_RECENT = 3


@dataclass(frozen=True, slots=True)
class WelcomeFacts:
    """The data of an empty chat. Empty while not connected."""

    model: str = ""
    recommended: Model | None = None
    recent: Sequence[ChatRecord] = ()

    @property
    def ideas(self) -> Sequence[str]:
        if not self.model:
            return ()
        return _DEMO_IDEAS if self.model == BUNDLED else _IDEAS


class Ideas(OptionList):
    """The list's rows. Up from the first one leaves it, and so does a letter."""

    def action_cursor_up(self) -> None:
        if not self.highlighted:
            self.post_message(Welcome.Left())
        else:
            super().action_cursor_up()

    async def _on_key(self, event: Key) -> None:
        if event.is_printable and event.character:
            event.stop()
            event.prevent_default()
            self.post_message(Welcome.Left(event.character))


class Welcome(Vertical):
    """Down, Enter or Tab goes to its list; Enter asks, opens a chat, or switches to the model."""

    HINT = "↑↓ select · Enter confirms · Esc back"

    TEXT = Content.assemble(
        ("mlxserve", "bold $primary"),
        "\n\nAsk something, or type ",
        ("/", "bold"),
        " to list the commands.\n",
        ("F1 lists all keys. Your chats stay on this machine.", "$text-quiet"),
    )

    @dataclass
    class Asked(Event):
        """The user chose a question."""

        text: str

    @dataclass
    class Opened(Event):
        """The user chose a recent chat."""

        chat_id: int

    @dataclass
    class Wanted(Event):
        """The user chose the recommended model."""

        model: Model

    @dataclass
    class Left(Event):
        """The user went back to the composer, by this letter or by another key."""

        typed: str = ""

    def __init__(self, facts: WelcomeFacts) -> None:
        super().__init__()
        self._facts = facts
        self._events: list[Event] = []  # events of the options

    def compose(self) -> ComposeResult:
        yield Static(self.TEXT, id="greeting")
        yield Static(id="about", markup=False)
        yield Ideas(compact=True, id="ideas")

    def on_mount(self) -> None:
        self.show(self._facts)

    def show(self, facts: WelcomeFacts) -> None:
        self._facts = facts
        if not (self.query("#ideas") and self.query("#about")):
            # The widget is not composed yet, or is being removed.
            return
        about = self.query_one("#about", Static)
        about.display = facts.model == BUNDLED
        about.update(Content.styled(_DEMO, "$text-quiet"))
        options: list[tuple[Content, Event]] = []
        options += [(_line("Ask", idea), self.Asked(idea)) for idea in facts.ideas]
        options += [
            (_line("Open", one_line(chat.title, 60)), self.Opened(chat.id))
            for chat in facts.recent[:MAX_RECENT]
        ]
        # Last: it comes later, and moves no row then.
        if facts.recommended is not None:
            options.append((_button(facts.recommended), self.Wanted(facts.recommended)))
        if options:
            first, event = options[0]
            options[0] = Content.assemble(first, (_HOW, "$text-quiet")), event
        self._events = [event for _, event in options]
        shown = self.query_one("#ideas", OptionList)
        shown.display = bool(options)
        at = shown.highlighted
        shown.set_options([Option(line) for line, _ in options])
        if at is not None and shown.has_focus:
            shown.highlighted = min(at, len(options) - 1) if options else None

    def focus_ideas(self) -> bool:
        """False if there is nothing to choose yet."""
        if not self._events or not self.query("#ideas"):
            return False
        shown = self.query_one("#ideas", OptionList)
        shown.focus()
        shown.highlighted = 0
        return True

    @on(OptionList.OptionSelected, "#ideas")
    def _choose(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self._events[event.option_index])


def _button(model: Model) -> Content:
    """Format the real model's button, with what pressing it costs."""
    name = one_line(model.name.rpartition("/")[2], 40)
    size = "" if model.weight_size is None else f", {model.weight_size / 1e9:.1f} GB"
    verb = "Use" if model.is_here else "Download"
    why = "it is on this machine" if model.is_here else "it suits this machine"
    return Content.assemble(
        (f"{'Model':6}", "$text-quiet"),
        (f" {verb} {name}{size} ", "bold $background on $primary"),
        (f"  {why}", "$text-quiet"),
    )


def _line(kind: str, words: str) -> Content:
    return Content.assemble((f"{kind:6}", "$text-quiet"), words)
