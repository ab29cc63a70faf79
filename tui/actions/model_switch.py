"""Switches models: to one of the server's, or to another by restarting the server.

/model NAME ─ resolve, download, compare with memory ─ stop the server ─ start it with NAME
              the old model answers meanwhile,        └─ it fails: start it with the old one
              and ends its answer first
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from textual.app import App

from mlxserve.history.store import REQUESTED
from mlxserve.hub.model_choices import BUNDLED, Model, ModelCatalog, ModelCommandFailed, ModelOrigin
from mlxserve.system.terminal_text import one_line
from tui.actions.answering import Answering
from tui.actions.server_link import ServerLink
from tui.chat.download_speed import DownloadSpeed
from tui.chat.open_chat import OpenChat
from tui.widgets.models_dialog import ModelsDialog
from tui.workers import start_worker


@dataclass
class ModelSwitch:
    """`models` finds and downloads others."""

    _app: App[None]
    _link: ServerLink
    _answering: Answering
    _models: ModelCatalog
    _chat: OpenChat
    _chosen: str = ""  # the user's choice, until it is remembered

    def choose(self, name: str = "") -> None:
        """Switch to the model with this name; without a name, show a list."""
        connection = self._link.connection
        served = [] if connection is None else connection.models
        can_change = self._link.can_change_model
        if connection is None and not can_change:
            self._app.notify("Not connected yet; try again when the server is ready.")
        elif not name:
            models = self._models if can_change else None
            self._app.push_screen(ModelsDialog(served, self._link.model, models), self._take)
        elif name in served:
            self._use(Model(name, ModelOrigin.SERVER))
        elif can_change:
            start_worker(self._app, partial(self._get_ready, name), group="model", exclusive=True)
        else:
            known = ", ".join(one_line(model, 60) for model in served[:8])
            self._app.notify(
                f"The server has no such model. It has: {known}. `mlxserve chat {one_line(name, 60)}` "
                "starts a chat with it on a server of its own."
            )

    async def connected(self) -> None:
        """Remember the connected model's name, and make the user's choice the default."""
        connection, requested = self._link.connection, self._link.requested
        chosen, self._chosen = self._chosen, ""
        if connection is None:
            return
        if requested and self._link.can_change_model:
            await self._chat.set_setting(f"{REQUESTED}{connection.model}", requested)
        if chosen and chosen in (requested, connection.model):
            await self._remember(chosen)

    async def _remember(self, name: str) -> None:
        try:
            await self._models.use(name)
        except ModelCommandFailed as error:
            self._app.notify(str(error), severity="warning")
        else:
            self._app.notify(
                f"{one_line(name, 60)} is what chat, run and serve use from now on. "
                "`mlxserve use` changes that."
            )

    def _take(self, choice: Model | str | None) -> None:
        """Handle the dialog's result: a model of its list, another name, or None."""
        if isinstance(choice, str):
            self.choose(choice)
        elif choice is not None:
            self._use(choice)

    def _use(self, model: Model) -> None:
        connection = self._link.connection
        if connection is not None and model.name in connection.models:
            connection.ask(model.name)
            self._answering.status.show_header()
            if self._link.can_change_model and ("/" in model.name or model.name == BUNDLED):
                start_worker(
                    self._app, partial(self._remember, model.name), group="use", exclusive=True
                )
        elif model.refusal:
            self._keep(model.refusal)
        else:
            self._chosen = model.name
            if self._answering.is_answering:
                words = one_line(model.name, 60)
                self._app.notify(f"{words} is started when this answer has ended. Esc ends it now.")
            self._answering.queue.operation = partial(self._link.restart, model.name)
            self._answering.send_next()

    async def _get_ready(self, name: str) -> None:
        """Find or download the model while the old one still answers, then switch."""
        words = one_line(name, 60)
        self._say(f"Looking for {words}")
        speed = DownloadSpeed()
        try:
            async with aclosing(self._models.download(name)) as steps:
                async for step in steps:
                    if isinstance(step, Model):
                        self._use(step)
                        return
                    self._say(f"Downloading {words} {speed.describe(step)}", step.fraction)
        except ModelCommandFailed as error:
            self._keep(str(error))

    def _say(self, words: str, progress: float | None = None) -> None:
        if not self._answering.is_answering:
            self._link.say(words, progress)

    def _keep(self, why: str) -> None:
        """Keep the old model, if there is one."""
        old = one_line(self._link.model, 60)
        self._app.notify(f"{why} {old} stays in use." if old else why, severity="error")
        if not self._answering.is_answering:
            self._answering.status.show_ready()
