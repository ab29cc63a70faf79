"""PromptsDialog: the saved prompts; one is chosen, the chat's is saved, or one is deleted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from mlxserve.history.saved_prompts import MAX_NAME, SavedPrompt
from mlxserve.system.terminal_text import one_line
from tui.talk.errors import ChatError
from tui.widgets.dialog import DialogList, ListDialog

_SHARED = (
    "Chats with the same prompt share its pages: the server computes it once, and again only if its "
    "cache has dropped it."
)
_NAME_WIDTH = 24


class PromptsDialog(ListDialog[SavedPrompt | str | None, SavedPrompt | str]):
    """Returns the chosen prompt, or the name under which the chat's own is to be saved."""

    def __init__(
        self,
        prompts: Sequence[SavedPrompt],
        delete: Callable[[SavedPrompt], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._prompts = list(prompts)
        self._delete = delete

    def compose(self) -> ComposeResult:
        with self.box("Saved prompts", "Enter chooses or saves · Ctrl+D deletes · Esc closes"):
            yield Input(
                placeholder="Filter, or a name to save this chat's prompt and sampling under",
                max_length=MAX_NAME,
                compact=True,
            )
            yield DialogList(compact=True)
            yield Static(id="note", markup=False)

    def on_mount(self) -> None:
        self.say(_SHARED)
        self._show()

    @on(Input.Changed)
    def _show(self) -> None:
        """List the prompts that match, and what is typed as a name to save under."""
        self._marked = None
        typed = " ".join(self.query_one(Input).value.split())
        found = [each for each in self._prompts if typed.casefold() in each.name.casefold()]
        self._shown = [*found]
        lines = [_line(prompt) for prompt in found]
        if typed:
            verb = "replace" if typed in (each.name for each in self._prompts) else "save as"
            self._shown.append(typed)
            lines.append(Content.assemble(f"{verb} ", (one_line(typed, MAX_NAME), "bold")))
        nothing = Content.styled(
            "None is saved yet. Type a name to save this chat's.", "$text-quiet"
        )
        options = self.query_one(DialogList)
        options.set_options([Option(line) for line in lines] or [Option(nothing, disabled=True)])
        options.highlighted = 0 if lines else None

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _choose(self) -> None:
        if self._chosen is not None:
            self.dismiss(self._chosen)

    async def action_delete(self) -> None:
        """Delete the prompt on the second press; the first asks for it."""
        prompt = self._chosen
        if not isinstance(prompt, SavedPrompt):
            return
        name = one_line(prompt.name, MAX_NAME)
        if self._marked != prompt.id:
            self._marked = prompt.id
            self.say(
                f"Press Ctrl+D again to delete {name}. Chats that began with it keep its text."
            )
            return
        try:
            await self._delete(prompt)
        except ChatError as error:
            self.say(one_line(str(error), 600))
            return
        self._prompts = [each for each in self._prompts if each.id != prompt.id]
        self._show()
        self.say(f"{name} was deleted.")


def _line(prompt: SavedPrompt) -> Content:
    values = ", ".join(f"{name} {value}" for name, value in prompt.sampling.items())
    words = " · ".join(filter(None, (values, one_line(prompt.system, 120))))
    name = one_line(prompt.name, MAX_NAME)
    return Content.assemble(
        (f"{name:{_NAME_WIDTH}}", "bold"), (f"  {words or 'nothing set'}", "$text-quiet")
    )
