"""RankTier: a record exists if every rank has its part, and a load returns what all of them have read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from mlxserve.disk.files import DiskFiles
from mlxserve.disk.rank_messages import News, RankMessage, Verb
from mlxserve.disk.rank_records import RankRecords, Wakeups
from mlxserve.disk.rank_tier import RankDisks, RankDiskTier
from mlxserve.disk.tier import DiskTier

IDENTITY = b"i" * 16
NAMES = [bytes([number]) * 8 for number in range(24)]
RANKS = (1, 2)
LONG = 60.0


def content(rank: int, name: bytes) -> bytes:
    return bytes([rank]) + name * 5


class Memory:
    """The units of one rank: the number of each is that of its name."""

    def __init__(self, rank: int) -> None:
        self.units = {number: content(rank, name) for number, name in enumerate(NAMES)}

    def read(self, kind: str, units: Sequence[int]) -> list[bytes]:
        assert kind == "pages"
        return [self.units[unit] for unit in units]

    def write(self, kind: str, units: Sequence[int], payloads: Sequence[bytes]) -> None:
        assert kind == "pages"
        self.units.update(zip(units, payloads, strict=True))


class OtherRank:
    """Another rank, whose thread is the test's: it works when it is waited for."""

    def __init__(self, rank: int, folder: Path, disks: RankDisks, limit: int) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.memory = Memory(rank)
        wakeups = Wakeups(self.calls.put)
        self.files = DiskFiles(folder, IDENTITY)
        self.tier = DiskTier(
            folder,
            identity=IDENTITY,
            limit=limit,
            daily_writes=1 << 40,
            files=self.files,
            notify=wakeups.notify,
        )
        self.records = RankRecords(
            {0: self.tier},
            self.memory,
            lambda body: disks.receive(rank, body),
            wakeups,
            max_bytes=len(content(0, NAMES[0])),
        )

    def run(self, seconds: float = 0.0) -> None:
        """Do what it was told, and tell what its disk has done."""
        while True:
            try:
                self.calls.get(timeout=seconds)()
            except Empty:
                return
            seconds = 0.0


class World:
    """Rank 0 and the others."""

    def __init__(self, base: Path, stack: ExitStack, limits: Mapping[int, int]) -> None:
        self.others: dict[int, OtherRank] = {}
        self.disks = RankDisks(RANKS, self._tell)
        self.memory = Memory(0)
        self.files = DiskFiles(base / "0", IDENTITY)
        self.tier = RankDiskTier(
            self.disks,
            0,
            base / "0",
            identity=IDENTITY,
            limit=limits.get(0, 1 << 30),
            daily_writes=1 << 40,
            files=self.files,
        )
        stack.callback(self.tier.close, 0.0)
        for rank in RANKS:
            other = OtherRank(rank, base / str(rank), self.disks, limits.get(rank, 1 << 30))
            stack.callback(other.records.close, 0.0)
            self.others[rank] = other

    def _tell(self, body: bytes) -> None:
        for other in self.others.values():
            other.calls.put(lambda other=other: other.records.take(body))  # type: ignore[misc]

    def settle(self) -> None:
        """Wait until every rank has done what rank 0 has said."""
        while not self.tier.flush(0.0):
            assert DiskTier.flush(self.others[1].tier, LONG)
            for other in self.others.values():
                other.run(0.01)

    def save(self, *numbers: int, used: float = 1e9) -> int:
        names = [NAMES[number] for number in numbers]
        payloads = self.memory.read("pages", numbers)
        self.disks.stage("pages", names, numbers)
        return self.tier.save(list(zip(names, payloads, strict=True)), [used] * len(numbers))

    def load(self, *numbers: int) -> int:
        """The number of leading records that were read, each rank's parts written into its memory."""
        ticket = self.tier.load([NAMES[number] for number in numbers])
        while True:
            for other in self.others.values():
                other.run(0.01)
            self.tier.wait(0.01)
            for answer in self.tier.poll():
                assert answer.ticket == ticket
                return self._write(numbers[: len(answer.payloads)], answer.payloads)

    def _write(self, numbers: Sequence[int], payloads: Sequence[bytes]) -> int:
        for each in (self.memory, *(other.memory for other in self.others.values())):
            each.units.update(dict.fromkeys(numbers, b""))
        self.disks.write("pages", [NAMES[number] for number in numbers], numbers)
        self.memory.write("pages", numbers, payloads)
        for other in self.others.values():
            other.run()
        self.check()
        return len(payloads)

    def check(self) -> None:
        """Every unit of every rank has the content that its name stands for."""
        for rank, memory in enumerate([self.memory, *(o.memory for o in self.others.values())]):
            assert memory.units == Memory(rank).units, f"rank {rank}"

    def files_of(self, rank: int) -> DiskFiles:
        return self.files if rank == 0 else self.others[rank].files


StartWorld = Callable[..., World]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartWorld]:
    with ExitStack() as stack:
        yield lambda **limits: World(
            tmp_path, stack, {int(name[1:]): limit for name, limit in limits.items()}
        )


def test_a_record_that_all_ranks_have_is_read_by_all(start: StartWorld) -> None:
    world = start()
    assert world.save(0, 1, 2) == 3
    assert NAMES[0] in world.tier
    assert not world.tier.is_written(NAMES[0]), "the others have not told of it"
    world.settle()
    assert world.tier.is_written(NAMES[0])
    assert world.load(0, 1, 2) == 3
    assert world.load(1) == 1


def test_records_are_found_after_a_restart(start: StartWorld) -> None:
    before = start()
    before.save(*range(8))
    before.settle()
    before.tier.close(LONG)
    after = start()
    after.settle()
    assert after.tier.num_leading(NAMES) == 8
    assert after.load(*range(9)) == 8


@pytest.mark.parametrize("rank", [0, *RANKS])
@pytest.mark.parametrize("fault", ["missing", "cut off", "another's"])
def test_a_part_that_one_rank_has_lost_is_a_miss_and_is_saved_again(
    start: StartWorld, rank: int, fault: str
) -> None:
    world = start()
    world.save(0, 1, 2, 3)
    world.settle()
    path = world.files_of(rank).path(NAMES[2])
    if fault == "missing":
        path.unlink()
    elif fault == "cut off":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(world.files_of((rank + 1) % 3).path(NAMES[2]).read_bytes()[:-1] + b"x")
    assert world.tier.num_leading(NAMES) == 4, "nobody has looked yet"
    assert world.load(0, 1, 2, 3) == 2
    world.settle()
    assert NAMES[2] not in world.tier
    assert world.tier.num_leading(NAMES) == 2
    assert world.save(2) == 1
    world.settle()
    assert world.load(0, 1, 2, 3) == 4


def test_records_of_a_rank_that_begins_with_none_do_not_exist(start: StartWorld) -> None:
    before = start()
    before.save(0, 1)
    before.settle()
    before.tier.close(LONG)
    for name in NAMES[:2]:
        before.others[2].files.path(name).unlink()
    after = start()
    after.settle()
    assert after.tier.num_leading(NAMES) == 0
    assert after.save(0) == 1
    after.settle()
    assert after.tier.num_leading(NAMES) == 1
    assert after.load(0) == 1


def test_what_a_rank_has_no_room_for_is_not_saved_again_at_once(start: StartWorld) -> None:
    world = start(_1=300)  # for two records
    world.save(0, 1, used=2e9)
    world.settle()
    assert world.tier.coldest_kept(41) >= 2e9, "the other rank is full"
    assert not world.tier.keeps(41, 1e9)
    assert world.save(2, used=1e9) == 1
    world.settle()
    assert NAMES[2] not in world.tier
    assert not world.tier.accepts
    assert world.save(3, used=3e9) == 0, "for a while after a refusal"
    assert world.load(0, 1) == 2


def test_deleted_and_cleared_records_are_gone_on_every_rank(start: StartWorld) -> None:
    world = start()
    world.save(*range(6))
    world.settle()
    assert world.tier.delete(NAMES[1:3]) == 2
    world.settle()
    assert [name in world.tier for name in NAMES[:4]] == [True, False, False, True]
    world.tier.clear()
    assert not any(name in world.tier for name in NAMES)
    world.settle()
    for rank in (0, *RANKS):
        assert not any(world.files_of(rank).path(name).exists() for name in NAMES)
    assert world.save(1) == 1
    world.settle()
    assert world.load(1) == 1


def test_a_listener_hears_of_records_that_all_ranks_have(start: StartWorld) -> None:
    world = start()
    heard: dict[bytes, bool] = {}
    world.tier.report_to(heard.update)
    world.save(0, 1)
    assert DiskTier.flush(world.tier, 0.0) in (True, False)
    assert not any(heard.values())
    world.settle()
    assert heard == {NAMES[0]: True, NAMES[1]: True}
    world.others[2].files.path(NAMES[1]).unlink()
    assert world.load(0, 1) == 1
    world.settle()
    assert heard == {NAMES[0]: True, NAMES[1]: False}


@pytest.mark.parametrize("seed", range(5))
def test_no_rank_ever_reads_another_record(start: StartWorld, seed: int) -> None:
    """Whatever is saved, lost, deleted and read, in any order, and however late the others are."""
    draw, world = random.Random(seed), start(_1=20 * 200, _2=16 * 200)
    num_read = 0
    for _ in range(120):
        numbers = draw.sample(range(len(NAMES)), draw.randint(1, 6))
        match draw.choice(["save", "save", "load", "load", "lose", "delete", "settle"]):
            case "save":
                world.save(*numbers, used=draw.uniform(1e9, 2e9))
            case "load":
                num_read += world.load(*numbers)
            case "lose":
                path = world.files_of(draw.choice((0, *RANKS))).path(NAMES[numbers[0]])
                path.unlink(missing_ok=True)
            case "delete":
                world.tier.delete([NAMES[number] for number in numbers])
            case "settle":
                world.settle()
    world.check()
    assert num_read > 10


@pytest.mark.parametrize(
    "message",
    [
        RankMessage(
            Verb.SAVE, 1, "pages", units=(3, 2**40), times=(1.5, -2.0), names=(b"a", b"b" * 32)
        ),
        RankMessage(Verb.CLEAR),
        News(7, [b"x"], [b"y" * 16, b""], True, False, True, float("-inf")).message(1),
    ],
)
def test_a_message_is_decoded_as_it_was_encoded(message: RankMessage) -> None:
    body = message.encode()
    found = RankMessage.decode(body)
    for name in ("verb", "tier", "kind", "number", "units", "times", "names"):
        assert getattr(found, name) == _plain(getattr(message, name)), name
    for end in range(len(body)):
        with pytest.raises(ValueError, match="a message"):
            RankMessage.decode(body[:end])
    with pytest.raises(ValueError, match="a message of another length"):
        RankMessage.decode(body + b"x")


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else value


def test_what_no_other_rank_says_is_refused(start: StartWorld) -> None:
    world = start()
    nothing = News(0, (), (), False, False, False, 0.0)
    for rank, message, reason in (
        (1, RankMessage(Verb.SAVE), "does not send SAVE"),
        (3, nothing.message(0), "rank 3 tells of tier 0"),
        (1, nothing.message(1), "rank 1 tells of tier 1"),
        (1, RankMessage(Verb.NEWS), "not enough values"),
        (1, RankMessage(Verb.ANSWER), "not enough values"),
    ):
        with pytest.raises(ValueError, match=reason):
            world.disks.receive(rank, message.encode())
