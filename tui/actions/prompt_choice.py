"""`/prompts`: chooses a saved prompt of the server for the chat, or saves the chat's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from textual.app import App

from mlxserve.history.saved_prompts import SavedPrompt
from mlxserve.system.terminal_text import one_line
from tui.actions.answering import Answering
from tui.actions.sampling_choice import SamplingChoice
from tui.actions.server_link import ServerLink
from tui.chat.open_chat import OpenChat
from tui.chat.sampling import Preset, Sampling, SamplingRefused
from tui.talk.errors import ChatError
from tui.widgets.prompts_dialog import PromptsDialog
from tui.workers import start_worker

if TYPE_CHECKING:
    from tui.talk.prompt_client import PromptClient


@dataclass
class PromptChoice:
    """Takes prompts from the server that is connected, which keeps them for its page as well."""

    _app: App[None]
    _link: ServerLink
    _chat: OpenChat
    _answering: Answering
    _sampling: SamplingChoice

    def choose(self, name: str = "") -> None:
        """Use the prompt with this name; without a name, show them all."""
        connection = self._link.connection
        if connection is None:
            self._app.notify("Not connected yet; try again when the server is ready.")
        else:
            choosing = partial(self._choose, connection.client.prompts, name)
            start_worker(self._app, choosing, group="prompts", exclusive=True)

    async def _choose(self, client: PromptClient, name: str) -> None:
        try:
            prompts = await client.all()
        except ChatError as error:
            self._app.notify(str(error), severity="error")
            return
        named = [prompt for prompt in prompts if prompt.name == name]
        if named:
            await self._use(named[0])
        elif name:
            known = ", ".join(one_line(prompt.name, 40) for prompt in prompts[:8])
            words = f"There are: {known}." if known else "None is saved yet."
            self._app.notify(
                f"No saved prompt is named {one_line(name, 60)}. {words} `/prompts` saves one.",
                severity="error",
            )
        else:
            dialog = PromptsDialog(prompts, client.delete)
            self._app.push_screen(dialog, partial(self._take, client))

    def _take(self, client: PromptClient, choice: SavedPrompt | str | None) -> None:
        """Handle the dialog's result: a prompt, a name to save under, or None."""
        if isinstance(choice, SavedPrompt):
            work = partial(self._use, choice)
        elif choice is not None:
            work = partial(self._save, client, choice)
        else:
            return
        start_worker(self._app, work, group="prompts", exclusive=True)

    async def _use(self, prompt: SavedPrompt) -> None:
        name = one_line(prompt.name, 60)
        try:
            sampling = Sampling.from_values(prompt.sampling)
        except SamplingRefused as error:
            self._app.notify(f"{name}: {error}", severity="error")
            return
        await self._sampling.use(Preset(sampling, prompt.system))
        self._app.notify(f"{name} is used from the next message on.")

    async def _save(self, client: PromptClient, name: str) -> None:
        try:
            await client.save(name, self._chat.system, self._answering.sampling.values)
        except ChatError as error:
            self._app.notify(str(error), severity="error")
        else:
            self._app.notify(f"The chat's prompt and sampling are saved as {one_line(name, 60)}.")
