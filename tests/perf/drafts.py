"""Whether drafts are ever slower than none: the controller over recorded tables, and passes of weights.

    never slower   answers that accept drafts with known chances, on machines whose steps take known times, with
                   noise, stalls and slow phases: time of plain decode / time with the controller, and how far
                   that is from the best fixed length in hindsight
    passes         the included model's answers with the drafts that prompt lookup makes, or the model itself in 4
                   bits, whose calls read a part of the model's bytes: each step weighed by a machine's table, relative
                   to the same answers without drafts

All draws are seeded and nothing is timed: the figures are the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from unittest.mock import patch

from mlxserve.bench.report import Figure, Report
from mlxserve.build import build_engine
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.hub.embedded import model_path
from mlxserve.hub.files import find_model
from mlxserve.request import Chunk, Request
from mlxserve.scheduler.draft_controller import DraftController
from mlxserve.scheduler.row_times import RowTimes
from mlxserve.text.tokenizer import Tokenizer
from tests.drafting import similar_model
from tests.perf.draft_tables import MACHINES, Steps, table_of

# The chance that token `at` of a draft is right if those before it are, by the answer and its position.
Chance = Callable[[int, int, int], float]
TEXTS: dict[str, Chance] = {
    "nothing right": lambda answer, position, at: 0.05,
    "prose": lambda answer, position, at: (0.55, 0.45, 0.35, 0.3)[at],
    "a good head": lambda answer, position, at: (0.85, 0.78, 0.7, 0.62)[at],
    "copies": lambda answer, position, at: 0.97,
    "turns of 100 tokens": lambda answer, position, at: 0.9 if position // 100 % 2 else 0.2,
    "every second answer": lambda answer, position, at: 0.9 if answer % 2 else 0.1,
}
ANSWERS = (1, 2, 4, 16)
DEPTH = 4
_CALL = 0.05  # steps of one row that a drafter's call takes
_NOISE, _STALLS, _STALL = 0.05, 0.01, 3.0  # of a step's time; of the steps; times its time
_SLOW, _SLOW_EVERY = 1.15, 400  # a laptop that is hot in every second phase of so many tokens
_TABLE_NOISE = 0.03
_LENGTHS = {1: 1200, 2: 1200, 4: 1200, 16: 300}  # tokens of an answer, by how many run


@dataclass(frozen=True, slots=True)
class Cell:
    """One machine, text and number of answers; speeds are relative to plain decode."""

    name: str
    speeds: tuple[float, ...]  # with the controller, by seed
    fixed: float  # with the best fixed length in hindsight
    best_length: int

    @property
    def regret(self) -> float:
        return self.fixed / mean(self.speeds) - 1


def bench_drafts(*, seeds: int, num_answers: int) -> Report:
    """The simulated cells, and with `num_answers` above 0 the passes of the included model's answers."""
    cells = list(all_cells(range(seeds)))
    figures = [
        Figure("cells", "", (float(len(cells)),)),
        Figure("worst seed, of plain decode", "x", (min(min(cell.speeds) for cell in cells),)),
        Figure("mean where no length pays", "x", (mean(losing(cells)),)),
        Figure("mean regret", "%", (100 * mean(cell.regret for cell in cells),)),
    ]
    figures += [
        Figure(
            f"{cell.name}, best fixed length {cell.best_length}: {cell.fixed:.2f}x",
            "x",
            cell.speeds,
        )
        for cell in cells
    ]
    if num_answers:
        for machine, steps in MACHINES.items():
            passes = included_passes(steps, num_answers)
            figures.append(Figure(f"passes of weights, {machine}", "x", (passes,)))
            for call in (0.0, IN_4_BITS):
                with in_4_bits() as folder:
                    passes = included_passes(steps, num_answers, draft_model=folder, call=call)
                name = f"passes of weights, {machine}, drafted by itself in 4 bits"
                name += ", whose weights are counted" if call else ""
                figures.append(Figure(name, "x", (passes,)))
    return Report("drafts", {"seeds": seeds, "answers": num_answers}, tuple(figures))


def losing(cells: Sequence[Cell]) -> list[float]:
    """Mean speeds of the cells in which plain decode is the best fixed length."""
    return [mean(cell.speeds) for cell in cells if cell.best_length == 0]


def all_cells(
    seeds: Sequence[int],
    machines: Sequence[str] = tuple(MACHINES),
    texts: Sequence[str] = tuple(TEXTS),
    answers: Sequence[int] = ANSWERS,
) -> Iterator[Cell]:
    for machine in machines:
        for text in texts:
            for num_answers in answers:
                if text == "every second answer" and num_answers == 1:
                    continue
                yield _cell(machine, text, num_answers, seeds)


def _cell(machine: str, text: str, num_answers: int, seeds: Sequence[int]) -> Cell:
    steps, chance = MACHINES[machine], TEXTS[text]

    def speed(seed: int, fixed: int | None) -> float:
        return Played(steps, chance, num_answers, seed).run(fixed)

    plain = [speed(seed, 0) for seed in seeds]  # with the same noise
    fixed = [1.0, *(speed(seeds[0], length) / plain[0] for length in range(1, DEPTH + 1))]
    speeds = tuple(speed(seed, None) / base for seed, base in zip(seeds, plain, strict=True))
    name = f"{machine}, {text}, {num_answers} at once"
    return Cell(name, speeds, max(fixed), fixed.index(max(fixed)))


class Played:
    """Answers of a machine, by the times of its table and a text's chances."""

    def __init__(self, steps: Steps, chance: Chance, num_answers: int, seed: int) -> None:
        self._steps = steps
        self._chance = chance
        self._draw = random.Random(seed)
        self._noise = random.Random(
            -1 - seed
        )  # of the times: the same for the n-th step of any plan
        self._lengths = [0] * num_answers
        self._end = _LENGTHS[num_answers]
        table = {
            rows: seconds * self._noise.gauss(1, _TABLE_NOISE)
            for rows, seconds in table_of(steps).items()
        }
        self._controller: DraftController[int] = DraftController(RowTimes(table, has_calls=True))

    def run(self, fixed: int | None) -> float:
        """The time of plain decode, without noise, over that of these answers.

        fixed: the length of all drafts; None for what the controller chooses
        """
        seconds = plain = 0.0
        while live := [at for at, length in enumerate(self._lengths) if length < self._end]:
            if fixed is None:
                plan = self._controller.plan(len(live), dict.fromkeys(live, DEPTH), 1000)
            else:
                plan = dict.fromkeys(live, fixed) if fixed else {}
            heat = self._heat()
            num_rows, longest = len(live) + sum(plan.values()), max(plan.values(), default=0)
            took = self._time(num_rows, longest) * heat
            seconds += took
            num_new = self._accept(live, plan)
            plain += self._steps(len(live)) * heat * num_new / len(live)
            self._controller.times.observe(num_rows, took, longest)
        return plain / seconds

    def _heat(self) -> float:
        phase = sum(self._lengths) // (len(self._lengths) * _SLOW_EVERY)
        return _SLOW if phase % 2 else 1.0

    def _time(self, num_rows: int, longest: int) -> float:
        noise = self._noise
        stall = _STALL if noise.random() < _STALLS else 1.0
        calls = _CALL * longest * noise.gauss(1, _NOISE)
        return self._steps(num_rows) * noise.gauss(1, _NOISE) * stall + calls

    def _accept(self, live: Sequence[int], plan: dict[int, int]) -> int:
        """Accept drafts by chance; return how many tokens all answers got."""
        num_new = 0
        for answer in live:
            num_right, position = 0, self._lengths[answer]
            while num_right < plan.get(answer, 0):
                if self._draw.random() >= self._chance(answer, position + num_right, num_right):
                    break
                num_right += 1
            if answer in plan:
                self._controller.learn(answer, plan[answer], num_right)
            self._lengths[answer] += 1 + num_right
            num_new += 1 + num_right
        return num_new


# ---- passes of weights

_THINGS = (
    *("cat", "dog", "tree", "river", "house", "farmer", "fox", "cow", "goat", "bird"),
    *("boat", "garden", "school", "teacher", "king", "star", "moon", "horse", "door", "city"),
)
_TEXT = "The quick brown fox jumps over the lazy dog. The farmer has nine cows and two goats. "
_QUESTIONS = (
    "Tell me a story about a {}.",
    "What is a {}?",
    "Write three sentences about a {}, and repeat each of them.",
    f"Repeat this text, but write {{}} instead of fox: {_TEXT}",
    f"{_TEXT * 3}The {{}} has",
)


IN_4_BITS = 4.5 / 16  # bytes of weights in 4 bits with scales of 64, of those in bfloat16


class WeighedSteps(StepTimeModel):
    """Weighs each step of decodes by a machine's table, and the calls of a drafter before it.

    call: passes of the model's weights that a call of the drafter takes
    """

    def __init__(self, steps: Steps, call: float) -> None:
        super().__init__(None)
        self._steps, self._call = steps, call
        self.passes = 0.0

    def observe(self, chunks: Sequence[Chunk], seconds: float, waited: float = 0.0) -> None:
        super().observe(chunks, seconds, waited)
        if all(chunk.start >= chunk.request.prefill_end for chunk in chunks):
            self.passes += self._steps(sum(chunk.length for chunk in chunks))
            self.passes += self._call * max(len(chunk.draft) for chunk in chunks)


@contextmanager
def in_4_bits() -> Iterator[Path]:
    """Yield a folder with the included model rounded to 4 bits."""
    with TemporaryDirectory() as folder:
        yield similar_model(Path(folder), model_path(), bits=4)


def included_passes(
    steps: Steps,
    num_answers: int,
    max_tokens: int = 48,
    draft_model: Path | None = None,
    call: float = 0.0,
) -> float:
    """Passes of weights with drafts over those without, of answers one after the other.

    draft_model: by default drafts are those of earlier text
    call: passes that a call of the draft model takes
    """
    files = find_model(None)
    tokenizer = Tokenizer(files.path)
    config = EngineConfig().with_options(
        num_pages=256,
        page_size=16,
        disable_log_stats=True,
        speculative_tokens=16 if draft_model is None else DEPTH,
        draft_model=None if draft_model is None else str(draft_model),
    )
    pace = WeighedSteps(steps, call)
    times = RowTimes(table_of(steps), has_calls=call > 0, call=call)
    with patch("mlxserve.build.timed_rows", lambda *_: times):
        engine, _ = build_engine(config, files, pace=pace)
    num_decoded = 0
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    try:
        for number in range(num_answers):
            question = _QUESTIONS[number % len(_QUESTIONS)]
            thing = _THINGS[number // len(_QUESTIONS) % len(_THINGS)]
            prompt = tokenizer.encode_here(question.format(thing))
            engine.add(Request(f"answer {number}", prompt, params))
            while engine.has_work:
                engine.step()
            num_decoded += max_tokens - 1  # the prompt's step yields the first
    finally:
        engine.close(keeps_pages=False)
    return pace.passes / num_decoded
