"""Fills the welcome of an empty chat: the model, recent chats, and a larger model for this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlxserve.history.chat_file import StoreError
from mlxserve.history.messages import ChatRecord
from mlxserve.hub.model_choices import BUNDLED, Model, ModelCatalog, ModelCommandFailed, best_of
from tui.actions.server_link import ServerLink
from tui.chat.open_chat import OpenChat
from tui.widgets.welcome import MAX_RECENT, WelcomeFacts
from tui.widgets.window import ChatWindow
from tui.workers import start_worker


@dataclass
class Welcoming:
    """`models` lists the models that this machine runs, which takes a while; it is called once."""

    _link: ServerLink
    _open_chat: OpenChat
    _models: ModelCatalog
    _window: ChatWindow
    _best: Model | None = None  # best model for this machine, once it was looked for

    def begin(self) -> None:
        """Fill the welcome in the background, replacing an earlier run."""
        start_worker(self._window, self._fill, group="welcome", exclusive=True)

    async def _fill(self) -> None:
        facts = WelcomeFacts(self._link.model, recent=await self._recent())
        self._window.transcript.welcome(facts)
        if facts.model != BUNDLED or not self._link.can_change_model:
            return
        if self._best is None:
            try:
                self._best = best_of(await self._models.find())
            except ModelCommandFailed:
                # The list of models, on demand, says why.
                return
        self._window.transcript.welcome(replace(facts, recommended=self._best))

    async def _recent(self) -> list[ChatRecord]:
        try:
            return (await self._open_chat.chats())[:MAX_RECENT]
        except StoreError as error:
            self._window.notify(str(error), severity="error")
            return []
