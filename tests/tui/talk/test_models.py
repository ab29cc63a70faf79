"""Models as a scripted `mlxserve models` and `mlxserve pull` report them."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from tui.talk.errors import ChatError
from tui.talk.models import Downloaded, Model, ModelCatalog, ModelOrigin

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


def test_models_are_found(program: Program) -> None:
    listed = json.dumps({"models": [CARD]})
    models = program(
        f"import sys\nassert sys.argv[1:] == ['models', '--json', '--seed', '1']\nprint({listed!r})",
        "--seed",
        "1",
    )
    found = Model("a/b", ModelOrigin.SUGGESTED, 2_260_000_000, True, 9000, 8192, 3)
    assert asyncio.run(models.find()) == [found]


@pytest.mark.parametrize("said", ["", "nonsense", "[]", '{"models": [{}]}'])
def test_a_malformed_list_is_an_error(program: Program, said: str) -> None:
    with pytest.raises(ChatError, match="mlxserve models"):
        asyncio.run(program(f"print({said!r})").find())


def test_a_download_reports_its_progress(program: Program) -> None:
    lines = ['{"done": 0, "total": null}', "noise", '{"done": 5, "total": 20}', '{"path": "/x"}']
    steps = asyncio.run(steps_of(program(f"print({chr(10).join(lines)!r})")))
    pulled = Model("a/b", ModelOrigin.DOWNLOADED)
    assert steps == [Downloaded(0, None), Downloaded(5, 20), pulled]
    assert (Downloaded(0, None).fraction, Downloaded(5, 20).fraction) == (None, 0.25)


def test_a_downloaded_model_says_whether_it_fits(program: Program) -> None:
    said = json.dumps({"path": "/x", **CARD, "name": "x", "source": "downloaded", "needed": 7})
    [model] = asyncio.run(steps_of(program(f"print({said!r})")))
    assert isinstance(model, Model)
    assert (model.name, model.fits, model.needed) == ("a/b", CARD["fits"], 7)


def test_a_failed_download_reports_why(program: Program) -> None:
    with pytest.raises(ChatError, match="no connection"):
        asyncio.run(steps_of(program('print(\'{"error": "no connection"}\')')))
    with pytest.raises(ChatError, match="stopped early"):
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


@pytest.mark.parametrize(
    ("fits", "num_tokens", "words"),
    [
        (True, 9000, "fits"),
        (False, 4000, "4,000 of 8,192"),
        (False, 0, "too large"),
    ],
)
def test_the_verdict_is_text(fits: bool, num_tokens: int, words: str) -> None:
    assert Model("a/b", ModelOrigin.FOLDER, 1, fits, num_tokens, 8192).verdict == words
    assert Model("a/b", ModelOrigin.SERVER).verdict == ""
