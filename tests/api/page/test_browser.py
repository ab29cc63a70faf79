"""The page at `/` in headless Chromium, on real servers with the included model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.api.page.visits import Open, Visit
from tests.api.server.process import Process, served

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytestmark = pytest.mark.slow

ANSWER = re.compile(r"tokens/s|prompt tokens")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    with served(tmp_path / "log", "--num-pages", "256") as process:
        yield process


@pytest.mark.long
def test_what_reorders_a_line_is_shown_as_its_number(server: Process, visit: Open) -> None:
    with visit(server.url) as seen:
        seen.until("Ready")
        seen.ask("a\u202eb\u2066c\U000e0041d **e\u061cf** 🙂")
        seen.until_text(".user strong", "⟨U+061C⟩")
        assert seen.texts[0] == "a⟨U+202E⟩b⟨U+2066⟩c⟨U+E0041⟩d e⟨U+061C⟩f 🙂"
        assert seen.errors == []


def test_an_answer_streams_and_the_map_moves(server: Process, visit: Open) -> None:
    with visit(server.url) as seen:
        page = seen.page
        seen.until("Ready")
        assert page.inner_text("#model") == "mlxserve-mini"
        page.wait_for_function(
            "() => document.getElementById('pages').textContent.includes('of 256')"
        )
        before = page.evaluate("document.getElementById('map').toDataURL()")
        seen.ask("Hello")
        seen.wait_for_answers(1)
        assert "mlxserve-mini" in page.inner_text(".assistant")
        assert ANSWER.search(page.inner_text(".assistant .note"))
        page.wait_for_function(
            "before => document.getElementById('map').toDataURL() !== before", arg=before
        )
        seen.ask("What is a page?")
        seen.wait_for_answers(2)
        note = page.locator(".assistant .note").last.inner_text()
        assert re.search(r"[1-9]\d* pages? of \d+ from the cache", note), (
            "the second prompt begins with the first"
        )
        assert re.search(r"\d+ / 4,096 tokens", page.inner_text("#context"))
        page.click("#new")
        assert page.locator(".message").count() == 0
        assert seen.errors == []
        assert seen.hosts == {urlsplit(server.url).netloc}


def test_pages_of_windows_have_a_map_of_their_own(
    write_model: Callable[..., Path],
    tmp_path: Path,
    visit: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLXSERVE_TUNING_NUM_WINDOW_PAGES", "32")
    model = write_model(tmp_path, "gpt_oss", max_position_embeddings=2048, sliding_window=24)
    log = tmp_path / "stderr"
    flags = ("-m", str(model), "--page-size", "16", "--num-pages", "64")
    with served(log, *flags) as process, visit(process.url) as seen:
        seen.until("Ready")
        seen.page.wait_for_selector("#window-map")
        before = seen.page.evaluate("document.getElementById('window-map').toDataURL()")
        assert seen.page.inner_text("#window-pages") == "0 of 32 in use"
        seen.ask("Hello")
        seen.page.wait_for_function(
            "before => document.getElementById('window-map').toDataURL() !== before", arg=before
        )
        assert seen.errors == []


def answer_without_chance(seen: Visit) -> None:
    """Files of llama.cpp are sampled as it does, at 0.8."""
    seen.page.click("#settings-open")
    seen.page.fill("#temperature", "0")
    seen.page.click("#settings .main")


@pytest.mark.long
def test_a_real_model_answers_on_the_page(smollm2: Path, visit: Open, tmp_path: Path) -> None:
    with (
        served(tmp_path / "log", "-m", str(smollm2), "--num-pages", "256") as server,
        visit(server.url) as seen,
    ):
        seen.until("Ready")
        answer_without_chance(seen)
        seen.ask("What is the capital of France?")
        seen.wait_for_answers(1)
        assert "Paris" in seen.page.inner_text(".assistant")
        assert seen.errors == []


@pytest.mark.long
def test_a_chat_chooses_one_of_several_models(smollm2: Path, visit: Open, tmp_path: Path) -> None:
    flags = ("-m", "mlxserve-mini", "-m", str(smollm2), "--num-pages", "256")
    env = {"XDG_CONFIG_HOME": str(tmp_path)}  # the choice is kept there
    with served(tmp_path / "log", *flags, env=env) as server, visit(server.url) as seen:
        page = seen.page
        seen.until("Ready")
        options = page.locator("#models option").all_inner_texts()
        assert options == ["mlxserve-mini", smollm2.stem]
        page.select_option("#models", smollm2.stem)
        seen.until("Ready")
        answer_without_chance(seen)
        seen.ask("What is the capital of France?")
        seen.wait_for_answers(1)
        assert "Paris" in page.inner_text(".assistant")
        page.wait_for_function(
            "() => document.getElementById('pages').textContent.includes('of 256')"
        )
        assert seen.errors == []


def test_markup_in_an_answer_stays_text(server: Process, visit: Open) -> None:
    with visit(server.url) as seen:
        seen.until("Ready")
        seen.ask("Repeat: <img src=x onerror=alert(1)> and `code`")
        seen.wait_for_answers(1)
        assert seen.page.locator(".message img").count() == 0
        assert "<img src=x" in seen.page.inner_text(".user")
        assert seen.errors == []


def test_it_survives_a_restarted_server(tmp_path: Path, visit: Open) -> None:
    with served(tmp_path / "one", "--num-pages", "256") as first:
        port = str(first.port)
        with visit(first.url) as seen:
            seen.until("Ready")
            seen.ask("Hello")
            seen.wait_for_answers(1)
            seen.is_alone = True
            first.stop()
            seen.until("does not answer")
            with served(tmp_path / "two", "--port", port, "--num-pages", "128"):
                seen.until("Ready")
                seen.is_alone = False
                seen.page.wait_for_function(
                    "() => document.getElementById('pages').textContent.includes('of 128')"
                )
                seen.ask("Hello again")
                seen.wait_for_answers(2)
                assert seen.page.locator(".message").count() == 4


def test_a_key_is_asked_for(tmp_path: Path, visit: Open) -> None:
    with (
        served(
            tmp_path / "log",
            "--num-pages",
            "256",
            env={"MLXSERVE_API_KEY": "a-secret-of-this-test"},
        ) as server,
        visit(server.url) as seen,
    ):
        seen.is_alone = True  # Chromium logs the 401
        seen.page.wait_for_selector("#key", state="visible")
        seen.page.fill("#key-text", "a-secret-of-this-test")
        seen.page.press("#key-text", "Enter")
        seen.until("Ready")
        seen.ask("Hello")
        seen.wait_for_answers(1)
        assert "a-secret" not in seen.page.content()


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "scheme"), [(320, "dark"), (390, "light"), (1280, "dark"), (1920, "light")]
)
def test_it_fits_the_window_in_both_schemes(
    server: Process, visit: Open, width: int, scheme: str
) -> None:
    with visit(server.url, scheme, width=width) as seen:
        seen.until("Ready")
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert seen.page.evaluate(overflow) == 0
        seen.ask("What is a page?")
        seen.wait_for_answers(1)
        assert seen.page.evaluate(overflow) == 0
        assert seen.page.evaluate(overflow.replace("Width", "Height")) == 0
        box = seen.page.locator("#send").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800, "the composer is in the window"
        header = seen.page.locator("header").bounding_box()
        assert header is not None
        assert header["height"] < 60, "one row"
        colour = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        levels = [int(part) for part in re.findall(r"\d+", colour)[:3]]
        assert (sum(levels) < 3 * 100) == (scheme == "dark")


def test_figures_are_of_one_model_when_another_is_chosen_between_two_questions(
    write_model: Callable[..., Path], visit: Open, tmp_path: Path
) -> None:
    """The panel asked for the requests of the first model and then for the statistics of the second."""
    second = write_model(tmp_path, "llama")
    flags = ("-m", "mlxserve-mini", "-m", str(second), "--num-pages", "256")
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    held: list[Route] = []
    asked: list[str] = []
    with served(tmp_path / "log", *flags, env=env) as server, visit(server.url) as seen:
        page = seen.page
        page.on("request", lambda request: asked.append(request.url))
        seen.until("Ready")
        page.route("**/api/v1/requests*", lambda route: held.append(route))
        with page.expect_request("**/api/v1/requests*"):
            pass
        with page.expect_request(f"**/api/v1/requests?model={second.name}"):
            page.select_option("#models", second.name)
        page.unroute("**/api/v1/requests*")  # which lets those that are held go on
        statistics = f"/api/v1/kv/stats?model={second.name}"
        for _ in range(2):
            with page.expect_response("**" + statistics):
                pass
        asked = asked[: max(n for n, url in enumerate(asked) if url.endswith(statistics)) + 1]
        lists = [url for url in asked if url.endswith(f"/api/v1/requests?model={second.name}")]
        assert len(lists) == len([url for url in asked if url.endswith(statistics)])
        assert seen.errors == []
