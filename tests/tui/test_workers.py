"""No coroutine is left without its first step when the app ends."""

from __future__ import annotations

from pathlib import Path

from textual.app import App

import tui
from tui.workers import start_worker


async def test_an_app_that_ends_at_once_leaves_no_coroutine() -> None:
    """With a coroutine in its place, Python warns that it was never awaited."""
    app: App[None] = App()
    begun = []

    async def work() -> None:
        begun.append(1)

    async with app.run_test():
        worker = start_worker(app, work)
        worker.cancel()
    assert worker.is_cancelled
    assert not begun


def test_every_worker_is_started_this_way() -> None:
    folder = Path(tui.__file__).parent
    others = {path.name for path in folder.rglob("*.py") if ".run_worker(" in path.read_text()}
    assert others == {"workers.py", "app.py"}, "app.py imports modules on a thread"
