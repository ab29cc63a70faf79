"""The model picker: models of the server, this machine and the hub, and well-known ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from mlxserve.hub.model_choices import (
    Downloaded,
    Model,
    ModelCatalog,
    ModelCommandFailed,
    ModelOrigin,
    best_of,
)
from mlxserve.system.terminal_text import one_line
from tui.chat.download_speed import DownloadSpeed
from tui.chat.stats_text import bar
from tui.widgets.dialog import DialogList, ListDialog
from tui.workers import start_worker

_BAR_WIDTH = 16
_WIDE = 100  # columns from which a repository's owner is shown
_NAME_WIDTH = 44
_CURRENT, _BEST, _ABSENT = "●", "★", "↓"
_USUAL_QUANTISATION = "Q4_K_M"


@dataclass(frozen=True, slots=True)
class HubSearch:
    """A row that looks for these words on the hub."""

    words: str


class ModelsDialog(ListDialog[Model | str | None, Model | str | HubSearch]):
    """Returns the chosen model, or the name of another one as typed.

    models: finds and downloads others; None if the server cannot be restarted from here
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "back", "Close", show=False)]

    def __init__(self, served: Sequence[str], current: str, models: ModelCatalog | None) -> None:
        super().__init__()
        self._rows = [Model(name, ModelOrigin.SERVER) for name in served]
        self._current = current
        self._models = models
        self._searched: set[str] = set()  # words that the hub was asked for
        self._progress: dict[str, Downloaded] = {}  # progress of running and paused downloads
        self._loading: str | None = None  # the name of the model being downloaded
        self._download: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        with self.box("Models", "Enter uses or downloads · Ctrl+D deletes · Esc closes"):
            yield Input(
                placeholder="Filter, words to search for, or a name: qwen3.5:4b, owner/name, a folder",
                compact=True,
            )
            yield Static(id="columns", markup=False)
            yield DialogList(compact=True)
            yield Static(id="note", markup=False)

    def on_mount(self) -> None:
        self._show(self._current)
        if self._models is None:
            self.say("The server was not started here, so its models cannot be changed.")
        else:
            self.say("Listing the models on this machine …")
            start_worker(self, partial(self._find, self._models), group="find")

    async def _find(self, models: ModelCatalog) -> None:
        try:
            listed = await models.find()
        except ModelCommandFailed as error:
            self.say(str(error))
            return
        served = {row.name for row in self._rows}
        running = {m.name: m for m in listed if m.name in served}
        self._rows = [running.get(row.name, row) for row in self._rows]
        self._rows += [model for model in listed if model.name not in served]
        self.say(self._legend(models.disk_free))
        self._show()

    def _legend(self, disk_free: int | None) -> str:
        best = best_of(self._rows)
        words = [f"{_BEST} suits this machine best."] if best else []
        if any(not row.is_here for row in self._rows):
            free = "" if disk_free is None else f", where {disk_free / 1e9:.0f} GB are free"
            words.append(f"{_ABSENT} downloaded to this machine's disk first{free}.")
        return " ".join(words)

    @on(Input.Changed)
    def _filter(self) -> None:
        self._marked = None
        self._show()

    def _show(self, name: str | None = None) -> None:
        """List the models that match the filter; keep the highlight, or move it to this name."""
        options = self.query_one(DialogList)
        if name is None and isinstance(before := self._chosen, Model):
            name = before.name
        typed = self.query_one(Input).value.strip()
        rows = [row for row in self._rows if row.matches(typed)]
        self._shown = [*rows]
        width = max((len(self._short(row.name)) for row in rows), default=0)
        best = best_of(self._rows)
        lines = [self._line(row, width, is_best=row is best) for row in rows]
        is_known = any(typed in (row.name, row.short_name) for row in rows)
        if typed and self._models is not None and not is_known:
            self._shown.append(typed)
            lines.append(Content.assemble("  another model: ", (one_line(typed, 60), "bold")))
        if typed and self._models is not None and typed not in self._searched:
            self._shown.append(HubSearch(typed))
            lines.append(Content.assemble("  search the hub for ", (one_line(typed, 60), "bold")))
        columns = self.query_one("#columns", Static)
        columns.display = any(row.num_tokens is not None for row in rows)
        columns.update(
            Content.styled(_columns("", "Model", width, "Size", "Context"), "$text-quiet")
        )
        options.set_options([Option(line) for line in lines])
        names = [row.name for row in rows]
        at = names.index(name) if name in names else 0
        options.highlighted = at if lines else None

    def _short(self, name: str) -> str:
        """Return the name as shown, in a narrow window without a repository's owner."""
        is_narrow = self.app.size.width < _WIDE
        return one_line(name.rpartition("/")[2] if is_narrow else name, _NAME_WIDTH)

    def _line(self, row: Model, width: int, *, is_best: bool) -> Content:
        sign = _CURRENT if row.name == self._current else _BEST if is_best else ""
        size = "" if row.weight_size is None else f"{row.weight_size / 1e9:.2f} GB"
        if not row.is_here:
            size = f"{_ABSENT} {size}"
        tokens = row.usable_context
        context, last = f"{tokens:,}" if tokens else "", row.good_for
        progress = self._progress.get(row.name)
        if progress is not None:
            context, last = "", _progress_words(progress, is_paused=self._loading != row.name)
        line = _columns(sign, self._short(row.name), width, size, context, last)
        style = "$text-quiet" if row.refusal else "bold"
        return Content(line).stylize(style, 2, 2 + width)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _choose(self) -> None:
        row = self._chosen
        if row is None:
            return
        if isinstance(row, str):
            self.dismiss(row)
        elif isinstance(row, HubSearch):
            start_worker(self, partial(self._search, row.words), group="search", exclusive=True)
        elif row.is_gguf and not row.is_here:
            self.query_one(Input).value = f"{row.name}:{_USUAL_QUANTISATION}"
            self.say("Enter takes this quantisation of its files; another one may be named.")
        elif row.refusal:
            self.say(row.refusal)
        elif row.is_here:
            self.dismiss(row)
        elif self._loading is not None:
            self.say(f"{one_line(self._loading, 60)} is already downloading; Esc pauses it.")
        elif self._models is not None and not self._is_disk_too_small(self._models, row):
            self._loading = row.name
            self._progress.setdefault(row.name, Downloaded(0, row.weight_size))
            self._download = asyncio.create_task(self._get(self._models, row))
            self._show()

    def _is_disk_too_small(self, models: ModelCatalog, row: Model) -> bool:
        """True if the disk is too small for the model; shows a note if so."""
        done = self._progress.get(row.name, Downloaded(0, None)).done
        missing = (row.weight_size or 0) - done
        if models.disk_free is None or missing <= models.disk_free:
            return False
        self.say(
            f"{one_line(row.name, 60)} needs {missing / 1e9:.1f} GB of disk, and "
            f"{models.disk_free / 1e9:.1f} GB are free. Ctrl+D deletes a downloaded model."
        )
        return True

    def action_back(self) -> None:
        """Pause the download, else clear the filter, else close."""
        field = self.query_one(Input)
        if self._download is not None:
            self._download.cancel()
        elif field.value:
            field.value = ""
        else:
            self.dismiss(None)

    async def action_delete(self) -> None:
        """Delete the downloaded model on the second press; the first asks for it."""
        row = self._chosen
        if not isinstance(row, Model) or self._models is None:
            return
        name = one_line(row.name, 60)
        if row.source is not ModelOrigin.DOWNLOADED:
            where = "was not downloaded by mlxserve" if row.is_here else "is not on this machine"
            self.say(f"{name} {where}, so there is nothing to delete.")
        elif row.name == self._current:
            self.say(f"{name} is in use. Choose another model first.")
        elif self._marked != row.name:
            self._marked = row.name
            self.say(f"Press Ctrl+D again to delete {name} from this machine's disk.")
        else:
            self._marked = None
            self.say(f"Deleting {name} …")
            start_worker(self, partial(self._remove, self._models, row), group="delete")

    async def _search(self, words: str) -> None:
        """Add the models of the hub."""
        assert self._models is not None, "without it there is no such row"
        self.say(f"Searching the hub for {one_line(words, 60)} …")
        try:
            models = await self._models.search(words)
        except ModelCommandFailed as error:
            self.say(str(error))
            return
        self._searched.add(words)
        known = {row.name for row in self._rows}
        new = [model for model in models if model.name not in known]
        self._rows += new
        if not models:
            self.say("The hub has no such model for MLX or in GGUF. Try fewer words.")
        else:
            self.say(f"{_ABSENT} from the Hugging Face hub, by downloads. Enter downloads one.")
        self._show(new[0].name if new else None)

    async def _remove(self, models: ModelCatalog, row: Model) -> None:
        try:
            await models.remove(row.name)
        except ModelCommandFailed as error:
            self.say(str(error))
            return
        self._rows = [other for other in self._rows if other is not row]
        self._show()
        # A well-known one can be downloaded again.
        await self._find(models)
        self.say(f"{one_line(row.name, 60)} was deleted.")

    async def on_unmount(self) -> None:
        if self._download is not None:
            self._download.cancel()
            # It ends its process first.
            await asyncio.wait([self._download])

    async def _get(self, models: ModelCatalog, row: Model) -> None:
        name, speed = one_line(row.name, 60), DownloadSpeed()
        self.say(f"Downloading {name} …")
        try:
            async with aclosing(models.download(row.name)) as steps:
                async for step in steps:
                    if isinstance(step, Downloaded):
                        self._progress[row.name] = step
                        self.say(f"Downloading {name}: {speed.describe(step)}. Esc pauses.")
                        self._show()
        except ModelCommandFailed as error:
            if self._progress[row.name].done == 0:
                del self._progress[row.name]
            self.say(str(error))
        except asyncio.CancelledError:
            if self.is_mounted:
                self.say("Paused; Enter resumes.")
            raise
        else:
            del self._progress[row.name]
            self._rows = [
                replace(other, source=ModelOrigin.DOWNLOADED) if other is row else other
                for other in self._rows
            ]
            self.say(f"{name} is downloaded; Enter selects it.")
        finally:
            self._loading = self._download = None
            if self.is_mounted:
                self._show()


def _columns(
    sign: str, name: str, width: int, size: str, context: str, last: str = "Good for"
) -> str:
    return f"{sign:1} {name:{width}}  {size:>10}  {context:>8}  {last}"


def _progress_words(progress: Downloaded, *, is_paused: bool) -> str:
    words = f"{progress.done / 1e9:.2f} GB"
    if (fraction := progress.fraction) is not None:
        words = f"{bar(fraction, _BAR_WIDTH)} {fraction:.0%}"
    return f"{words} paused" if is_paused else words
