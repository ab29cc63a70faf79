"""LoadedModelsDialog: what the server has loaded, with its memory; loads, unloads and pins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from mlxserve.system.terminal_text import one_line
from tui.talk.errors import ChatError, ModelBusy
from tui.talk.model_states import ModelMemory, ModelState
from tui.widgets.dialog import Dialog
from tui.workers import start_worker

if TYPE_CHECKING:
    from tui.talk.model_control import ModelControl

_LOOK_SECONDS = 1.0
_NAME_WIDTH = 44
_GIB = 1 << 30
_SIGNS = {"loaded": "●", "unloaded": "○"}
_IN_USE = "loaded"


class LoadedModelsDialog(Dialog[None]):
    """Enter loads a model, U unloads it, P pins it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("u", "unload", "Unload", show=False),
        Binding("p", "pin", "Pin", show=False),
    ]

    def __init__(self, control: ModelControl) -> None:
        super().__init__()
        self._control = control
        self._memory = ModelMemory(())
        self._lines: list[Content] = []
        self._changing = ""  # the model that is loaded or unloaded from here
        self._noted, self._note = "", ""  # a model, and what is said of it until another is chosen
        self._busy = ""  # the model that answers, and is unloaded with the next press

    def compose(self) -> ComposeResult:
        with self.box("Loaded models", "Enter loads · U unloads · P pins · Esc closes"):
            yield OptionList(compact=True)
            yield Static(id="note", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self.say("Asking the server …")
        start_worker(self, self._follow, group="look")

    async def _follow(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        try:
            self._memory = await self._control.models()
        except ChatError as error:
            self.say(one_line(str(error), 600))
        else:
            self._show()

    def _show(self) -> None:
        lines = [_line(model, self._changing) for model in self._memory.models]
        options = self.query_one(OptionList)
        if lines != self._lines:
            at = options.highlighted or 0
            self._lines = lines
            options.set_options([Option(line) for line in lines])
            options.highlighted = min(at, len(lines) - 1) if lines else None
        limit = self._memory.limit
        of_all = "" if limit is None else f" of {limit / _GIB:.2f} GiB for all"
        self.say(self._note or f"{self._memory.used / _GIB:.2f} GiB in use{of_all}.")

    @property
    def _chosen(self) -> ModelState | None:
        at, models = self.query_one(OptionList).highlighted, self._memory.models
        return None if at is None or at >= len(models) else models[at]

    @on(OptionList.OptionHighlighted)
    def _moved(self) -> None:
        if self._chosen is not None and self._chosen.name != self._noted:
            self._busy = self._noted = self._note = ""
            self._show()

    @on(OptionList.OptionSelected)
    def _load(self) -> None:
        model = self._chosen
        if model is None:
            return
        if model.state == _IN_USE:
            self._tell(
                model.name, f"{one_line(model.name, 60)} is loaded. U unloads it, P pins it."
            )
        else:
            self._change(model, partial(self._control.load, model.name))

    def action_unload(self) -> None:
        """Unload the model; one that answers on the second press."""
        model = self._chosen
        if model is not None and model.state == _IN_USE:
            is_forced = self._busy == model.name
            self._change(model, partial(self._control.unload, model.name, force=is_forced))

    def action_pin(self) -> None:
        """Pin the model, loading it first; unpin one that is pinned."""
        model = self._chosen
        if model is not None:
            pin = partial(self._control.load, model.name, is_pinned=not model.is_pinned)
            self._change(model, pin)

    def _change(self, model: ModelState, change: Callable[[], Awaitable[None]]) -> None:
        if self._changing:
            words = f"{one_line(self._changing, 60)} is being changed; wait for it."
            self._tell(model.name, words)
            return
        self._changing, self._busy = model.name, ""
        self._tell(model.name, "")
        start_worker(self, partial(self._run, model.name, change), group="change")

    async def _run(self, name: str, change: Callable[[], Awaitable[None]]) -> None:
        try:
            await change()
        except ModelBusy:
            self._busy = name
            self._tell(name, f"{one_line(name, 60)} is answering. U again ends its answers.")
        except ChatError as error:
            self._tell(name, one_line(str(error), 600))
        finally:
            self._changing = ""
        await self._look()

    def _tell(self, name: str, words: str) -> None:
        """Show a note about a model, until another one is chosen."""
        self._noted, self._note = name, words
        self._show()


def _line(model: ModelState, changing: str) -> Content:
    words = [
        _state(model, is_changing=model.name == changing),
        f"{model.memory / _GIB:.2f} GiB" if model.memory else "",
        f"{model.size / _GIB:.2f} GiB of weights" if model.size and not model.memory else "",
        "pinned" if model.is_pinned else "",
        _use(model),
    ]
    return Content.assemble(
        f"{_SIGNS.get(model.state, '◌')} ",
        (one_line(model.name, _NAME_WIDTH), "bold"),
        (f"  {' · '.join(filter(None, words))}", "$text-quiet"),
    )


def _state(model: ModelState, *, is_changing: bool) -> str:
    if is_changing:
        return "unloading …" if model.state == _IN_USE else "loading …"
    if model.state in ("loading", "unloading"):
        return f"{model.state} …"
    return "not loaded" if model.state == "unloaded" else ""


def _use(model: ModelState) -> str:
    if model.num_requests:
        return f"{model.num_requests} request{'s' * (model.num_requests > 1)}"
    return "" if model.seconds_left is None else f"unloads in {model.seconds_left:.0f} s"
