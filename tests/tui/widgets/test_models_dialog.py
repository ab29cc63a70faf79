"""The model picker, with a scripted server and a scripted command line."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from mlxserve.hub.model_choices import (
    Downloaded,
    Model,
    ModelCatalog,
    ModelCommandFailed,
    ModelOrigin,
)
from tests.tui import scripts
from tests.tui.fake_server import FakeServer, in_place_of_a_server
from tests.tui.terminals import Hosted, Open, hosted
from tui.home import Home
from tui.talk.connection import ConnectOptions, Connector
from tui.talk.server_process import ServerProcess
from tui.widgets.models_dialog import ModelsDialog

FOUND = [
    Model("mini", ModelOrigin.BUNDLED, 10_000_000, True, 90_000),
    Model("a/here", ModelOrigin.DOWNLOADED, 2_260_000_000, False, 4000, 40_960),
    Model("a/there", ModelOrigin.SUGGESTED, 4_610_000_000, False, 900),
    Model("a/huge", ModelOrigin.SUGGESTED, 44_000_000_000, False, 0, 8192, 45_000_000_000),
]


class Machine(ModelCatalog):
    """Lists these models; the first download stops in the middle, unless `error` is set."""

    def __init__(self, found: list[Model]) -> None:
        super().__init__()
        self._found = found
        self.downloads: list[str] = []
        self.error = ""
        self.holds = True  # the first download does not end by itself
        self.disk_free = 90_000_000_000
        self.removed: list[str] = []
        self.used = ""
        self.searches: list[str] = []
        self.hub: list[Model] = []

    async def find(self) -> list[Model]:
        return self._found

    async def use(self, name: str) -> None:
        self.used = name

    async def search(self, words: str) -> list[Model]:
        self.searches.append(words)
        if self.error:
            raise ModelCommandFailed(self.error)
        return self.hub

    async def remove(self, name: str) -> None:
        if self.error:
            raise ModelCommandFailed(self.error)
        self.removed.append(name)
        self._found = [one for one in self._found if one.name != name]

    async def download(self, name: str) -> AsyncGenerator[Downloaded | Model, None]:
        self.downloads.append(name)
        if self.error:
            raise ModelCommandFailed(self.error)
        yield Downloaded(1_000, 4_000)
        if len(self.downloads) == 1 and self.holds:
            await asyncio.Event().wait()  # until it is paused
        yield next(
            (one for one in self._found if one.name == name), Model(name, ModelOrigin.FOLDER)
        )


class OwnServer(Connector):
    """Starts a program that only prints the fake server's address, and records its real command."""

    def __init__(self, server: FakeServer, home: Home) -> None:
        options = ConnectOptions(server_args=["--model", "mini", "--seed", "1"])
        super().__init__(options, home, self.create)
        self._fake = server
        self.commands: list[list[str]] = []
        self.fails_with = ""  # a model whose server exits at once

    def create(self, model: str | None, server_args: Sequence[str], home: Home) -> ServerProcess:
        real = ServerProcess.for_model(model, server_args, home)
        self.commands.append(real.command[5:])
        fails = model is not None and model == self.fails_with
        create = in_place_of_a_server(self._fake, "exit 3" if fails else "")
        return create(model, server_args, home)


def dialog(models: Machine) -> ModelsDialog:
    return ModelsDialog(["mini"], "mini", models)


@pytest.fixture
def machine() -> Machine:
    return Machine(FOUND)


@pytest.fixture
def t(machine: Machine) -> AbstractAsyncContextManager[Hosted]:
    return hosted(dialog(machine))


@pytest.fixture
def ours(server: FakeServer, home: Home) -> OwnServer:
    server.models = ["mini"]
    return OwnServer(server, home)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_models_are_shown_with_size_context_and_verdict(
    machine: Machine, size: tuple[int, int]
) -> None:
    async with hosted(dialog(machine), size=size) as t:
        for words in ("● mini", "0.01 GB", "here", "2.26 GB", "4,000", "↓ 4.61 GB"):
            await t.until_shown(words)
        for words in ("Context", "Good for", "short chats", "a few messages", "too large"):
            await t.until_shown(words)
        await t.until_shown("where 90 GB are free")
        assert len(t.screen.split("\n")) == size[1]


async def test_selecting_a_local_model_restarts_the_server(
    terminal: Open, machine: Machine, ours: OwnServer, server: FakeServer
) -> None:
    async with terminal(ours, models=machine) as t:
        await t.ask("/model")
        await t.until_shown("here  ")
        first = ours.server
        assert first is not None
        server.models = ["here"]
        await t.press("down", "enter")
        await t.until(lambda: ours.server is not first)
        await t.until_ready()
        assert not first.is_running
        await t.talk("one")
        assert server.requests[0]["model"] == "here"
    assert [c[c.index("0") + 1 :] for c in ours.commands] == [
        ["--exit-with-parent", "--model", "mini", "--seed", "1"],
        ["--exit-with-parent", "--model", "a/here", "--seed", "1"],
    ]


async def test_a_download_is_paused_and_resumed(t: Hosted, machine: Machine) -> None:
    await t.until_shown("there  ")
    await t.press("down", "down", "enter")
    await t.until_shown("25%")
    await t.press("escape")
    await t.until_shown("25% paused")
    await t.until_shown("Enter resumes")
    await t.press("enter")
    await t.until_shown("is downloaded; Enter selects it")
    await t.press("enter")
    await t.until(lambda: bool(t.app.results))
    assert [model.name for model in t.app.results] == ["a/there"]
    assert machine.downloads == ["a/there", "a/there"]


async def test_the_model_that_suits_the_machine_is_starred() -> None:
    useful = Model(
        "a/useful",
        ModelOrigin.SUGGESTED,
        2_000_000_000,
        False,
        9000,
        40_960,
        is_recommended=True,
    )

    async with hosted(dialog(Machine([*FOUND, useful]))) as t:
        await t.until_shown("★ a/useful")
        assert t.screen.count("★") == 2, "its row, and what the star means"


async def test_typing_filters_and_escape_clears_before_it_closes(t: Hosted) -> None:
    await t.until_shown("huge")
    await t.type("ere a/")
    await t.until(lambda: "huge" not in t.screen)
    for words in ("here", "there", "another model: ere a/"):
        await t.until_shown(words)
    await t.press("escape")
    await t.until_shown("huge")
    assert t.app.results == []
    await t.press("escape")
    await t.until(lambda: t.app.results == [None])


async def test_the_hub_is_searched_and_what_it_has_is_downloaded(
    t: Hosted, machine: Machine
) -> None:
    machine.holds = False
    machine.hub = [
        Model("b/gemma-9-4bit", ModelOrigin.SUGGESTED, downloads=12_345),
        Model("c/gemma-9-GGUF", ModelOrigin.SUGGESTED, downloads=99, is_gguf=True),
        FOUND[1],
    ]
    await t.until_shown("here  ")
    await t.type("gemma")
    await t.until_shown("search the hub for gemma")
    await t.press("down", "enter")
    await t.until_shown("12,345 downloads")
    await t.until_shown("GGUF, 99 downloads")
    assert "search the hub" not in t.screen
    assert machine.searches == ["gemma"]
    await t.press("enter")
    await t.until_shown("is downloaded; Enter selects it")
    assert machine.downloads == ["b/gemma-9-4bit"]
    await t.press("down", "enter")
    await t.until_shown("another model: c/gemma-9-GGUF:Q4_K_M")
    await t.press("enter")
    await t.until(lambda: t.app.results == ["c/gemma-9-GGUF:Q4_K_M"])


async def test_a_hub_that_cannot_be_searched_says_why(t: Hosted, machine: Machine) -> None:
    machine.error = "The hub cannot be searched now: no network."
    await t.until_shown("here  ")
    await t.type("gemma")
    await t.press("down", "enter")
    await t.until_shown("The hub cannot be searched now: no network.")
    await t.until_shown("search the hub for gemma")


async def test_another_name_is_resolved_downloaded_and_used(
    terminal: Open, machine: Machine, ours: OwnServer
) -> None:
    machine.holds = False

    async with terminal(ours, models=machine) as t:
        await t.ask("/model")
        await t.until_shown("huge")
        await t.type("qwen3:4b")
        await t.until_shown("another model: qwen3:4b")
        await t.press("enter")
        await t.until(lambda: len(ours.commands) == 2)
        await t.until_ready()
    assert machine.downloads == ["qwen3:4b"]
    assert "qwen3:4b" in ours.commands[1]


async def test_a_downloaded_model_is_deleted_on_the_second_press(
    t: Hosted, machine: Machine
) -> None:
    await t.until_shown("here  ")
    await t.press("ctrl+d")
    await t.until_shown("was not downloaded")  # the bundled one
    await t.press("down", "ctrl+d")
    await t.until_shown("Press Ctrl+D again to delete a/here")
    await t.press("down", "up", "ctrl+d")
    await t.until_shown("Press Ctrl+D again")
    assert machine.removed == []
    await t.press("ctrl+d")
    await t.until_shown("a/here was deleted")
    await t.until(lambda: "2.26 GB" not in t.screen)
    assert machine.removed == ["a/here"]


async def test_a_model_that_the_disk_cannot_hold_is_not_downloaded(
    t: Hosted, machine: Machine
) -> None:
    machine.disk_free = 3_000_000_000
    await t.until_shown("there  ")
    await t.press("down", "down", "enter")
    await t.until_shown("needs 4.6 GB of disk, and 3.0 GB are free")
    assert machine.downloads == []


async def test_a_failed_download_shows_why(t: Hosted, machine: Machine) -> None:
    machine.error = "a/there cannot be downloaded now. Check the connection."
    await t.until_shown("there  ")
    await t.press("down", "down", "enter")
    await t.until_shown("Check the connection")
    assert "0.00 GB" not in t.screen
    assert "paused" not in t.screen


async def test_a_model_that_is_too_large_is_not_even_downloaded(
    t: Hosted, machine: Machine
) -> None:
    await t.until_shown("huge  ")
    await t.press("down", "down", "down", "enter")
    await t.until_shown("too large for this machine's memory: it needs 45.0 GB")
    assert machine.downloads == []


async def test_a_named_model_is_downloaded_while_the_old_one_answers(
    terminal: Open, machine: Machine, ours: OwnServer
) -> None:
    async with terminal(ours, models=machine) as t:
        first = ours.server
        assert first is not None
        await t.ask("/model a/there")
        await t.until(lambda: "Downloading a/there 0.0 of 0.0 GB" in t.status)
        await t.talk("are you there?")
        assert first.is_running
        machine.holds = False
        await t.ask("/model a/there")
        await t.until(lambda: ours.server is not first)
        await t.until_ready()
        assert "a/there" in ours.commands[1]


async def test_a_model_is_started_after_the_answer_that_is_being_written(
    terminal: Open, machine: Machine, ours: OwnServer, server: FakeServer
) -> None:
    machine.holds = False
    gate = scripts.Gate()
    server.script(scripts.say("half, "), gate, scripts.say("and whole"))
    async with terminal(ours, models=machine) as t:
        first = ours.server
        assert first is not None
        await t.ask("a long question")
        await t.until(gate.reached.is_set)
        await t.ask("/model a/here")
        await t.until_shown("a/here is started when this answer has ended")
        await t.ask("for the new model")
        assert first.is_running
        server.models = ["here"]
        gate.open()
        await t.until_shown("half, and whole")
        await t.until(lambda: ours.server is not first)
        await t.until(lambda: server.requests[-1]["messages"][-1]["content"] == "for the new model")
        await t.until_ready()
    assert server.requests[-1]["model"] == "here"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("qwen3-9b", "There is no 'qwen3-9b'. Did you mean qwen3:8b?", "Did you mean qwen3:8b?"),
        ("a/huge", "", "too large for this machine's memory"),
    ],
)
async def test_a_model_that_cannot_be_had_leaves_the_old_one_running(
    terminal: Open, machine: Machine, ours: OwnServer, name: str, error: str, words: str
) -> None:
    machine.error, machine.holds = error, False

    async with terminal(ours, models=machine) as t:
        await t.ask(f"/model {name}")
        await t.until_shown(words)
        await t.until_shown("stays")  # in use
        await t.until_ready()
        await t.talk("still here?")
    assert ours.server is not None
    assert len(ours.commands) == 1


@pytest.mark.slow
async def test_a_model_that_does_not_start_gives_way_to_the_one_before(
    terminal: Open, machine: Machine, ours: OwnServer
) -> None:
    ours.fails_with = "a/here"

    machine.holds = False
    async with terminal(ours, models=machine) as t:
        await t.ask("/model a/here")
        await t.until_shown("a/here did not start, so mini answers")
        await t.until_ready()
        assert "mini" in t.screen.split("\n")[0]
        await t.talk("still here?")
    assert [c[c.index("--model") + 1] for c in ours.commands] == ["mini", "a/here", "mini"]


@pytest.mark.slow
async def test_a_server_started_elsewhere_offers_only_its_own_models(terminal: Open) -> None:
    async with terminal() as t:
        await t.ask("/model")
        await t.until(lambda: isinstance(t.app.screen, ModelsDialog))
        await t.until_shown("was not started here")
        assert "large" in t.screen
