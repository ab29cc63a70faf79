"""The model picker: the server's models, those on this machine, and well-known ones to download."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tui.sanitise import one_line
from tui.talk.errors import ChatError
from tui.talk.models import Downloaded, Model, ModelCatalog, ModelOrigin

_BAR_WIDTH = 16
_WIDE = 100  # columns from which a repository's owner is shown


class ModelsDialog(ModalScreen[Model | None]):
    """Returns the chosen model.

    models: finds and downloads others; None if the server cannot be restarted from here
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", show=False),
        Binding("p", "pause", "Pause", show=False),
    ]

    def __init__(self, served: Sequence[str], current: str, models: ModelCatalog | None) -> None:
        super().__init__()
        self._rows = [Model(name, ModelOrigin.SERVER) for name in served]
        self._current = current
        self._models = models
        self._progress: dict[str, Downloaded] = {}  # of running and paused downloads
        self._loading: str | None = None  # the name of the model being downloaded
        self._download: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "Models"
            dialog.border_subtitle = "Enter selects or downloads · P pauses · Esc closes"
            yield OptionList(compact=True)
            yield Static(id="note", markup=False)

    def on_mount(self) -> None:
        self._show()
        names = [row.name for row in self._rows]
        options = self.query_one(OptionList)
        options.highlighted = names.index(self._current) if self._current in names else 0
        options.focus()
        if self._models is None:
            self._say("The server was not started here, so its models cannot be changed.")
        else:
            self._say("Listing the models on this machine …")
            self.run_worker(self._find(self._models), group="find")

    async def _find(self, models: ModelCatalog) -> None:
        try:
            found = await models.find()
        except ChatError as error:
            self._say(str(error))
            return
        served = {row.name for row in self._rows}
        running = {m.name: m for m in found if m.name in served}
        self._rows = [running.get(row.name, row) for row in self._rows]
        self._rows += [model for model in found if model.name not in served]
        self._say(
            "Sizes are those of the weights. A model fits if memory holds them, the peak of a step and "
            "its full context; otherwise the number of tokens that fit is shown."
        )
        self._show()

    def _say(self, words: str) -> None:
        self.query_one("#note", Static).update(Content.styled(words, "$text-quiet"))

    def _show(self) -> None:
        options = self.query_one(OptionList)
        at = options.highlighted
        width = max((len(self._shown(row.name)) for row in self._rows), default=0)
        options.set_options([Option(self._line(row, width)) for row in self._rows])
        options.highlighted = at

    def _shown(self, name: str) -> str:
        """The name as shown, in a narrow window without a repository's owner."""
        is_narrow = self.app.size.width < _WIDE
        return one_line(name.rpartition("/")[2] if is_narrow else name, 44)

    def _line(self, row: Model, width: int) -> Content:
        sign = "●" if row.name == self._current else " "
        size = "" if row.weight_size is None else f"{row.weight_size / 1e9:.2f} GB"
        progress = self._progress.get(row.name)
        if progress is None:
            where = "to download" if row.source is ModelOrigin.SUGGESTED else str(row.source)
            state = Content(f"{row.verdict:18}{where}")
        else:
            state = Content(_progress_words(progress, is_paused=self._loading != row.name))
        name = self._shown(row.name).ljust(width)
        return Content.assemble(f"{sign} ", (name, "bold"), f" {size:>8}  ", state)

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        row = self._rows[event.option_index]
        if row.refusal:
            self._say(row.refusal)
        elif row.is_here:
            self.dismiss(row)
        elif self._loading is not None:
            self._say(f"{one_line(self._loading, 60)} is already downloading; P pauses it.")
        elif self._models is not None:
            self._loading = row.name
            self._progress.setdefault(row.name, Downloaded(0, None))
            self._download = asyncio.create_task(self._get(self._models, row))
            self._show()

    def action_pause(self) -> None:
        """Pause the download; Enter on the same model resumes it."""
        if self._download is not None:
            self._download.cancel()

    def on_unmount(self) -> None:
        self.action_pause()

    async def _get(self, models: ModelCatalog, row: Model) -> None:
        self._say(f"Downloading {one_line(row.name, 60)} …")
        try:
            async with aclosing(models.download(row.name)) as steps:
                async for step in steps:
                    if isinstance(step, Downloaded):
                        self._progress[row.name] = step
                        self._show()
        except ChatError as error:
            self._say(str(error))
        except asyncio.CancelledError:
            if self.is_mounted:
                self._say("Paused; Enter resumes.")
            raise
        else:
            del self._progress[row.name]
            self._rows = [
                Model(
                    m.name, ModelOrigin.DOWNLOADED, m.weight_size, m.fits, m.num_tokens, m.context
                )
                if m.name == row.name
                else m
                for m in self._rows
            ]
            self._say(f"{one_line(row.name, 60)} is downloaded; Enter selects it.")
        finally:
            self._loading = self._download = None
            if self.is_mounted:
                self._show()


def _progress_words(progress: Downloaded, *, is_paused: bool) -> str:
    words = f"{progress.done / 1e9:.2f} GB"
    if (fraction := progress.fraction) is not None:
        full = round(_BAR_WIDTH * fraction)
        words = f"{'━' * full}{'┄' * (_BAR_WIDTH - full)} {fraction:.0%}"
    return f"{words} paused" if is_paused else words
