"""Models as a scripted `mlxserve models` and `mlxserve pull` report them."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from mlxserve.hub.catalog import Origin
from mlxserve.hub.model_choices import (
    Downloaded,
    Model,
    ModelCatalog,
    ModelCommandFailed,
    ModelOrigin,
    best_of,
)
from tests.waiting import until

Program = Callable[..., ModelCatalog]
CARD = {
    "name": "a/b",
    "source": "suggested",
    "weight_size": 2_260_000_000,
    "needed": 3,
    "context": 8192,
    "fits": True,
    "num_tokens": 9000,
}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    def write(source: str, *options: str) -> ModelCatalog:
        script = tmp_path / "program.py"
        script.write_text(source)
        return ModelCatalog((sys.executable, str(script)), options=options)

    return write


async def steps_of(models: ModelCatalog) -> list[Downloaded | Model]:
    return [step async for step in models.download("a/b")]


def test_a_model_may_be_wherever_the_catalogue_finds_models() -> None:
    for origin in [*Origin]:
        model = Model("a", ModelOrigin(origin.value))
        assert model.is_here == (origin is not Origin.SUGGESTED), origin


def test_models_are_found(program: Program) -> None:
    other = {**CARD, "name": "a/other"}
    recommended = {"best": "a/other", "faster": None}
    listed = json.dumps({"models": [CARD, other], "disk_free": 5_000, "recommended": recommended})
    models = program(
        f"import sys\nassert sys.argv[1:] == ['models', '--json', '--seed', '1']\nprint({listed!r})",
        "--seed",
        "1",
    )
    found = Model("a/b", ModelOrigin.SUGGESTED, 2_260_000_000, True, 9000, 8192, 3)
    best = replace(found, name="a/other", is_recommended=True)
    assert asyncio.run(models.find()) == [found, best]
    assert best_of([found, best]) == best
    assert best_of([found]) is None
    assert models.disk_free == 5_000


def test_the_hub_is_searched_by_the_command_for_it(program: Program) -> None:
    cards = [{"name": "a/b", "format": "gguf", "downloads": 7}]
    models = program(
        f"import sys\nassert sys.argv[1:] == ['search', '--json', '--', '-x', 'b']\nprint({json.dumps(cards)!r})"
    )
    found = Model("a/b", ModelOrigin.SUGGESTED, downloads=7, is_gguf=True)
    assert asyncio.run(models.search("-x b")) == [found]
    assert found.good_for == "GGUF, 7 downloads"


def test_a_search_that_fails_says_why(program: Program) -> None:
    models = program("raise SystemExit('error: The hub cannot be searched now: no network.')")
    with pytest.raises(ModelCommandFailed, match=r"^The hub cannot be searched now: no network\.$"):
        asyncio.run(models.search("gemma"))


@pytest.mark.parametrize("is_cancelled_again", [True, False], ids=["cancelled twice", "deaf"])
async def test_a_child_that_does_not_end_when_told_is_gone_with_its_task(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled_again: bool
) -> None:
    """As asyncio.run cancels what the app has cancelled before, and where nothing else comes."""
    monkeypatch.setattr(
        "mlxserve.hub.model_choices.END_SECONDS", 600.0 if is_cancelled_again else 0.1
    )
    pid, told = tmp_path / "pid", tmp_path / "told"
    models = program(
        "import os, pathlib, signal, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(told)!r}).touch())\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "while True: time.sleep(0.05)"  # a signal just before a sleep is seen after it
    )

    task = asyncio.ensure_future(models.find())
    await until(lambda: pid.exists() and bool(pid.read_text()))
    task.cancel()
    if is_cancelled_again:
        await until(told.exists)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("said", ["", "nonsense", "[]", '{"models": [{}]}'])
def test_a_malformed_list_is_an_error(program: Program, said: str) -> None:
    with pytest.raises(ModelCommandFailed, match="mlxserve models"):
        asyncio.run(program(f"print({said!r})").find())


def test_a_download_reports_its_progress(program: Program) -> None:
    lines = ['{"done": 0, "total": null}', "noise", '{"done": 5, "total": 20}', '{"path": "/x"}']
    steps = asyncio.run(steps_of(program(f"print({chr(10).join(lines)!r})")))
    pulled = Model("a/b", ModelOrigin.DOWNLOADED)
    assert steps == [Downloaded(5, 20), pulled], "no step without a byte or a size"
    assert (Downloaded(5, None).fraction, Downloaded(5, 20).fraction) == (None, 0.25)


def test_a_downloaded_model_says_whether_it_fits(program: Program) -> None:
    said = json.dumps({"path": "/x", **CARD, "name": "x", "source": "downloaded", "needed": 7})
    [model] = asyncio.run(steps_of(program(f"print({said!r})")))
    assert isinstance(model, Model)
    assert (model.name, model.fits, model.needed) == ("a/b", CARD["fits"], 7)


def test_a_failed_download_reports_why(program: Program) -> None:
    with pytest.raises(ModelCommandFailed, match="no connection"):
        asyncio.run(steps_of(program('print(\'{"error": "no connection"}\')')))
    with pytest.raises(ModelCommandFailed, match="stopped early"):
        asyncio.run(steps_of(program("pass")))


def test_a_paused_download_ends_its_process(program: Program) -> None:
    source = "import os, sys\nprint('{\"done\": %d}' % os.getpid(), flush=True)\n"
    models = program(source + "import time\ntime.sleep(600)\n")

    async def pause() -> int:
        async with aclosing(models.download("a/b")) as steps:
            return (await anext(steps)).done

    pid = asyncio.run(pause())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_usable_context_is_a_verdict() -> None:
    for num_tokens, context, usable, words in [
        (90_000, 40_960, 40_960, "long documents"),
        (11_000, 40_960, 11_000, "chats and files"),
        (90_000, 4096, 4096, "short chats"),
        (900, 40_960, 900, "a few messages"),
        (0, 40_960, 0, "too large"),
        (9000, None, 9000, "chats and files"),
    ]:
        model = Model("a/b", ModelOrigin.FOLDER, 1, num_tokens > 0, num_tokens, context)
        assert (model.usable_context, model.good_for) == (usable, words), num_tokens


def test_a_model_is_found_by_the_words_of_its_names() -> None:
    model = Model("org/Qwen3-4B-4bit", ModelOrigin.SUGGESTED, short_name="qwen3:4b")
    assert all(model.matches(words) for words in ("", "qwen3:4", "4bit ORG", "4b-"))
    assert not model.matches("qwen3 8b")


def test_a_model_of_unknown_size_has_no_verdict() -> None:
    assert Model("a/b", ModelOrigin.SERVER).usable_context is None
    assert Model("a/b", ModelOrigin.SERVER).good_for == ""


def test_a_model_is_deleted(program: Program) -> None:
    source = "import sys\nassert sys.argv[1:] == ['rm', '--yes', '--', 'a/b']\nprint('Deleted')"
    asyncio.run(program(source).remove("a/b"))


def test_a_model_that_cannot_be_deleted_says_why(program: Program) -> None:
    source = "import sys\nsys.exit('error: a/b is served. Stop that server first.')"
    with pytest.raises(ModelCommandFailed, match=r"^a/b is served\. Stop that server first\.$"):
        asyncio.run(program(source).remove("a/b"))


@pytest.mark.parametrize("name", ["--help", "-m", "--", "--json --yes", "-", "--token=x", "\n--x"])
def test_a_name_is_never_an_option_of_the_command(
    program: Program, tmp_path: Path, name: str
) -> None:
    """Whoever names a model in a request would otherwise choose options of a command."""
    log = tmp_path / "arguments"
    models = program(
        f"import json, sys\nopen({str(log)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        """print('{"path": "/x"}' if sys.argv[1] == "pull" else "[]")"""
    )

    async def do_all() -> None:
        async for _ in models.download(name):
            pass
        await models.use(name)
        await models.remove(name)
        await models.search(name)

    asyncio.run(do_all())
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert [call[0] for call in calls] == ["pull", "use", "rm", "search"]
    for call in calls:
        assert call[call.index("--") + 1 :] == (name.split() if call[0] == "search" else [name])
