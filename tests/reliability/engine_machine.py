"""The engine under every order of events: a state machine over whole engines, judged by `EngineUnderTest`.

An episode is one engine and some hundred events, drawn by its seed: requests with forks, priorities, salts and named
prefixes, of several keys; cancellations; prefixes with shares; resizes of the cache, and restarts with other windows,
states and budgets; short memory; the disk; and exceptions in place of any call of the engine's parts.

`python -m tests.reliability engine --steps 300000` runs it at length, and goes on where it was stopped. What the
threads of the disk do in between is not drawn, so a seed is not always the same episode.
"""

from __future__ import annotations

import json
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve import SamplingParams
from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pages import PagePool
from mlxserve.chat.request_options import RequestOptions
from mlxserve.disk.tier import Tier
from mlxserve.engine.disk_cache import DiskCache
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.engine.timeline import Timeline
from mlxserve.engine.transfers import Transfers
from mlxserve.model.runner import ModelRunner
from mlxserve.request import STATE_SLOTS
from mlxserve.scheduler.disk_pages import DiskPages
from mlxserve.scheduler.moves import Moves
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.planner import StepPlanner
from mlxserve.scheduler.preemption import Preemption
from mlxserve.scheduler.roster import Roster
from mlxserve.scheduler.scheduler import Scheduler
from tests.conftest import write_model
from tests.reliability.engine_under_test import AskedPrefix, EngineUnderTest, Tokens
from tests.reliability.faults import Fault, Point, points_of
from tests.reliability.greedy_reference import GreedyReference

PAGE_SIZE, WINDOW = 16, 24
MAX_TOKENS, MAX_MODEL_LEN = 24, 256
LONGEST = 90  # tokens of a prompt
# One model of each set of kinds that layers keep.
MODELS: dict[str, dict[str, Any]] = {
    "full pages": {"kind": "llama", "num_hidden_layers": 2},
    "windows": {
        "kind": "gemma3_text",
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "states": {
        "kind": "lfm2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "block_dim": 64,
        "full_attn_idxs": [1],
    },
    "windows and states": {
        "kind": "gear",
        "num_hidden_layers": 3,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
    },
}
_SMALL = {"intermediate_size": 32, "max_position_embeddings": MAX_MODEL_LEN}
POINTS: list[Point] = [
    point
    for owner in (
        *(ModelRunner, PagePool, WindowPages, StateSlots, Tier, DiskCache, DiskPages),
        *(Scheduler, PageTables, Pins, Moves, StepPlanner, Preemption, Roster, Transfers),
        *(Engine, Timeline, StepTimeModel),
    )
    # Not called while requests are served: at the end.
    for point in points_of(owner, but=frozenset({"close", "abort_all"}))
]
# Other events between two of these: a restart takes as long as 20 steps, and a fault needs some to happen.
RARE = {"restart": 80, "plant": 8, "drain": 30}
ERRORS = (RuntimeError, MemoryError, OSError)
LENGTHS = (1, 7, 15, 16, 17, 31, 32, 33, 40, 48, 49, 64, 65, 80, LONGEST)  # of prompts
CLIENTS, SALTS, NAMES = ("", "a", "a", "b"), (None, None, None, "salt"), ("p", "q", "r", "s")
NUM_EVENTS = 300  # of an episode


def prompt_of(branch: int, num_tokens: int) -> Tokens:
    """Prompts of one branch begin alike; all of them share their first page."""
    ids = [5 + place % 7 for place in range(PAGE_SIZE)]
    ids += [20 + (3 * place + 11 * branch) % 40 for place in range(num_tokens)]
    return tuple(ids[:num_tokens])


class TinyModels:
    """One of each of `MODELS`, with their references, written when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Path, GreedyReference]] = {}

    def get(self, name: str) -> tuple[Path, GreedyReference]:
        if name not in self._known:
            folder = self._folder / name.replace(" ", "-")
            folder.mkdir()
            write_model(folder, **{**_SMALL, **MODELS[name]})
            self._known[name] = folder, GreedyReference(folder, MAX_TOKENS)
        return self._known[name]


@dataclass
class FuzzReport:
    """What a run has done so far. The next one goes on from a file of it."""

    seed: int = 0  # of the next episode
    num_steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, engine: EngineUnderTest) -> None:
        stats = engine.model.engine.stats()
        self.num_steps += engine.gate.num_steps
        self.counts += Counter(
            engines=1,
            answers=engine.num_answers,
            tokens=engine.num_tokens,
            refusals=engine.num_refused,
            faults=engine.num_faults,
            lost_in_faults=engine.num_lost,
            preemptions=stats.scheduler.num_preemptions,
            restored_tokens=stats.scheduler.restored_tokens,
            prefix_hits=stats.scheduler.prefix_hits,
            drafted_tokens=stats.scheduler.drafted_tokens,
        )

    def __str__(self) -> str:
        return f"{self.num_steps:,} steps: " + ", ".join(
            f"{number:,} {name.replace('_', ' ')}" for name, number in self.counts.items()
        )

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(vars(self)))

    @classmethod
    def read(cls, file: Path, seed: int) -> FuzzReport:
        if not file.exists():
            return cls(seed)
        fields = json.loads(file.read_text())
        return cls(fields["seed"], fields["num_steps"], Counter(fields["counts"]))


class EngineMachine:
    """One episode. Every event ends between two steps."""

    def __init__(self, models: TinyModels, seed: int, names: Sequence[str] = tuple(MODELS)) -> None:
        """names: of `MODELS`, one of which is drawn"""
        self.draw = draw = random.Random(seed)
        self.events: list[str] = []
        self._due = dict(RARE)
        self._folder = tempfile.TemporaryDirectory()
        self._model = draw.choice(names)
        self._has_disk = draw.random() < 0.6
        self._configuration = self._draw_configuration()
        folder, reference = models.get(self._model)
        options = self._options(self._draw_sizes())
        self.events.append(f"seed {seed}: {self._model}, {options}")
        self.engine = EngineUnderTest(
            folder, reference, MAX_MODEL_LEN, options, Window(WINDOW, PAGE_SIZE)
        )

    def _draw_configuration(self) -> dict[str, Any]:
        """What stays over restarts."""
        choice = self.draw.choice
        disk = {"disk_cache_dir": self._folder.name} if self._has_disk else {}
        return {
            **disk,
            "disk_cache_size": choice([0.00005, 0.01]) if self._has_disk else 0,
            "preemption_mode": choice(["recompute", "swap"]) if self._has_disk else "recompute",
            "page_size": PAGE_SIZE,
            "itl_target_ms": 0,  # no clock decides
            "max_pinned_fraction": choice([0.25, 0.5, 1.0]),
            "page_tail": choice(["copy", "recompute"]),
            "speculative_tokens": choice([0, 0, 5]),
            "growth_pages": choice([0, 2]),
            "hot_after_hits": choice([1, 2]),
            "preempt_for_priority_ms": choice([0, 5, 1000]),
            "ageing_steps": choice([5, 1000]),
            "max_num_waiting": choice([4, 1000]),
            "prefix_follow_pages": choice([1, 4]),
        }

    def _draw_sizes(self) -> dict[str, int]:
        """Of the cache, of windows and states, and of a step."""
        draw, seats = self.draw, self.draw.randint(1, 5)
        sizes = {
            "num_pages": draw.randint(10, 40),
            "max_num_seqs": seats,
            "max_num_batched_tokens": max(seats, draw.choice([16, 32, 40, 96, 256])),
        }
        if "windows" in self._model:
            sizes["num_window_pages"] = Window(WINDOW, PAGE_SIZE).num_held + draw.randint(0, 12)
        if "states" in self._model:
            sizes["num_state_slots"] = STATE_SLOTS * seats + draw.randint(0, 8)
        return sizes

    def _options(self, sizes: dict[str, int]) -> dict[str, Any]:
        return {**self._configuration, **sizes}

    # ---- an episode

    def run(self, num_events: int) -> None:
        """Make so many events, and then steps until nothing is under way. Whatever is wrong is raised with the
        events that led to it."""
        events = [getattr(self, name) for name in WEIGHTS]
        try:
            for event in self.draw.choices(events, list(WEIGHTS.values()), k=num_events):
                event()
            self._do("drain at the end", self.engine.drain())
        except BaseException as error:
            error.add_note("\n".join(self.events))
            raise

    def close(self) -> None:
        self.engine.close()
        self._folder.cleanup()

    def _do(self, event: str, work: Coroutine[Any, Any, None]) -> None:
        self.events.append(event)
        self.engine.run(work)

    def _is_due(self, event: str) -> bool:
        """Whether a rare event may happen again."""
        is_due = len(self.events) >= self._due[event]
        if is_due:
            self._due[event] = len(self.events) + RARE[event]
        return is_due

    def _prompt(self) -> Tokens:
        return prompt_of(self.draw.randint(0, 3), self.draw.choice(LENGTHS))

    def _suffix(self) -> Tokens:
        return prompt_of(self.draw.randint(0, 1), self.draw.choice([1, 16, 23]))

    def _params(self, n: int = 1) -> SamplingParams:
        max_tokens = self.draw.randint(1, MAX_TOKENS)
        return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n)

    def _ask(self, prompt: Tokens, params: SamplingParams, **options: Any) -> None:
        said = f"ask {len(prompt)} {prompt[-1]} max {params.max_tokens} n {params.n} {options}"
        self._do(said, self.engine.ask(prompt, params, RequestOptions(**options)))

    # ---- events

    def ask(self) -> None:
        choice = self.draw.choice
        self._ask(
            self._prompt(),
            self._params(n=choice([1, 1, 1, 2, 3])),
            client=choice(CLIENTS),
            cache_salt=choice(SALTS),
            priority=choice([0, 0, 0, 1, -1]),
            skip_prefix_cache=choice([False, False, False, True]),
        )

    def ask_with_prefix(self) -> None:
        if self.engine.prefixes:
            name = self.draw.choice(sorted(self.engine.prefixes))
            client = self.draw.choice(CLIENTS)
            self._ask(self._suffix(), self._params(), client=client, prefix_name=name)

    def continue_chat(self) -> None:
        if self.engine.ended:
            prompt, answer = self.draw.choice(self.engine.ended)
            prompt = prompt + answer + self._suffix()
            if len(prompt) <= 2 * LONGEST:
                self._ask(prompt, self._params(), client=self.draw.choice(CLIENTS))

    def cancel(self) -> None:
        if pending := self.engine.pending:
            number = self.draw.randrange(len(pending))
            self._do(f"cancel {number}", self.engine.cancel(pending[number]))

    def turn(self) -> None:
        num_steps = self.draw.choice([1, 2, 5, 12, 40])
        self._do(f"turn {num_steps}", self.engine.turn(num_steps))

    def add_prefix(self) -> None:
        choice = self.draw.choice
        name, prompt = choice(NAMES), self._prompt()
        salt, client, share = choice(SALTS), choice(CLIENTS), choice([0.25, 0.5, 0.5, 1.0])
        if not self.engine.adding & {name, "every name"}:
            self._do(
                f"add prefix {name} {len(prompt)} {prompt[-1]}, {salt=} {client=} {share=}",
                self.engine.add_prefix(name, AskedPrefix(prompt, salt), client, share),
            )

    def remove_prefix(self) -> None:
        if self.engine.prefixes and "every name" not in self.engine.adding:
            name = self.draw.choice(sorted(self.engine.prefixes))
            self._do(f"remove prefix {name}", self.engine.remove_prefix(name))

    def resize(self) -> None:
        num_pages = max(2, self.engine.num_pages + self.draw.randint(-6, 3))
        if self.draw.random() < 0.3:
            num_pages = self.draw.randint(2, 40)
        self._do(f"resize {num_pages}", self.engine.resize(num_pages))

    def reset(self) -> None:
        force, disk = self.draw.random() < 0.5, self.draw.random() < 0.5
        self._do(f"reset {force=} {disk=}", self.engine.reset(force=force, disk=disk))

    def forget(self) -> None:
        prompt = self._prompt()
        self._do(f"forget {len(prompt)} {prompt[-1]}", self.engine.forget([prompt]))

    def embed(self) -> None:
        prompt = self._prompt()
        self._do(f"embed {len(prompt)}", self.engine.embed(prompt))

    def press_memory(self) -> None:
        share = self.draw.choice([0.1, 0.1, 0.94, 0.99])
        self._do(f"memory {share}", self.engine.press_memory(share))

    def plant(self) -> None:
        if self._is_due("plant"):
            point, error = self.draw.choice(POINTS), self.draw.choice(ERRORS)
            fault = Fault(point, lambda: error("planted"), self.draw.choice([0, 0, 0, 1, 3, 8]))
            self.events.append(f"plant {fault}")
            self.engine.plant(fault)

    def restart(self) -> None:
        if self._has_disk and self._is_due("restart"):
            sizes = self._draw_sizes()
            self._do(f"restart {sizes}", self.engine.restart(self._options(sizes)))

    def drain(self) -> None:
        if self._is_due("drain"):
            self._do("drain", self.engine.drain())


WEIGHTS = {
    "ask": 20,
    "ask_with_prefix": 6,
    "continue_chat": 8,
    "cancel": 4,
    "turn": 30,
    "add_prefix": 6,
    "remove_prefix": 3,
    "resize": 8,
    "reset": 2,
    "forget": 2,
    "embed": 1,
    "press_memory": 3,
    "plant": 8,
    "restart": 3,
    "drain": 4,
}


def run_episode(
    models: TinyModels,
    report: FuzzReport,
    num_events: int = NUM_EVENTS,
    names: Sequence[str] = tuple(MODELS),
) -> None:
    """The one of the report's seed, which is counted there."""
    machine = EngineMachine(models, report.seed, names)
    try:
        machine.run(num_events)
        report.add(machine.engine)
    finally:
        machine.close()
    report.seed += 1


def fuzz(file: Path, seed: int, num_steps: int, say: Callable[[str], None]) -> bool:
    """Go on with the run of this file until it has made `num_steps` steps. Whether nothing was wrong.

    seed: of its first episode
    """
    report = FuzzReport.read(file, seed)
    with tempfile.TemporaryDirectory() as folder:
        models = TinyModels(Path(folder))
        while report.num_steps < num_steps:
            try:
                run_episode(models, report)
            except Exception:  # noqa: BLE001  (whatever is wrong is said)
                say(f"{report}\n{traceback.format_exc()}")
                return False
            report.write(file)
            if not report.seed % 10:
                say(f"seed {report.seed}: {report}")
    return True
