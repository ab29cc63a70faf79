"""Where memory is short fewer requests run; no answer changes, and all of them end."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxserve.build import build_engine
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine import memory
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.memory import MemoryLevel, MemoryWatch
from mlxserve.hub.files import find_model
from mlxserve.request import Request
from mlxserve.system import machine
from mlxserve.system.machine import memory_used, total_memory

HIGH, CRITICAL = 0.8, 0.9


@dataclass
class Reading:
    share: float = 0.1
    relief: float = 0.0  # what giving memory back gains
    num_reliefs: int = 0

    def read(self) -> float:
        return self.share

    def relieve(self) -> None:
        self.share -= self.relief
        self.num_reliefs += 1

    def watch(self) -> MemoryWatch:
        return MemoryWatch(self.read, high=HIGH, critical=CRITICAL, relieve=self.relieve)


def test_it_reads_once_a_second() -> None:
    reading = Reading()
    watch = reading.watch()
    watch.look(10.0)
    reading.share = 0.95
    assert not watch.look(10.9)
    assert watch.look(11.1)


def test_levels_rise_at_their_marks_and_fall_below_them(caplog: pytest.LogCaptureFixture) -> None:
    reading = Reading()
    watch = reading.watch()
    levels = []
    with caplog.at_level(logging.INFO):
        for second, share in enumerate((0.79, 0.8, 0.89, 0.9, 0.88, 0.86, 0.78, 0.76, 0.99, 0.1)):
            reading.share = share
            watch.look(float(second))
            levels.append(watch.level.value)
    assert levels == [0, 1, 1, 2, 2, 1, 1, 0, 2, 0]
    assert len(caplog.records) == 6


def test_memory_that_can_be_given_back_raises_no_level() -> None:
    reading = Reading(share=0.85, relief=0.2)
    watch = reading.watch()
    assert not watch.look(0.0)
    assert (watch.level, reading.num_reliefs) == (MemoryLevel.NORMAL, 1)


def test_the_pressure_of_the_system_raises_the_level_whatever_our_share_is() -> None:
    """Beside other programs, which our share does not show."""
    reading, pressure = Reading(), [0]
    watch = MemoryWatch(
        reading.read,
        high=HIGH,
        critical=CRITICAL,
        relieve=reading.relieve,
        pressure=lambda: pressure[0],
    )
    levels = []
    for second, (now, share) in enumerate(((0, 0.1), (1, 0.1), (2, 0.1), (1, 0.95), (0, 0.1))):
        pressure[0], reading.share = now, share
        watch.look(float(second))
        levels.append(watch.level.value)
    assert levels == [0, 1, 2, 2, 0]
    assert reading.num_reliefs == 3, "memory that is kept goes back under pressure"


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("some avg10=90.00 avg60=1.00 avg300=0.10 total=1\nfull avg10=0.50 avg60=0 total=1\n", 0),
        ("some avg10=0.00 avg60=0.00 total=1\nfull avg10=20.00 avg60=0.00 total=1\n", 1),
        ("some avg10=0.00 avg60=0.00 total=1\nfull avg10=50.10 avg60=0.00 total=1\n", 2),
        ("", 0),
    ],
)
def test_on_linux_pressure_is_the_time_in_which_all_processes_wait(
    text: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory"
    monkeypatch.setattr(machine, "PRESSURE_FILE", file)
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.memory_pressure() == 0, "a kernel that does not tell"
    file.write_text(text)
    assert machine.memory_pressure() == level


@pytest.mark.parametrize(("told", "level"), [(1, 0), (2, 1), (4, 2), (0, 0)])
def test_on_macos_pressure_is_the_kernels_level(
    told: int, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def system_number(name: str) -> int:
        assert name == "kern.memorystatus_vm_pressure_level"
        return told

    monkeypatch.setattr(machine, "system_number", system_number)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.memory_pressure() == level


@pytest.mark.skipif(sys.platform != "darwin", reason="asks macOS's kernel")
def test_a_mac_tells_its_pressure() -> None:
    assert machine.memory_pressure() in (0, 1, 2)


def test_this_process_uses_a_part_of_its_memory() -> None:
    assert 0.0 < memory_used() < 0.9
    assert total_memory() > 1 << 28


def test_the_second_mark_is_not_below_the_first() -> None:
    with pytest.raises(InvalidConfig, match="memory_critical"):
        EngineConfig(memory_high=0.9, memory_critical=0.8)


class Served:
    """An engine with injected readings."""

    def __init__(self, reading: Reading) -> None:
        config = EngineConfig().with_options(num_pages=64, page_size=16)
        files = find_model(config.model, config.revision)
        self.engine = AsyncEngine(lambda: build_engine(config, files)[0], memory=reading.watch())

    async def tokens(self, number: int) -> list[int]:
        params = SamplingParams(max_tokens=240, temperature=0, ignore_eos=True)
        stream = await self.engine.submit([Request(f"r{number}", [5 + number] * 20, params)])
        return [token async for output in stream for token in output.token_ids]

    async def until(self, level: MemoryLevel) -> None:
        """Wait until the engine has looked, which an idle or busy one does once a second."""
        while self.engine.stats().engine.memory_level != level:
            await self.engine.check()

    async def num_running(self) -> int:
        return sum(bool(request.page_table) for request in (await self.engine.snapshot()).requests)


@pytest.mark.slow
def test_requests_wait_at_the_first_mark_and_are_preempted_at_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A fast machine may end an answer within the seconds that two looks take.
    monkeypatch.setattr(memory, "INTERVAL", 0.05)

    async def scenario() -> None:
        reading = Reading()
        served = Served(reading)
        wanted = [await served.tokens(number) for number in range(4)]
        answers = [asyncio.ensure_future(served.tokens(number)) for number in range(2)]
        while await served.num_running() < 2:
            pass
        reading.share = 0.85
        await served.until(MemoryLevel.HIGH)
        answers += [asyncio.ensure_future(served.tokens(number)) for number in (2, 3)]
        while len((await served.engine.snapshot()).requests) < 4:
            assert not answers[0].done()
        assert await served.num_running() == 2
        reading.share = 0.95
        await served.until(MemoryLevel.CRITICAL)
        assert await served.num_running() <= 1
        stats = served.engine.stats()
        assert stats.scheduler.num_preemptions >= 1
        assert (stats.engine.memory_alarms, stats.engine.memory_used) == (2, 0.95)
        assert await asyncio.gather(*answers) == wanted
        reading.share = 0.1
        await served.until(MemoryLevel.NORMAL)
        answers = [asyncio.ensure_future(served.tokens(number)) for number in range(4)]
        while await served.num_running() < 4:
            pass
        assert await asyncio.gather(*answers) == wanted
        served.engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


_LIMITED = """
import mmap, resource, time
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from mlxserve import LLM, SamplingParams

def until(llm, level):
    while llm.stats().engine.memory_level != level:
        time.sleep(0.05)

with LLM(num_pages=64, disable_log_stats=True) as llm:
    params = SamplingParams(max_tokens=16, temperature=0)
    ask = lambda: [a.token_ids for a in llm.generate(["Hello", "A boat", "One"], params, use_tqdm=False)]
    before = ask()
    from mlxserve.system.machine import address_space
    space = address_space()
    ballast = mmap.mmap(-1, int(0.985 * space.limit) - space.used)
    until(llm, 2)
    assert ask() == before
    ballast.close()
    until(llm, 0)
    assert ask() == before
    print(llm.stats().engine.memory_alarms)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS enforces no RLIMIT_AS")
@pytest.mark.slow
def test_a_process_near_its_limit_goes_on_with_one_request_at_a_time() -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    assert "one request runs at a time" in done.stderr
