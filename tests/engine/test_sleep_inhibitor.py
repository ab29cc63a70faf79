"""A machine is kept awake while answers run, and a while longer."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from mlxserve import AsyncLLM, SamplingParams
from mlxserve.engine import sleep_inhibitor
from mlxserve.engine.sleep_inhibitor import SleepInhibitor, assertion
from tests.waiting import until, wait_until


def keeping(folder: Path) -> list[str]:
    """A process that notes its start, and its end."""
    notes = folder / "notes"
    text = (
        "import pathlib, signal, sys, time\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "def end(*_):\n"
        "    file.open('a').write('end ')\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "file.open('a').write('begin ')\n"
        "while True: time.sleep(0.05)\n"  # a signal just before a sleep is seen after it
    )
    return [sys.executable, "-c", text, str(notes)]


def noted(folder: Path) -> str:
    file = folder / "notes"
    return file.read_text() if file.exists() else ""


def test_it_begins_with_the_first_answer_and_ends_a_while_after_the_last(tmp_path: Path) -> None:
    machine = SleepInhibitor(keeping(tmp_path))
    machine.look(0.0, is_busy=False)
    assert noted(tmp_path) == ""
    for now in (1.0, 2.0, 40.0):
        machine.look(now, is_busy=True)
    wait_until(lambda: noted(tmp_path) == "begin ")
    machine.look(69.0, is_busy=False)
    assert noted(tmp_path) == "begin "
    machine.look(70.0, is_busy=False)
    assert noted(tmp_path) == "begin end "
    machine.look(71.0, is_busy=True)
    wait_until(lambda: noted(tmp_path) == "begin end begin ")
    machine.end()
    machine.end()
    assert noted(tmp_path) == "begin end begin end "


def test_a_machine_without_the_command_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = SleepInhibitor(["/nowhere/caffeinate"])
    with caplog.at_level(logging.WARNING, "mlxserve"):
        machine.look(1.0, is_busy=True)
        machine.look(2.0, is_busy=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_only_a_mac_has_to_be_kept_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert assertion() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    command = assertion()
    assert command is not None
    assert command[0].endswith("caffeinate")


def test_an_engine_with_answers_keeps_the_machine_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep_inhibitor, "assertion", lambda: keeping(tmp_path))

    async def answer() -> None:
        llm = AsyncLLM(num_pages=16, page_size=16, disable_log_stats=True)
        await llm.generate("Hello", SamplingParams(max_tokens=3))
        await until(lambda: noted(tmp_path).startswith("begin"))
        llm.close()

    asyncio.run(answer())
    assert noted(tmp_path) == "begin end ", "it ends with the engine"
