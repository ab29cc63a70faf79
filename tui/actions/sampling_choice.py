"""`/set`: changes how answers are sampled, and remembers it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tui.actions.answering import Answering
from tui.actions.draft import Draft
from tui.chat.open_chat import OpenChat
from tui.chat.sampling import NAMES, PRESET, Preset, Sampling, SamplingRefused, preset
from tui.widgets.window import ChatWindow

_SETTING = "sampling"


@dataclass
class SamplingChoice:
    """Changes sampling. `presets` is the file of presets; it may be missing."""

    _open_chat: OpenChat
    _answering: Answering
    _draft: Draft
    _window: ChatWindow
    _presets: Path

    async def restore(self) -> None:
        """Restore the last settings."""
        self._use(Sampling.from_text(await self._open_chat.setting(_SETTING)))

    async def change(self, argument: str = "") -> None:
        """Set one value or a preset; without an argument, show the settings."""
        name, _, value = argument.partition(" ")
        sampling = self._answering.sampling
        if not name:
            set_now = sampling.label or "nothing; the model's defaults apply"
            self._window.notify(f"Set: {set_now}. Names: {', '.join(NAMES)}, {PRESET}.")
            return
        try:
            saved = (
                preset(self._presets, value.strip())
                if name == PRESET
                else Preset(sampling.changed(name, value.strip()))
            )
        except SamplingRefused as error:
            self._draft.begin(f"/set {argument}")
            self._window.notify(str(error), severity="error")
            return
        await self.use(saved)

    async def use(self, saved: Preset) -> None:
        """Use these values instead of all that were set, and their system prompt if they have one."""
        if saved.system is not None:
            await self._open_chat.set_system(saved.system)
        self._use(saved.sampling)
        await self._open_chat.set_setting(_SETTING, saved.sampling.as_text())

    def _use(self, sampling: Sampling) -> None:
        self._answering.sampling = sampling
        self._answering.status.show_header()
