"""What axe-core finds on the page: nothing serious, in any of its states, sizes and colours.

axe-core comes from npm (`npm install --global axe-core`; `.ci/run` and the workflow do that). Without it, or
without a Chromium, this says so and is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.page.test_chat import view
from tests.api.page.visits import Open, Visit
from tests.api.serving import StartServer, serving
from tests.mcp.kept_settings import scripted, write_servers

pytestmark = pytest.mark.slow

# Narrow and wide in either scheme.
WINDOWS = ((320, "light"), (390, "dark"), (1280, "light"), (1920, "dark"))
FOUND = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => [one.id, one.impact, one.help, one.nodes.slice(0, 4).map((node) => node.html.slice(0, 160))]);
}"""
ANSWER = r"""# A title

A [link](https://example.org), **strong**, `code` and $x^2$.

1. one
2. two

> quoted

```python
def f(): return 'a' + 1  # b
```

| a | b | a long column of a table | another long column of it |
|---|--:|---|---|
| 1 | 2 | that-is-too-wide-for-a-narrow-window | that-is-too-wide-for-a-narrow-window |
"""


@pytest.fixture(scope="module")
def axe() -> str:
    """The script's text."""
    places = [Path(os.environ[name]) for name in ("NODE_PATH",) if os.environ.get(name)]
    if shutil.which("npm"):
        asked = subprocess.run(["npm", "root", "--global"], capture_output=True, text=True)
        places.append(Path(asked.stdout.strip()))
    for place in places:
        file = place / "axe-core" / "axe.min.js"
        if file.is_file():
            return file.read_text(encoding="utf-8")
    pytest.skip("axe-core is not here: npm install --global axe-core")


Judge = Callable[[Visit, str], None]


@pytest.fixture
def judge(axe: str) -> Judge:
    """Asserts that nothing serious is found in any of the windows."""

    def judged(seen: Visit, state: str) -> None:
        if not seen.page.evaluate("typeof axe === 'object'"):
            seen.page.add_script_tag(content=axe)
        found: dict[str, Any] = {}
        for width, scheme in WINDOWS:
            seen.page.set_viewport_size({"width": width, "height": 800})
            seen.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            if problems := seen.page.evaluate(FOUND):
                found[f"{state}, {width} pixels, {scheme}"] = problems
        assert found == {}
        seen.page.set_viewport_size({"width": 1280, "height": 800})

    return judged


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_servers(tmp_path / "config" / "mlxserve" / "mcp.json", {"s": scripted()})


@pytest.mark.long
def test_an_empty_page_with_a_demonstration_of_a_model(
    chat: FakeChat, start_server: StartServer, visit: Open, judge: Judge
) -> None:
    chat.model_name = "mlxserve-mini"
    with visit(start_server().url, bypass_csp=True) as seen:
        seen.until_text("#welcome", "included model")
        judge(seen, "an empty page")


@pytest.mark.long
def test_a_model_that_is_offered_and_its_download(
    chat: FakeChat, start_server: StartServer, visit: Open, judge: Judge
) -> None:
    chat.model_name = "mlxserve-mini"
    name = "org/large"
    offer = {"model": name, "short_name": "large:4b", "size": 3e9, "good_for": "chats"}
    card = {"model": name, "done": 1e9, "total": 3e9, "problem": "The disk is full."}
    found: dict[str, Any] = {"recommended": offer, "data": []}
    with visit(start_server().url, bypass_csp=True) as seen:
        seen.page.route("**/api/v1/downloads", lambda route: route.fulfill(json=found))
        for state, button in (
            ("offered", "Download large:4b"),
            ("running", "Pause"),
            ("paused", "Resume"),
            ("failed", "Try again"),
        ):
            found["data"] = [] if state == "offered" else [{**card, "state": state}]
            seen.reload()
            seen.until_text(".offer button", button)
            judge(seen, f"a download that is {state}")


def test_an_answer_the_sides_and_the_dialogs(
    chat: FakeChat, start_server: StartServer, visit: Open, judge: Judge
) -> None:
    chat.views = [view(f"request-{number}", number) for number in range(4)]
    chat.script = [
        Delta("", (66,), reasoning="Let me see."),
        Delta(ANSWER, (66,)),
        HOLD,
        Delta("", (69,), (), FinishReason.STOP, Usage(5, 2, 0)),
    ]
    with visit(start_server().url, bypass_csp=True) as seen:
        page = seen.page
        seen.until("Ready")
        seen.ask("Show me")
        page.wait_for_selector(".assistant .keyword")
        seen.ask("A question that waits")
        judge(seen, "an answer that is being written")
        chat.release()
        seen.wait_for_answers(2)
        page.click(".assistant .thinking summary >> nth=0")
        page.set_input_files(
            "#files", [{"name": "b.bin", "mimeType": "text/plain", "buffer": b"\xff\x00"}]
        )
        judge(seen, "answers, and a file that is refused")
        for side in ("chats", "engine"):
            page.set_viewport_size({"width": 390, "height": 800})
            if side not in page.evaluate("document.body.className"):
                page.click(f"#{side}-toggle")
            judge(seen, side)
        seen.choose("Pin")
        seen.until_text("#chat-list summary", "Pinned")
        page.get_by_role("button", name="Menu of").click()
        page.get_by_role("menuitem", name="Unpin").wait_for()
        judge(seen, "a group of chats, and the menu of one")
        page.keyboard.press("Escape")
        page.click("#settings-open")
        judge(seen, "settings")
        page.click("#tools-open")
        page.locator(".tool select").first.wait_for()
        judge(seen, "tools")
        page.keyboard.press("Escape")
        page.keyboard.press("F1")
        assert page.locator("#keys").is_visible()
        judge(seen, "shortcuts")


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_theme_whatever_the_system_has(
    chat: FakeChat, start_server: StartServer, visit: Open, judge: Judge, theme: str
) -> None:
    call = ToolCallDelta(0, id="call_1", name="s__fails", arguments='{"why": "to see it"}')
    chat.script = [
        Delta(ANSWER, (66,), reasoning="Let me see."),
        Delta("", (67,), (), FinishReason.STOP, Usage(5, 2, 0), tool_calls=(call,)),
    ]
    with visit(start_server().url, bypass_csp=True) as seen:
        page = seen.page
        seen.until("Ready")
        page.click("#settings-open")
        page.select_option("#theme", theme)
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == theme
        judge(seen, f"settings, {theme}")
        page.keyboard.press("Escape")
        seen.ask("Show me")
        page.locator("#call").wait_for()
        judge(seen, f"an answer that asks for a call, {theme}")
        chat.script = None
        page.click("#call-once")
        seen.wait_for_answers(1)
        page.click(".call summary")
        judge(seen, f"an answer with a call, {theme}")
        page.click("#engine-toggle")
        judge(seen, f"the engine, {theme}")


@pytest.mark.long
def test_a_call_that_waits_for_its_user_and_calls_that_were_made(
    chat: FakeChat, start_server: StartServer, visit: Open, judge: Judge
) -> None:
    call = ToolCallDelta(0, id="call_1", name="s__fails", arguments="{}")
    chat.script = [Delta("", (67,), (), FinishReason.STOP, Usage(5, 2, 0), tool_calls=(call,))]
    with visit(start_server().url, bypass_csp=True) as seen:
        seen.until("Ready")
        seen.ask("Well?")
        seen.page.locator("#call").wait_for()
        judge(seen, "a call that waits")
        chat.script = None
        seen.page.click("#call-once")
        seen.wait_for_answers(1)
        seen.page.click(".call summary")
        judge(seen, "a call that failed")


@pytest.mark.long
def test_a_choice_of_models_and_a_page_without_its_key(
    start_server: StartServer, visit: Open, judge: Judge
) -> None:
    with (
        serving(FakeChat(adapters=("formal",))) as several,
        visit(several.url, bypass_csp=True) as seen,
    ):
        seen.page.locator("#models").wait_for()
        judge(seen, "a choice of models")
        seen.page.click("#settings-open")
        seen.page.fill("#prompt-name", "Brief")
        seen.page.click("#prompt-save")
        seen.until_text("#prompt-note", "Saved as Brief.")
        seen.page.select_option("#second", "fake:formal")
        judge(seen, "settings with a saved prompt and a second model")
        seen.page.click("#settings .main")
        judge(seen, "an empty page with a saved prompt")
        seen.ask("Who?")
        seen.wait_for_answers(2)
        seen.page.locator(".column >> nth=1").wait_for()
        judge(seen, "answers of two models")
    locked = start_server(access=AccessPolicy(api_keys=["a-key-of-this-test"]))
    with visit(locked.url, bypass_csp=True) as seen:
        seen.is_alone = True  # Chromium logs the 401
        seen.page.locator("#key").wait_for()
        judge(seen, "a page without its key")
