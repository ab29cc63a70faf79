"""DiskTier: a record comes back exactly as it was saved, or not at all, and nobody waits for it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mlxserve.core.errors import InvalidConfig
from mlxserve.disk.files import DiskFiles
from mlxserve.disk.record import HEADER_SIZE, FoundFile
from mlxserve.disk.tier import STALL_SECONDS, DiskState, DiskTier
from mlxserve.disk.writes import RETRY_SECONDS

IDENTITY = b"i" * 16
PAGE = 1000  # bytes of a payload
RECORD = PAGE + HEADER_SIZE
LONG = 60.0  # seconds, for what takes none

Make = Callable[..., DiskTier]


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload(number: int) -> bytes:
    return number.to_bytes(4, "big") * (PAGE // 4)


def records(*numbers: int) -> list[tuple[bytes, bytes]]:
    return [(name(number), payload(number)) for number in numbers]


def read(tier: DiskTier, *numbers: int) -> list[bytes]:
    """The leading records that come back."""
    ticket = tier.load([name(number) for number in numbers])
    assert tier.flush(LONG)
    [answer] = tier.poll()
    assert answer.ticket == ticket
    return list(answer.payloads)


class Gated(DiskFiles):
    """Stands still in `write` and `read` until the gate is opened, and then fails if told to."""

    def __init__(self, base: Path, identity: bytes = IDENTITY) -> None:
        super().__init__(base, identity)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.error: int | None = None
        self.order: list[str] = []

    def write(self, name: bytes, payload: bytes, used: float | None = None) -> None:
        self._pass(f"write {int.from_bytes(name, 'big')}")
        super().write(name, payload, used)

    def read(self, name: bytes) -> bytes:
        self._pass(f"read {int.from_bytes(name, 'big')}")
        return super().read(name)

    def _pass(self, what: str) -> None:
        self.entered.set()
        assert self.gate.wait(LONG)
        self.order.append(what)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[DiskTier] = []

    def tier(**options: object) -> DiskTier:
        defaults = {"identity": IDENTITY, "limit": 1 << 20, "daily_writes": 1 << 30}
        made.append(DiskTier(tmp_path, **{**defaults, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield tier
    for one in made:
        one.close()


# ---- what comes back


def test_what_was_saved_comes_back_also_from_another_process(make: Make, tmp_path: Path) -> None:
    tier = make()
    assert tier.save(records(1, 2, 3)) == 3
    assert read(tier, 1, 2, 3) == [payload(1), payload(2), payload(3)]
    tier.close()
    after = make()
    assert after.flush(LONG)
    assert after.num_leading([name(1), name(2), name(4), name(3)]) == 2
    assert [name(4) in after, name(3) in after] == [False, True]
    assert read(after, 1, 2, 3) == [payload(1), payload(2), payload(3)]
    files = list(tmp_path.rglob("*.page"))
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    folders = {folder for file in files for folder in (file.parent, file.parents[1])}
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    use = after.use()
    assert (use.num_pages, use.num_bytes, use.total_bytes) == (3, 3 * RECORD, 3 * RECORD)
    assert (use.num_read, use.bytes_read) == (3, 3 * PAGE)
    assert use.read_rate > 0


def test_a_record_is_there_at_once_and_is_read_before_it_is_written(
    make: Make, tmp_path: Path
) -> None:
    files = Gated(tmp_path)
    tier = make(files=files)
    assert tier.flush(LONG)
    files.gate.clear()
    tier.save(records(1, 2))
    assert files.entered.wait(LONG)
    assert tier.num_leading([name(1), name(2)]) == 2
    tier.load([name(2), name(1)])
    files.gate.set()
    assert tier.flush(LONG)
    assert tier.poll()[0].payloads == (payload(2), payload(1))
    assert (tier.use().num_read, tier.use().bytes_read) == (2, PAGE)  # one was written meanwhile


def test_the_rate_is_that_of_recent_reads_from_files(make: Make, tmp_path: Path) -> None:
    clock = Clock()

    class Slow(DiskFiles):
        seconds = 1.0

        def read(self, name: bytes) -> bytes:
            clock.now += self.seconds
            return super().read(name)

    files = Slow(tmp_path, IDENTITY)
    tier = make(files=files, clock=clock)
    tier.save(records(1, 2))
    assert tier.flush(LONG)
    assert (tier.use().num_read, tier.use().read_rate) == (0, 0)
    read(tier, 1)
    assert tier.use().read_rate == PAGE
    files.seconds = 0.1
    read(tier, 1, 2)
    assert PAGE < tier.use().read_rate < 3 * PAGE
    for _ in range(100):
        read(tier, 1)
    assert tier.use().read_rate == pytest.approx(10 * PAGE, rel=0.1)
    assert (tier.use().num_read, tier.use().bytes_read) == (103, 103 * PAGE)


def test_loads_go_before_writes(make: Make, tmp_path: Path) -> None:
    files = Gated(tmp_path)
    tier = make(files=files)
    tier.save(records(1))
    assert tier.flush(LONG)
    files.gate.clear()
    files.entered.clear()
    tier.save(records(2, 3))
    assert files.entered.wait(LONG)
    tier.load([name(1)])
    files.gate.set()
    assert tier.flush(LONG)
    assert files.order == ["write 1", "write 2", "read 1", "write 3"]


def test_a_record_is_written_once(make: Make) -> None:
    tier = make()
    tier.save(records(1))
    assert tier.save(records(1, 2)) == 2
    assert tier.flush(LONG)
    assert tier.save(records(1, 2)) == 2
    assert tier.flush(LONG)
    assert tier.use().num_written == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: HEADER_SIZE - 1],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content + b"x",
        lambda content: content[:9] + bytes([content[9] ^ 1]) + content[10:],
    ],
)
def test_a_damaged_record_is_lost_with_those_after_it(
    make: Make, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tier = make()
    tier.save(records(1, 2, 3))
    assert tier.flush(LONG)
    file = DiskFiles(tmp_path, IDENTITY).path(name(2))
    file.write_bytes(damage(file.read_bytes()))
    assert read(tier, 1, 2, 3) == [payload(1)]
    assert tier.use().num_lost == 1
    assert tier.num_leading([name(2)]) == 0
    assert not file.exists()
    assert len([r for r in caplog.records if "cannot be used" in r.message]) == 1
    assert tier.save(records(2)) == 1
    assert read(tier, 1, 2, 3) == [payload(1), payload(2), payload(3)]


def test_a_file_that_vanished_is_lost_and_no_longer_promised(make: Make, tmp_path: Path) -> None:
    tier = make()
    tier.save(records(1))
    assert tier.flush(LONG)
    DiskFiles(tmp_path, IDENTITY).path(name(1)).unlink()
    assert read(tier, 1) == []
    assert tier.num_leading([name(1)]) == 0
    assert tier.use().num_bytes == 0


def test_another_model_never_reads_it(make: Make, tmp_path: Path) -> None:
    tier, other = make(), make(identity=b"j" * 16)
    tier.save(records(1))
    assert tier.flush(LONG)
    assert other.num_leading([name(1)]) == 0
    assert read(other, 1) == []
    foreign = DiskFiles(tmp_path, b"j" * 16).path(name(1))
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(DiskFiles(tmp_path, IDENTITY).path(name(1)).read_bytes())
    assert read(other, 1) == []


def test_a_record_under_another_name_is_not_it(make: Make, tmp_path: Path) -> None:
    tier, files = make(), DiskFiles(tmp_path, IDENTITY)
    tier.save(records(1, 2))
    assert tier.flush(LONG)
    files.path(name(2)).write_bytes(files.path(name(1)).read_bytes())
    assert read(tier, 2) == []


# ---- room


def test_the_least_recently_used_are_deleted_for_room(make: Make, tmp_path: Path) -> None:
    tier, files = make(limit=10 * RECORD), DiskFiles(tmp_path, IDENTITY)
    tier.save(records(*range(8)))
    assert tier.flush(LONG)
    for number in range(8):
        os.utime(files.path(name(number)), (1e9 + number, 1e9 + number))
    tier.close()
    tier = make(limit=10 * RECORD)
    assert tier.flush(LONG)
    assert read(tier, 0) == [payload(0)]  # used now
    tier.save(records(8, 9, 10))
    assert tier.flush(LONG)
    known = [name(number) in tier for number in range(11)]
    assert known == [True, False, *[True] * 9]
    assert {file.stem for file in tmp_path.rglob("*.page")} == {
        name(number).hex() for number, is_known in enumerate(known) if is_known
    }
    assert tier.use().num_deleted == 1


def save(tier: DiskTier, used: float, *numbers: int) -> None:
    assert tier.save(records(*numbers), [used] * len(numbers)) == len(numbers)
    assert tier.flush(LONG)


def there(tier: DiskTier) -> set[int]:
    return {number for number in range(30) if name(number) in tier}


def test_a_hotter_record_is_never_deleted_for_a_colder_one(make: Make) -> None:
    tier = make(limit=4 * RECORD)
    save(tier, 100, 0, 1)
    save(tier, 200, 2, 3)
    assert not tier.keeps(PAGE, 100)
    assert tier.keeps(PAGE, 150)
    save(tier, 50, 4, 5)
    assert there(tier) == {0, 1, 2, 3}
    assert (tier.use().num_written, tier.use().num_deleted) == (4, 0)
    save(tier, 150, 6)
    save(tier, 300, 7)
    assert there(tier) == {2, 3, 6, 7}
    assert not tier.keeps(PAGE, 150)


def test_a_record_that_fits_is_kept_however_cold_it_is(make: Make) -> None:
    tier = make(limit=4 * RECORD)
    save(tier, 100, 0)
    assert tier.keeps(PAGE, 1)
    save(tier, 1, 1, 2, 3)
    assert there(tier) == {0, 1, 2, 3}


def test_what_waits_to_be_written_needs_its_room(make: Make, tmp_path: Path) -> None:
    files = Gated(tmp_path)
    tier = make(limit=4 * RECORD, files=files)
    assert tier.flush(LONG)
    files.gate.clear()
    assert tier.save(records(*range(4)), [100.0] * 4) == 4
    assert not tier.keeps(PAGE, 50)
    files.gate.set()
    assert tier.flush(LONG)


@pytest.mark.parametrize("how", ["read", "touched"])
def test_recency_is_of_use_also_in_the_next_process(make: Make, how: str) -> None:
    tier = make(limit=4 * RECORD)
    save(tier, 100, 0)
    save(tier, 200, 1, 2, 3)
    if how == "read":
        read(tier, 0)
    else:
        tier.touch({name(0): 300.0, name(9): 300.0})
        assert tier.flush(LONG)
    tier.close()
    after = make(limit=4 * RECORD)
    save(after, 250, 4)
    assert len(there(after)) == 4
    assert {0, 4} < there(after)


def test_a_file_that_vanished_is_no_longer_promised_once_it_was_touched(
    make: Make, tmp_path: Path
) -> None:
    tier = make()
    save(tier, 100, 0, 1)
    DiskFiles(tmp_path, IDENTITY).path(name(0)).unlink()
    tier.touch({name(0): 300.0, name(1): 300.0})
    assert tier.flush(LONG)
    assert there(tier) == {1}
    assert tier.use().num_lost == 0


def test_other_models_and_processes_count(make: Make, tmp_path: Path) -> None:
    other = make(identity=b"j" * 16)
    other.save(records(1, 2, 3))
    assert other.flush(LONG)
    for file in tmp_path.rglob("*.page"):
        os.utime(file, (1e9, 1e9))
    tier = make(limit=4 * RECORD)
    assert tier.flush(LONG)
    assert tier.use().total_bytes == 3 * RECORD
    tier.save(records(4, 5))
    assert tier.flush(LONG)
    assert tier.num_leading([name(4), name(5)]) == 2
    assert len(list(tmp_path.rglob("*.page"))) <= 4
    assert len(read(other, 1, 2, 3)) < 3


def test_a_smaller_limit_deletes_at_once(make: Make, tmp_path: Path) -> None:
    before = make()
    before.save(records(*range(10)))
    assert before.flush(LONG)
    before.close()
    tier = make(limit=4 * RECORD)
    assert tier.flush(LONG)
    assert len(list(tmp_path.rglob("*.page"))) == 4
    assert tier.use().num_pages <= 4


def test_a_record_larger_than_the_limit_is_refused(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make(limit=RECORD - 1)
    assert tier.save(records(1)) == 0
    assert tier.save(records(2)) == 0
    assert len([r for r in caplog.records if "disk_cache_size" in r.message]) == 1


def test_clear_forgets_this_model_at_once_and_deletes_its_files(make: Make, tmp_path: Path) -> None:
    tier, other = make(), make(identity=b"j" * 16)
    for each in (tier, other):
        each.save(records(1, 2))
        assert each.flush(LONG)
    tier.clear()
    assert tier.num_leading([name(1)]) == 0
    assert tier.flush(LONG)
    assert len(list(tmp_path.rglob("*.page"))) == 2
    assert tier.save(records(1)) == 1
    assert read(tier, 1) == [payload(1)]
    assert read(other, 1, 2) == [payload(1), payload(2)]


def test_what_was_under_way_while_it_was_cleared_is_gone(make: Make, tmp_path: Path) -> None:
    files = Gated(tmp_path)
    tier = make(files=files)
    assert tier.flush(LONG)
    files.gate.clear()
    tier.save(records(1, 2))
    assert files.entered.wait(LONG)
    tier.clear()
    files.gate.set()
    assert tier.flush(LONG)
    assert not tier.num_leading([name(1)])
    assert name(2) not in tier
    assert not list(tmp_path.rglob("*.page"))


def test_what_was_cleared_is_read_no_more(make: Make, tmp_path: Path) -> None:
    files = Gated(tmp_path)
    tier = make(files=files)
    tier.save(records(1, 2))
    assert tier.flush(LONG)
    files.gate.clear()
    files.entered.clear()
    tier.load([name(1)])
    assert files.entered.wait(LONG)
    assert tier.use().num_pages == 2
    tier.clear()
    assert (tier.use().num_pages, tier.use().num_bytes) == (0, 0)
    ticket = tier.load([name(2)])
    files.gate.set()
    assert tier.flush(LONG)
    assert [answer.payloads for answer in tier.poll() if answer.ticket == ticket] == [()]


# ---- a disk that fails


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_page_that_cannot_be_opened_now_is_not_lost(
    number: int, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = DiskFiles(tmp_path, IDENTITY)
    tier = make(files=files)
    tier.save(records(1))
    assert tier.flush(LONG)
    with monkeypatch.context() as patch:

        def refuse(_: bytes) -> bytes:
            raise OSError(number, "no more of them")

        patch.setattr(files, "read", refuse)
        assert read(tier, 1) == []
    assert tier.use().num_lost == 0
    assert read(tier, 1) == [payload(1)]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_is_said_once_and_tried_again(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    files, clock = Gated(tmp_path), Clock()
    tier = make(files=files, clock=clock)
    files.error = error
    for number in range(3):
        tier.save(records(number))
        assert tier.flush(LONG)
        assert tier.num_leading([name(number)]) == 0
    assert tier.save(records(5)) == 0
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert os.strerror(error) in warnings[0].message
    clock.now += RETRY_SECONDS
    files.error = None
    assert tier.save(records(5)) == 1
    assert read(tier, 5) == [payload(5)]
    tier.close()
    assert not list(tmp_path.rglob("*.new"))


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DiskFiles(tmp_path, IDENTITY)
    files.prepare()

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="broken"):
        files.write(name(1), payload(1))
    assert not list(tmp_path.rglob("*.new"))


def test_a_disk_that_stands_still_is_given_up_once_and_taken_back(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files, clock = Gated(tmp_path), Clock()
    tier = make(files=files, clock=clock)
    tier.save(records(1, 2))
    assert tier.flush(LONG)
    files.gate.clear()
    files.entered.clear()
    tickets = [tier.load([name(1)])]
    assert files.entered.wait(LONG)
    tickets.append(tier.load([name(2)]))
    assert tier.poll() == []
    clock.now += STALL_SECONDS + 1
    assert [(a.ticket, a.payloads) for a in tier.poll()] == [(ticket, ()) for ticket in tickets]
    assert tier.use().state == DiskState.STALLED
    assert tier.num_leading([name(1)]) == 0
    assert tier.save(records(3)) == 0
    late = tier.load([name(1)])
    assert [answer.ticket for answer in tier.poll()] == [late]
    assert len([r for r in caplog.records if "has not answered" in r.message]) == 1
    files.gate.set()
    while name(1) not in tier:
        pass
    assert tier.use().state == DiskState.WORKS
    assert tier.poll() == []  # nobody waits for what came late
    assert read(tier, 1, 2) == [payload(1), payload(2)]
    assert len([r for r in caplog.records if "answers again" in r.message]) == 1


class Faulty(DiskFiles):
    """Each method raises the next of its faults, if it has one."""

    def __init__(self, base: Path) -> None:
        super().__init__(base, IDENTITY)
        self.faults: dict[str, list[Exception]] = {}

    def read(self, name: bytes) -> bytes:
        self._fail("read")
        return super().read(name)

    def write(self, name: bytes, payload: bytes, used: float | None = None) -> None:
        self._fail("write")
        super().write(name, payload, used)

    def scan(self) -> Iterator[FoundFile]:
        self._fail("scan")
        yield from super().scan()

    def touch(self, path: Path, used: float) -> None:
        self._fail("touch")
        super().touch(path, used)

    def add_written(self, day: str, num_bytes: int) -> int:
        self._fail("add_written")
        return super().add_written(day, num_bytes)

    def _fail(self, method: str) -> None:
        if self.faults.get(method):
            raise self.faults[method].pop()


@pytest.mark.parametrize("fault", [MemoryError(), RuntimeError("planted"), RecursionError()])
@pytest.mark.parametrize("method", ["read", "write", "scan", "touch", "add_written"])
def test_after_a_fault_that_is_not_the_disks_it_begins_again(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, fault: Exception
) -> None:
    files, clock = Faulty(tmp_path), Clock()
    tier = make(files=files, clock=clock)
    save(tier, 100, 1, 2)
    files.faults[method] = [fault]
    if method == "scan":
        tier.clear()
    ticket = tier.load([name(1), name(2)])
    tier.save(records(3), [200.0])
    assert tier.flush(LONG)
    [answer] = tier.poll()
    assert answer.ticket == ticket
    assert answer.payloads == (() if method in ("read", "scan") else (payload(1), payload(2)))
    assert files.faults[method] == []
    assert len([r for r in caplog.records if "it begins again" in r.message]) == 1
    clock.now += RETRY_SECONDS
    save(tier, 300, *range(6))
    assert read(tier, *range(6)) == [payload(number) for number in range(6)]
    assert len(list(tmp_path.rglob("*.page"))) == 6


def test_a_fault_that_stays_ends_the_thread_and_answers_everybody(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Faulty(tmp_path)
    tier = make(files=files)
    tier.save(records(1))
    assert tier.flush(LONG)
    files.faults["scan"] = [RuntimeError("planted") for _ in range(100)]
    files.faults["read"] = [RuntimeError("planted")]
    ticket = tier.load([name(1)])
    assert tier.flush(LONG)
    assert [(answer.ticket, answer.payloads) for answer in tier.poll()] == [(ticket, ())]
    assert tier.use().state == DiskState.FAILED
    assert tier.save(records(2)) == 0
    assert tier.num_leading([name(1)]) == 0
    assert tier.poll() == []
    assert tier.load([name(1)]) == ticket + 1
    assert [answer.payloads for answer in tier.poll()] == [()]
    assert len([r for r in caplog.records if "has failed" in r.message]) == 1
    assert len(caplog.records) < 10


def test_an_answer_that_came_before_the_wait_ends_it(make: Make, tmp_path: Path) -> None:
    class HoldsTheSecond(Gated):
        def read(self, name: bytes) -> bytes:
            return super().read(name) if name == name_of_second else DiskFiles.read(self, name)

    name_of_second, files = name(2), HoldsTheSecond(tmp_path)
    tier = make(files=files)
    tier.save(records(1, 2))
    assert tier.flush(LONG)
    files.gate.clear()
    files.entered.clear()
    ticket = tier.load([name(1)])
    tier.load([name_of_second])
    assert files.entered.wait(LONG), "the first is answered, the second being read"
    waiting = threading.Thread(target=tier.wait, args=(LONG,), daemon=True)
    waiting.start()
    waiting.join(LONG / 2)
    assert not waiting.is_alive()
    assert [answer.ticket for answer in tier.poll()] == [ticket]
    files.gate.set()


def test_too_much_on_its_way_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.disk.writes.STAGED_BYTES", 3 * RECORD)
    files = Gated(tmp_path)
    tier = make(files=files)
    assert tier.flush(LONG)
    files.gate.clear()
    assert tier.save(records(1, 2, 3, 4, 5)) == 3
    files.gate.set()
    assert tier.flush(LONG)
    assert tier.save(records(4, 5)) == 2


def test_a_new_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    base = tmp_path / "cache" / "pages"
    DiskTier(base, identity=IDENTITY, limit=1, daily_writes=1).close()
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InvalidConfig, match="Choose another disk_cache_dir"):
        DiskTier(file, identity=IDENTITY, limit=1, daily_writes=1)


def test_a_listener_knows_the_records_that_are_written(make: Make) -> None:
    tier = make()
    known: dict[bytes, bool] = {}
    tier.report_to(known.update)
    assert tier.save(records(1, 2, 3)) == 3
    assert tier.flush(LONG)
    assert known == {name(1): True, name(2): True, name(3): True}
    tier.delete([name(1)])
    assert known == {name(1): False, name(2): True, name(3): True}
    tier.clear()
    assert not any(known.values())


def test_a_closed_tier_takes_and_returns_nothing(make: Make) -> None:
    tier = make()
    tier.save(records(1))
    tier.close()
    assert tier.save(records(2)) == 0
    tier.load([name(1)])
    assert [answer.payloads for answer in tier.poll()] == [()]
    tier.close()
    assert read(make(), 1) == [payload(1)]


# ---- wear


def test_a_day_has_a_bound_that_outlives_the_process(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    days = ["2026-11-23"]
    options = {"daily_writes": 3 * RECORD, "today": lambda: days[-1]}
    tier = make(**options)
    assert tier.save(records(1, 2)) == 2
    assert tier.flush(LONG)
    tier.close()
    tier = make(**options)
    assert tier.use().written_today == 2 * RECORD
    assert tier.save(records(3, 4)) == 1
    assert tier.save(records(4)) == 0
    assert len([r for r in caplog.records if "disk_cache_daily_writes" in r.message]) == 1
    assert tier.flush(LONG)
    assert tier.use().state == DiskState.READS_ONLY
    days.append("2026-11-24")
    assert (tier.use().written_today, tier.use().state) == (0, DiskState.WORKS)
    assert tier.save(records(4)) == 1
    assert tier.flush(LONG)
    tier.close()
    assert make(**options).use().written_today == RECORD


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"day": "2026-11-23"}', b"\xff", b'{"day": "2026-11-23", "bytes": 1e400}',
     b'{"day": "2026-11-23", "bytes": 1e300}', b'{"day": "2026-11-23", "bytes": [1]}', b"[" * 100_000,
     "fifo", "folder"],
    ids=lambda content: str(content)[:40],
)  # fmt: skip
def test_a_damaged_count_of_the_day_is_none_and_is_counted_anew(
    make: Make, tmp_path: Path, content: bytes | str
) -> None:
    file = tmp_path / "writes.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        os.mkfifo(file) if content == "fifo" else (file / "inner").mkdir(parents=True)
    tier = make(today=lambda: "2026-11-23")
    assert tier.use().written_today == 0
    tier.save(records(1))
    assert tier.flush(LONG)
    tier.close()
    assert make(today=lambda: "2026-11-23").use().written_today == RECORD


# ---- what other processes leave


def test_unfinished_files_of_the_dead_are_removed(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / IDENTITY.hex() / "00"
    folder.mkdir(parents=True)
    old, new, odd = folder / ".1-0.new", folder / ".2-0.new", folder / "not a name.page"
    for file in (old, new, odd):
        file.write_bytes(b"x")
    os.utime(old, (1e9, 1e9))
    tier = make()
    assert tier.flush(LONG)
    assert not old.exists()
    assert new.exists()
    assert tier.use().num_pages == 0


def test_a_subfolder_that_cannot_be_listed_costs_its_own_records_alone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make()
    names = [bytes([number]) * 16 for number in range(6)]  # each in a subfolder of its own
    assert tier.save([(name, payload(1)) for name in names]) == 6
    assert tier.flush(LONG)
    tier.close()
    broken = DiskFiles(tmp_path, IDENTITY).path(names[0]).parent
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path) == broken:
            raise OSError(errno.EIO, "broken", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    after = make(limit=4 * RECORD)
    assert after.flush(LONG)
    assert [name in after for name in names].count(True) == 4
    assert names[0] not in after
    assert len([r for r in caplog.records if "cannot be listed" in r.message]) >= 1


def test_the_limit_holds_over_restarts_with_a_subfolder_that_had_no_permission(
    make: Make, tmp_path: Path
) -> None:
    """Its pages are found again, and count: they are this user's."""
    for start in range(4):
        tier = make(limit=10 * RECORD)
        assert tier.flush(LONG)
        names = [bytes([number]) * 16 for number in range(4 * start, 4 * start + 8)]
        assert tier.save([(name, payload(1)) for name in names]) == 8
        assert tier.flush(LONG)
        tier.close()
        for folder in (tmp_path / IDENTITY.hex()).glob("*/"):
            folder.chmod(0o000 if start % 2 else 0o600)
    found = make(limit=10 * RECORD)
    assert found.flush(LONG)
    assert found.use().num_pages == len(list(tmp_path.rglob("*.page"))) == 10


def test_nothing_more_is_written_to_a_subfolder_that_cannot_be_listed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages would not be counted at the next start, and again at the one after that."""
    tier = make()
    save(tier, 100, 1, 2)
    tier.close()
    broken = DiskFiles(tmp_path, IDENTITY).path(name(1)).parent
    number, scandir = broken.stat().st_ino, os.scandir

    def refuse(path: Path) -> object:
        if Path(path).stat().st_ino == number:
            raise OSError(errno.EIO, "broken", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    after = make()
    assert after.flush(LONG)
    assert there(after) == set()
    save(after, 100, 3)
    assert there(after) == {3}
    assert [file.stem for file in broken.glob("*.page")] == [name(3).hex()]
    assert len(list(broken.parent.glob("*.unused"))) == 1


def folder_of_another(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)


def link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere")


def file_with_that_name(path: Path) -> None:
    path.write_text("x")


def folder_with_that_name(path: Path) -> None:
    (path / "inner").mkdir(parents=True)


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("obstacle", [folder_of_another, link, file_with_that_name, fifo])
@pytest.mark.parametrize("place", ["identity", "subfolder"])
def test_what_is_in_the_way_of_a_folder_is_renamed(
    make: Make, tmp_path: Path, obstacle: Callable[[Path], None], place: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if obstacle is folder_of_another and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    path = DiskFiles(tmp_path, IDENTITY).path(name(1)).parent
    path = path.parent if place == "identity" else path
    path.parent.mkdir(0o700, exist_ok=True)
    obstacle(path)
    tier = make()
    save(tier, 100, 1)
    assert read(tier, 1) == [payload(1)]
    assert not path.is_symlink()
    assert path.stat().st_uid == os.geteuid()
    assert not list(tmp_path.glob("elsewhere/*")), "nothing is written through a link"
    assert len(list(path.parent.glob(f"{path.name}.*.unused"))) == 1
    assert len([r for r in caplog.records if "was not made by mlxserve" in r.message]) == 1


@pytest.mark.parametrize("obstacle", [folder_with_that_name, fifo, link])
def test_what_is_in_the_way_of_a_page_costs_nothing(
    make: Make, tmp_path: Path, obstacle: Callable[[Path], None]
) -> None:
    path = DiskFiles(tmp_path, IDENTITY).path(name(1))
    path.parent.mkdir(0o700, parents=True)
    obstacle(path)
    tier = make()
    assert tier.flush(LONG)
    assert there(tier) == set(), "it is not promised"
    save(tier, 100, 0, 1, 2)
    assert read(tier, 0, 1, 2) == [payload(0), payload(1), payload(2)]


def test_an_old_unfinished_file_that_cannot_be_deleted_hides_no_page(
    make: Make, tmp_path: Path
) -> None:
    tier = make()
    save(tier, 100, 1)
    tier.close()
    stuck = DiskFiles(tmp_path, IDENTITY).path(name(1)).parent / ".1-0.new"
    folder_with_that_name(stuck)
    os.utime(stuck, (1e9, 1e9))
    after = make()
    assert after.flush(LONG)
    assert there(after) == {1}


def test_a_planted_link_is_not_written_through(make: Make, tmp_path: Path) -> None:
    """Under the names that unfinished files will have."""
    victim = tmp_path / "victim"
    victim.write_text("of somebody else")
    folder = DiskFiles(tmp_path, IDENTITY).path(name(1)).parent
    folder.mkdir(0o700, parents=True)
    for place in (tmp_path, folder.parent, folder):
        for number in range(8):
            (place / f".{os.getpid()}-{number}.new").symlink_to(victim)
    tier = make()
    save(tier, 100, 1)
    assert victim.read_text() == "of somebody else"
    assert read(tier, 1) == [payload(1)]


def test_a_page_of_the_wrong_size_is_never_read(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a sparse file that would fill the memory, with a header that fits it."""
    tier = make(payload_sizes={PAGE, 8})
    save(tier, 100, 1, 2)
    tier.save([(name(3), b"8 bytes.")])
    assert tier.flush(LONG)
    file = DiskFiles(tmp_path, IDENTITY).path(name(2))
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)
    assert read(tier, 1, 3, 2) == [payload(1), b"8 bytes."]
    assert tier.use().num_lost == 1
    assert not file.exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_into_which_others_may_write_is_refused(
    make: Make, tmp_path: Path, mode: int
) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(InvalidConfig, match=f"chmod go-w {tmp_path}"):
        make()
    tmp_path.chmod(0o755)
    assert make().save(records(1)) == 1


def test_a_folder_of_another_user_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InvalidConfig, match="belongs to another user"):
        make()


class Records(RuleBasedStateMachine):
    """Whatever happens, what comes back is what was saved."""

    folder: Path

    @initialize(limit=st.sampled_from([4 * RECORD, 1 << 20]))
    def start(self, limit: int) -> None:
        self.limit = limit
        self.open()

    def open(self) -> None:
        self.tier = DiskTier(self.folder, identity=IDENTITY, limit=self.limit, daily_writes=1 << 40)

    @rule(numbers=st.lists(st.integers(0, 9), max_size=4))
    def save(self, numbers: Sequence[int]) -> None:
        assert self.tier.save(records(*numbers)) == len(numbers)

    @rule(numbers=st.lists(st.integers(0, 9), max_size=4))
    def load(self, numbers: Sequence[int]) -> None:
        found = read(self.tier, *numbers)
        assert found == [payload(number) for number in numbers[: len(found)]]

    @rule(number=st.integers(0, 9), cut=st.integers(0, RECORD), is_gone=st.booleans())
    def damage(self, number: int, cut: int, is_gone: bool) -> None:
        assert self.tier.flush(LONG)
        file = DiskFiles(self.folder, IDENTITY).path(name(number))
        if file.exists():
            content = file.read_bytes()
            file.unlink()
            if not is_gone:
                file.write_bytes(content[:cut])

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        assert not any(name(number) in self.tier for number in range(10))

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.open()

    @rule()
    def judge_room(self) -> None:
        assert self.tier.flush(LONG)
        assert self.tier.use().total_bytes <= self.limit

    def teardown(self) -> None:
        self.tier.clear()
        self.tier.close()


def test_whatever_happens_a_record_is_right_or_absent(tmp_path: Path) -> None:
    from hypothesis import settings
    from hypothesis.stateful import run_state_machine_as_test

    Records.folder = tmp_path
    run_state_machine_as_test(
        Records, settings=settings(max_examples=30, stateful_step_count=15, deadline=None)
    )


# ---- records that are deleted


def test_deleted_records_are_gone_from_the_disk(make: Make, tmp_path: Path) -> None:
    tier = make()
    tier.save(records(*range(200)))
    assert tier.flush(LONG)
    assert tier.delete([name(number) for number in range(1, 300)]) == 199
    assert there(tier) == {0}
    assert tier.flush(LONG)
    assert [file.stem for file in tmp_path.rglob("*.page")] == [name(0).hex()]
    assert (tier.use().num_pages, tier.use().num_deleted) == (1, 0)
    assert read(tier, 1) == []
    tier.save(records(1))
    assert tier.flush(LONG)
    assert read(tier, 1) == [payload(1)]


def test_a_record_that_waits_to_be_written_is_deleted_as_well(make: Make, tmp_path: Path) -> None:
    files = Gated(tmp_path)
    tier = make(files=files)
    assert tier.flush(LONG)
    files.gate.clear()
    tier.save(records(0, 1, 2))
    assert files.entered.wait(LONG)
    assert tier.delete([name(0), name(2)]) == 2
    files.gate.set()
    assert tier.flush(LONG)
    assert {file.stem for file in tmp_path.rglob("*.page")} == {name(1).hex()}
    assert there(tier) == {1}


def test_a_record_that_is_saved_again_before_it_was_deleted_stays(
    make: Make, tmp_path: Path
) -> None:
    """A conversation that was forgotten, and is asked again while the disk is busy."""
    files = Gated(tmp_path)
    tier = make(files=files)
    tier.save(records(0, 1))
    assert tier.flush(LONG)
    files.entered.clear()
    files.gate.clear()
    tier.save(records(2))
    assert files.entered.wait(LONG)
    assert tier.delete([name(0), name(1)]) == 2
    tier.save(records(0))
    files.gate.set()
    assert tier.flush(LONG)
    assert {file.stem for file in tmp_path.rglob("*.page")} == {name(0).hex(), name(2).hex()}
    assert read(tier, 0) == [payload(0)]


def test_a_record_of_before_is_deleted_though_it_was_not_listed_yet(
    make: Make, tmp_path: Path
) -> None:
    before = make()
    before.save(records(0, 1))
    before.close()
    files = Gated(tmp_path)
    tier = make(files=files)
    tier.delete([name(0)])
    assert tier.flush(LONG)
    assert {file.stem for file in tmp_path.rglob("*.page")} == {name(1).hex()}
    assert there(tier) == {1}
