"""`/models`: shows what the server has loaded, and loads, unloads and pins models."""

from __future__ import annotations

from dataclasses import dataclass

from textual.app import App

from tui.actions.server_link import ServerLink
from tui.widgets.loaded_models_dialog import LoadedModelsDialog


@dataclass
class LoadedModels:
    """Shows the dialog for the server that is connected."""

    _app: App[None]
    _link: ServerLink

    def show(self) -> None:
        connection = self._link.connection
        if connection is None:
            self._app.notify("Not connected yet; try again when the server is ready.")
        else:
            self._app.push_screen(LoadedModelsDialog(connection.client.control))
