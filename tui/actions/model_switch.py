"""Switches models: to one of the server's, or to another one by restarting the server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from textual.app import App

from tui.actions.answering import Answering
from tui.actions.server_link import ServerLink
from tui.sanitise import one_line
from tui.talk.models import Model, ModelCatalog, ModelOrigin
from tui.widgets.models_dialog import ModelsDialog


class ModelSwitch:
    """`switched` is called after switching to another model of the running server."""

    def __init__(
        self,
        app: App[None],
        link: ServerLink,
        answering: Answering,
        models: ModelCatalog,
        switched: Callable[[], None],
    ) -> None:
        self._app = app
        self._link = link
        self._answering = answering
        self._models = models
        self._switched = switched

    def choose(self, name: str) -> None:
        """Switch to the model with this name; without a name, show a list."""
        connection = self._link.connection
        served = [] if connection is None else connection.models
        can_change = self._link.can_change_model
        if connection is None and not can_change:
            self._app.notify("Not connected yet; try again when the server is ready.", markup=False)
        elif not name:
            models = self._models if can_change else None
            self._app.push_screen(ModelsDialog(served, self._link.model, models), self._use)
        elif name in served:
            self._use(Model(name, ModelOrigin.SERVER))
        elif can_change:
            self._use(Model(name, ModelOrigin.FOLDER))
        else:
            known = ", ".join(one_line(model, 60) for model in served[:8])
            self._app.notify(f"The server has no such model. It has: {known}.", markup=False)

    def _use(self, model: Model | None) -> None:
        connection = self._link.connection
        if model is None:
            return
        if connection is not None and model.name in connection.models:
            connection.model = model.name
            self._switched()
        else:
            self._answering.run(partial(self._link.restart, model.name))
