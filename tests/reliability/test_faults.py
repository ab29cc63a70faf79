"""A fault at any call of the engine's parts ends what it concerns; then the same engine answers right.

Each fault is one exception in place of one call of a public method, while answers, an embedding, a named
prefix, a snapshot, a chat to forget and resizes are under way in a cache that is too small for all of them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxserve import MlxServeError, SamplingParams
from mlxserve.build import build_text_model
from mlxserve.chat.answers import RequestOutput
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.disk.tier import Tier
from mlxserve.engine.engine import Engine
from mlxserve.engine.monitor import EngineMonitor
from mlxserve.engine.side_work import SideWork
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.engine.timeline import Timeline
from mlxserve.engine.transfers import Transfers
from mlxserve.model.embedding import Embedding
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.moves import Moves
from mlxserve.scheduler.planner import StepPlanner
from mlxserve.scheduler.preemption import Preemption
from mlxserve.scheduler.roster import Roster
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.text.stream_decoder import StreamDecoder
from mlxserve.text.tokenizer import Tokenizer
from tests.reliability.faults import Fault, Point, all_planted, points_of
from tests.together import begun_together

ERRORS = (RuntimeError, MemoryError, OSError)
# Not called while requests are served: at the end, or by tests.
ENDS = frozenset({"close"})
POINTS: list[Point] = [
    point
    for owner in (
        *(ModelRunner, Scheduler, Moves, StepPlanner, Preemption, Roster, Transfers, Tier),
        *(Engine, EngineMonitor, SideWork, Embedding, Timeline, StepTimeModel),
    )
    for point in points_of(owner, but=ENDS)
] + [
    *(Point(Tokenizer, name) for name in ("encode", "render", "decode", "stream")),
    Point(StreamDecoder, "push"),
    Point(StreamDecoder, "finish"),
]
KEY_POINTS = [
    Point(ModelRunner, "launch"),
    Point(ModelRunner, "collect"),
    Point(Scheduler, "update"),
    Point(Tier, "save"),
    Point(StreamDecoder, "push"),
]
NUM_PAIRS = int(os.environ.get("FAULT_PAIRS", "12"))
PARAMS = SamplingParams(max_tokens=26, temperature=0, ignore_eos=True)
NUM_PAGES, NUM_ANSWERS, PINNED = 20, 5, 2
SECONDS = 60.0  # for what takes one


class PlantedError(Exception):
    """Mixed into the errors, so that no other one passes for it."""


def error_of(kind: type[Exception]) -> Exception:
    return type(f"Planted{kind.__name__}", (kind, PlantedError), {})("planted")


class Subject:
    """One engine, and what it answers without faults."""

    def __init__(self, folder: Path) -> None:
        options: dict[str, Any] = {
            "num_pages": NUM_PAGES,
            "page_size": 16,
            "preemption_mode": "swap",
            "disk_cache_dir": str(folder),
            "max_engine_failures": 1_000_000,
            "disable_log_stats": True,
        }
        self.chat: TextModel = build_text_model(EngineConfig().with_options(**options))
        self.wanted = [output.token_ids for output in asyncio.run(self.answers())]

    async def answers(self) -> list[RequestOutput]:
        return [await self.answer(number) for number in range(NUM_ANSWERS)]

    async def answer(self, number: int) -> RequestOutput:
        text = f"Tell me the story number {number} of a boat. " * (1 + number % 2)
        prompt = self.chat.writer.render([{"role": "user", "content": text}])
        stream = await self.chat.writer.submit(prompt, PARAMS)
        try:
            [output] = await stream.whole()
        finally:
            await stream.aclose()
        return output

    async def prefix(self) -> None:
        await self.chat.writer.prefixes.add("p", self.chat.codec.encode("You are a pirate. " * 4))

    async def resizes(self) -> None:
        await self.chat.engine.resize_cache(NUM_PAGES + 8)
        await self.chat.engine.resize_cache(NUM_PAGES)
        await self.chat.engine.reset_prefix_cache()

    async def forget(self) -> None:
        await self.chat.forget([self.chat.codec.encode("This chat was deleted. " * 4)])

    async def look(self) -> None:
        for _ in range(3):
            await self.chat.engine.snapshot()

    async def load(self) -> list[Any]:
        """What each of the concurrent tasks returned or raised: the answers, then the others."""
        return await asyncio.gather(
            *(self.answer(number) for number in range(NUM_ANSWERS)),
            self.chat.vectors.embed([list(range(5, 60))]),
            self.chat.writer.score(list(range(5, 60))),
            self.prefix(),
            self.look(),
            self.forget(),
            self.resizes(),
            return_exceptions=True,
        )

    async def survive(self, faults: list[Fault]) -> None:
        """Plant the faults under load; then the same engine answers right and holds nothing."""
        with all_planted(faults):
            results = await asyncio.wait_for(self.load(), SECONDS)
        for number, result in enumerate(results):
            if isinstance(result, BaseException):
                assert isinstance(result, MlxServeError | PlantedError), repr(result)
            elif number < NUM_ANSWERS:
                assert result.token_ids == self.wanted[number], "a wrong answer beside a fault"
        await asyncio.wait_for(self.is_sound(), SECONDS)

    async def is_sound(self) -> None:
        assert self.chat.engine.is_alive()
        if "p" in self.chat.writer.prefixes.sizes():
            self.chat.writer.prefixes.remove("p")
        await self.chat.engine.resize_cache(NUM_PAGES)
        answers = await asyncio.gather(*(self.answer(number) for number in range(NUM_ANSWERS)))
        assert [answer.token_ids for answer in answers] == self.wanted
        await self.chat.engine.check()
        snapshot = await self.chat.engine.snapshot()
        assert snapshot.requests == ()
        assert (snapshot.stats.pool.num_used, snapshot.stats.pool.num_pinned) == (0, 0)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = Subject(tmp_path_factory.mktemp("pages"))
    yield subject
    subject.chat.close()


@pytest.fixture(scope="module")
def num_calls(subject: Subject) -> dict[Point, int]:
    """How often one load calls each point."""
    faults = [Fault(point, RuntimeError, at=1 << 60) for point in POINTS]
    with all_planted(faults), begun_together(NUM_ANSWERS):
        asyncio.run(asyncio.wait_for(subject.load(), SECONDS))
    asyncio.run(subject.is_sound())
    return {fault.point: fault.num_calls for fault in faults}


@pytest.mark.slow
def test_the_load_reaches_almost_every_point(num_calls: dict[Point, int]) -> None:
    """Otherwise the tests below would pass without a fault."""
    unreached = {str(point) for point, number in num_calls.items() if not number}
    assert unreached <= {
        *("Scheduler.abort", "Scheduler.unpin", "Scheduler.keep_pages", "Scheduler.restart"),
        *("Scheduler.check", "Scheduler.limit_running", "Timeline.restart"),
        *("Moves.finish_load", "Moves.finish_save", "Moves.unit_names"),
        *("Preemption.preempt_to", "Roster.awaited_guide", "Roster.check", "Roster.park"),
        *("ModelRunner.restart", "ModelRunner.check", "ModelRunner.write"),
        *("ModelRunner.copy_pages", "Transfers.restart"),
        *("Tier.clear", "Tier.wait", "Tier.report_to"),
        *("Tier.flush", "Engine.idle"),
        *("Transfers.wait", "Transfers.write_idle"),  # when idle
        "ModelRunner.drop",  # of models with recurrent states
        "ModelRunner.back_ahead",  # of a cache that still grows
        "Preemption.preempt_for",  # for a request of a higher priority
        # all is on disk already
        *("Engine.restart", "Engine.check", "Engine.abort", "Engine.abort_all", "Engine.unpin"),
        *("Engine.keep_pages", "Tokenizer.decode"),
        "StepPlanner.wants_read",  # with drafts
        "StepTimeModel.learn_speed",  # on Metal
        "SideWork.image_encoding",  # of models that see images
        "ModelRunner.shrink",  # of models with windows: tests/test_shared_memory.py
    }, unreached


@pytest.mark.slow
@pytest.mark.parametrize("point", KEY_POINTS, ids=str)
def test_a_fault_in_an_early_call_is_survived(subject: Subject, point: Point) -> None:
    asyncio.run(subject.survive([Fault(point, lambda: error_of(RuntimeError), at=1)]))


@pytest.mark.parametrize(
    ("point", "num_faults"),
    [
        *(
            pytest.param(p, 1, marks=pytest.mark.long if n % 8 else pytest.mark.slow, id=str(p))
            for n, p in enumerate(POINTS)
        ),
        *(pytest.param(p, 3, marks=pytest.mark.long, id=f"{p}-3") for p in POINTS),
    ],
)
def test_a_fault_at_any_call_is_survived(
    subject: Subject, point: Point, num_faults: int, num_calls: dict[Point, int]
) -> None:
    """The latest of calls 0, 6 and 25 that the load reaches; all points and calls in the long suite."""
    reached = [at for at in (0, 6, 25) if at < num_calls[point]]
    for at in reached[-num_faults:]:
        kind = ERRORS[(POINTS.index(point) + at) % len(ERRORS)]
        asyncio.run(subject.survive([Fault(point, partial(error_of, kind), at)]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_two_faults_at_random_are_survived(subject: Subject, seed: int) -> None:
    """Also in what recovers from the first one: these methods are called only then."""
    draw = random.Random(seed)
    in_recovery = [point for point in POINTS if point.method in ("restart", "check", "drop_all")]
    first, second = draw.sample(POINTS, 2)
    if draw.random() < 0.3:
        second = draw.choice(in_recovery)
    faults = [
        Fault(
            point, partial(error_of, draw.choice(ERRORS)), at=0 if is_rare else draw.randrange(30)
        )
        for point, is_rare in ((first, False), (second, second in in_recovery))
    ]
    asyncio.run(subject.survive(faults if first != second else faults[:1]))
