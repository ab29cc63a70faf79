"""The list of saved prompts: filtered, chosen, saved under a name, deleted on the second press."""

from __future__ import annotations

from mlxserve.history.saved_prompts import SavedPrompt
from tests.tui.terminals import hosted
from tui.talk.errors import ChatError
from tui.widgets.prompts_dialog import PromptsDialog

COACH = SavedPrompt(id=1, name="Coach", system="Be kind.\nBe brief.", sampling={"seed": 3})
PIRATE = SavedPrompt(id=2, name="Pirate \x1b[31m", system="", sampling={})


class Deletions:
    """What was deleted; the first one fails if `error` is set."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.error = ""

    async def delete(self, prompt: SavedPrompt) -> None:
        if self.error:
            message, self.error = self.error, ""
            raise ChatError(message)
        self.names.append(prompt.name)


async def test_prompts_are_filtered_and_one_is_chosen() -> None:
    async with hosted(PromptsDialog([COACH, PIRATE], Deletions().delete)) as t:
        await t.until_shown("seed 3 · Be kind. Be brief.")
        assert "\x1b" not in t.screen
        await t.type("coa")
        await t.until(lambda: "Pirate" not in t.screen)
        await t.until_shown("save as coa")
        await t.press("enter")
        await t.until(lambda: t.app.results == [COACH])


async def test_a_new_name_saves_and_a_known_one_replaces() -> None:
    async with hosted(PromptsDialog([COACH], Deletions().delete)) as t:
        await t.type("New  name")
        await t.until_shown("save as New name")
        await t.press("ctrl+u")
        await t.type("Coach")
        await t.until_shown("replace Coach")
        await t.press("down", "enter")
        await t.until(lambda: t.app.results == ["Coach"])


async def test_a_prompt_is_deleted_with_the_second_press_and_a_failure_keeps_it() -> None:
    deletions = Deletions()
    deletions.error = "The server is busy."
    async with hosted(PromptsDialog([COACH], deletions.delete)) as t:
        await t.until_shown("Coach")
        await t.press("ctrl+d")
        await t.until_shown("Press Ctrl+D again to delete Coach.")
        await t.press("ctrl+d")
        await t.until_shown("The server is busy.")
        assert deletions.names == []
        await t.press("ctrl+d")
        await t.until_shown("None is saved yet.")
        assert deletions.names == ["Coach"]
