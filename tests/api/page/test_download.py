"""The page offers a real model: downloaded from a hub of ours, paused, resumed, failed, and then used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.page.visits import Open
from tests.api.server.process import Process, served
from tests.tui.hub import WEIGHTS, Hub

pytestmark = pytest.mark.slow

PADDING = 24 << 20  # bytes: huggingface_hub writes 10 MB at a time


@pytest.fixture
def hub(write_model: Callable[..., Path], tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "published"
    folder.mkdir()
    write_model(folder, "llama", hidden_size=512, intermediate_size=4096)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert len(files[WEIGHTS]) > PADDING
    hub = Hub(files)
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture
def server(hub: Hub, tmp_path: Path) -> Iterator[Process]:
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
        "MLXSERVE_HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    with served(tmp_path / "log", "--num-pages", "256", env=env) as process:
        yield process


def test_a_model_is_downloaded_paused_resumed_and_answers(
    server: Process, hub: Hub, visit: Open, tmp_path: Path
) -> None:
    with visit(server.url) as seen:
        page = seen.page
        page.locator(".offer button", has_text="Download").wait_for()
        assert " GB)" in page.inner_text(".offer button")
        page.click(".offer button")
        page.wait_for_function("() => document.querySelector('.offer progress')?.value > 0")
        page.click("text=Pause")
        seen.until_text(".offer", "Paused")
        seen.reload()
        seen.until_text(".offer", "Paused")
        hub.resume.set()
        page.click("text=Resume")
        seen.until_text("#welcome", "your next message loads it")
        assert len(hub.ranges) == 2
        assert hub.ranges[1] is not None, "nothing is downloaded twice"
        page.locator("#models").wait_for()
        page.click("#settings-open")
        page.fill("#max_tokens", "8")
        page.click("#settings .main")
        seen.ask("Hello")
        seen.wait_for_answers(1)
        assert page.locator(".failed").count() == 0
        chosen = page.input_value("#models")
        assert (
            f'model = "{chosen}"' in (tmp_path / "config" / "mlxserve" / "config.toml").read_text()
        )
        page.select_option("#models", "mlxserve-mini")
        seen.until("Ready")
        seen.ask("What is a page?")
        seen.wait_for_answers(2)
        page.click("#new")
        seen.until_text(".offer", "the model that was downloaded")
        page.click(".offer button")
        seen.until_text("#welcome", "your next message loads it")
        assert seen.errors == []


@pytest.mark.long
def test_a_download_that_fails_says_why_and_is_tried_again(
    server: Process, hub: Hub, visit: Open
) -> None:
    hub.resume.set()
    hub.is_broken = True
    with visit(server.url) as seen:
        seen.page.click(".offer button")
        seen.until_text(".offer .problem", "")
        seen.page.locator(".offer button", has_text="Try again").wait_for()
        assert len(seen.page.inner_text(".offer .problem")) > 20
        hub.is_broken = False
        seen.page.click("text=Try again")
        seen.until_text("#welcome", "your next message loads it")
        assert seen.errors == []
