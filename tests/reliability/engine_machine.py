"""The engine under every order of events: a state machine over whole engines, judged by `EngineUnderTest`.

`python -m tests.reliability engine --steps 300000` runs it at length, and goes on where it was stopped.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlxserve import SamplingParams
from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pages import PagePool
from mlxserve.chat.request_options import RequestOptions
from mlxserve.disk.tier import DiskTier
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
        *(ModelRunner, PagePool, WindowPages, StateSlots, DiskTier, DiskCache, DiskPages),
        *(Scheduler, PageTables, Pins, Moves, StepPlanner, Preemption, Roster, Transfers),
        *(Engine, Timeline, StepTimeModel),
    )
    # Not called while requests are served: at the end.
    for point in points_of(owner, but=frozenset({"close", "abort_all"}))
]
# Other events between two of these: a restart takes as long as 20 steps, and a fault needs some to happen.
RARE = {"restart": 80, "plant": 8, "drain": 30}
ERRORS = (RuntimeError, MemoryError, OSError)
CLIENTS = st.sampled_from(["", "a", "a", "b"])
SALTS = st.sampled_from([None, None, None, "salt"])
NAMES = st.sampled_from(["p", "q", "r", "s"])


def prompt_of(branch: int, num_tokens: int) -> Tokens:
    """Prompts of one branch begin alike; all of them share their first page."""
    ids = [5 + place % 7 for place in range(PAGE_SIZE)]
    ids += [20 + (3 * place + 11 * branch) % 40 for place in range(num_tokens)]
    return tuple(ids[:num_tokens])


prompts = st.builds(
    prompt_of,
    st.integers(0, 3),
    st.sampled_from([1, 7, 15, 16, 17, 31, 32, 33, 40, 48, 49, 64, 65, 80, LONGEST]),
)
suffixes = st.builds(prompt_of, st.integers(0, 1), st.sampled_from([1, 16, 23]))
sizes = st.fixed_dictionaries(
    {
        "num_pages": st.integers(10, 40),
        "num_spare_windows": st.integers(0, 12),
        "num_spare_slots": st.integers(0, 8),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.sampled_from([16, 32, 40, 96, 256]),
    }
)
configurations = st.fixed_dictionaries(
    {
        "max_pinned_fraction": st.sampled_from([0.25, 0.5, 1.0]),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "page_tail": st.sampled_from(["copy", "recompute"]),
        "speculative_tokens": st.sampled_from([0, 0, 5]),
        "growth_pages": st.sampled_from([0, 2]),
        "hot_after_hits": st.sampled_from([1, 2]),
        "preempt_for_priority_ms": st.sampled_from([0, 5, 1000]),
        "ageing_steps": st.sampled_from([5, 1000]),
        "max_num_waiting": st.sampled_from([4, 1000]),
        "prefix_follow_pages": st.sampled_from([1, 4]),
    }
)


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
    """What a run has done so far; a file of it is where the next one goes on."""

    seed: int = 0  # of the next round
    num_steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, engine: EngineUnderTest) -> None:
        stats = engine.chat.engine.stats()
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
    def read(cls, file: Path) -> FuzzReport:
        if not file.exists():
            return cls()
        fields = json.loads(file.read_text())
        return cls(fields["seed"], fields["num_steps"], Counter(fields["counts"]))


class EngineMachine(RuleBasedStateMachine):
    """Every rule ends between two steps."""

    def __init__(self, models: TinyModels, report: FuzzReport, names: tuple[str, ...]) -> None:
        super().__init__()
        self.models, self.report, self.names = models, report, names
        self.events: list[str] = []
        self.due = dict(RARE)
        self.folder = tempfile.TemporaryDirectory()

    @initialize(data=st.data(), options=configurations, numbers=sizes, has_disk=st.booleans())
    def build(
        self, data: st.DataObject, options: dict, numbers: dict, has_disk: bool
    ) -> None:
        self.model = data.draw(st.sampled_from(self.names))
        self.configuration = options | {"preemption_mode": "recompute"} if not has_disk else options
        self.has_disk = has_disk
        self.disk_size = data.draw(st.sampled_from([0.00005, 0.01])) if has_disk else 0
        folder, reference = self.models.get(self.model)
        self.events.append(f"build {self.model} {self.options(numbers)}")
        self.engine = EngineUnderTest(folder, reference, MAX_MODEL_LEN, self.options(numbers))

    def options(self, numbers: dict) -> dict[str, Any]:
        num_spare_windows, num_spare_slots = (
            numbers["num_spare_windows"],
            numbers["num_spare_slots"],
        )
        sizes = {k: v for k, v in numbers.items() if not k.startswith("num_spare")}
        seats = sizes["max_num_seqs"]
        sizes["max_num_batched_tokens"] = max(seats, sizes["max_num_batched_tokens"])
        if "windows" in self.model:
            sizes["num_window_pages"] = Window(WINDOW, PAGE_SIZE).num_held + num_spare_windows
        if "states" in self.model:
            sizes["num_state_slots"] = STATE_SLOTS * seats + num_spare_slots
        disk = {"disk_cache_dir": self.folder.name} if self.has_disk else {}
        return {
            **self.configuration,
            **sizes,
            **disk,
            "disk_cache_size": self.disk_size,
            "page_size": PAGE_SIZE,
        }

    def do(self, event: str, work: Any) -> None:
        """Run a rule; if it fails, say what led to it."""
        self.events.append(event)
        try:
            self.engine.run(work)
        except BaseException as error:
            error.add_note("\n".join(["events:", *self.events]))
            raise

    def is_due(self, event: str) -> bool:
        """Whether a rare event may happen again."""
        return len(self.events) >= self.due[event]

    def has_been(self, event: str) -> None:
        self.due[event] = len(self.events) + RARE[event]

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, MAX_TOKENS),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        client=CLIENTS,
        salt=SALTS,
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        skips=st.sampled_from([False, False, False, True]),
    )
    def ask(
        self,
        prompt: Tokens,
        max_tokens: int,
        n: int,
        client: str,
        salt: str | None,
        priority: int,
        skips: bool,
    ) -> None:
        options = RequestOptions(
            client=client, cache_salt=salt, priority=priority, skip_prefix_cache=skips
        )
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n)
        self.do(
            f"ask {len(prompt)} {prompt[-1]} max {max_tokens} n {n} {options}",
            self.engine.ask(prompt, params, options),
        )

    @precondition(lambda self: self.engine.prefixes)
    @rule(data=st.data(), suffix=suffixes, max_tokens=st.integers(1, MAX_TOKENS), client=CLIENTS)
    def ask_with_prefix(
        self, data: st.DataObject, suffix: Tokens, max_tokens: int, client: str
    ) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.prefixes)))
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        options = RequestOptions(client=client, prefix_name=name)
        self.do(
            f"ask {suffix} max {max_tokens} with prefix {name}",
            self.engine.ask(suffix, params, options),
        )

    @precondition(lambda self: self.engine.ended)
    @rule(data=st.data(), suffix=suffixes, max_tokens=st.integers(1, MAX_TOKENS))
    def continue_chat(self, data: st.DataObject, suffix: Tokens, max_tokens: int) -> None:
        prompt, answer = data.draw(st.sampled_from(self.engine.ended))
        prompt = prompt + answer + suffix
        if len(prompt) > 2 * LONGEST:
            return
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.do(
            f"continue {len(prompt)} max {max_tokens}",
            self.engine.ask(prompt, params, RequestOptions()),
        )

    @precondition(lambda self: self.engine.pending)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.engine.pending) - 1))
        self.do(f"cancel {number}", self.engine.cancel(self.engine.pending[number]))

    @rule(steps=st.sampled_from([1, 2, 5, 12, 40]))
    def turn(self, steps: int) -> None:
        self.do(f"turn {steps}", self.engine.turn(steps))

    @rule(
        name=NAMES,
        prompt=prompts,
        client=CLIENTS,
        salt=SALTS,
        share=st.sampled_from([0.25, 0.5, 0.5, 1.0]),
    )
    def add_prefix(
        self, name: str, prompt: Tokens, client: str, salt: str | None, share: float
    ) -> None:
        if name in self.engine.adding or "every name" in self.engine.adding:
            return
        self.do(
            f"add prefix {name} {len(prompt)} {prompt[-1]} of {client!r} salt {salt} share {share}",
            self.engine.add_prefix(name, AskedPrefix(prompt, salt), client, share),
        )

    @precondition(lambda self: self.engine.prefixes)
    @rule(data=st.data())
    def remove_prefix(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.prefixes)))
        if "every name" not in self.engine.adding:
            self.do(f"remove prefix {name}", self.engine.remove_prefix(name))

    @rule(num_pages=st.integers(2, 40))
    def resize(self, num_pages: int) -> None:
        self.do(f"resize {num_pages}", self.engine.resize(num_pages))

    @rule(num_fewer=st.integers(-3, 6))
    def resize_a_little(self, num_fewer: int) -> None:
        num_pages = max(2, self.engine.num_pages - num_fewer)
        self.do(f"resize {num_pages}", self.engine.resize(num_pages))

    @rule(force=st.booleans(), disk=st.booleans())
    def reset(self, force: bool, disk: bool) -> None:
        self.do(f"reset force {force} disk {disk}", self.engine.reset(force=force, disk=disk))

    @rule(prompt=prompts)
    def forget(self, prompt: Tokens) -> None:
        self.do(f"forget {len(prompt)} {prompt[-1]}", self.engine.forget([prompt]))

    @rule(share=st.sampled_from([0.1, 0.1, 0.94, 0.99]))
    def press_memory(self, share: float) -> None:
        self.do(f"memory {share}", self.engine.press_memory(share))

    @precondition(lambda self: self.is_due("plant"))
    @rule(
        point=st.sampled_from(POINTS),
        at=st.sampled_from([0, 0, 0, 1, 3, 8]),
        error=st.sampled_from(ERRORS),
    )
    def plant(self, point: Point, at: int, error: type[Exception]) -> None:
        self.has_been("plant")
        fault = Fault(point, lambda: error("planted"), at)
        self.events.append(f"plant {fault}")
        self.engine.plant(fault)

    @precondition(lambda self: self.has_disk and self.is_due("restart"))
    @rule(numbers=sizes)
    def restart(self, numbers: dict) -> None:
        self.has_been("restart")
        self.do(f"restart {numbers}", self.engine.restart(self.options(numbers)))

    @precondition(lambda self: self.is_due("drain"))

    @rule()
    def drain(self) -> None:
        self.has_been("drain")
        self.do("drain", self.engine.drain())

    def teardown(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is None:
            return
        try:
            self.do("drain at the end", engine.drain())
            self.report.add(engine)
        finally:
            engine.close()
            self.folder.cleanup()


@contextmanager
def _no_constants() -> Iterator[None]:
    """Hypothesis also draws numbers that it finds in the project's loaded modules: with it, what is searched
    would depend on which other tests were imported before."""
    draw = HypothesisProvider._maybe_draw_constant
    HypothesisProvider._maybe_draw_constant = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        HypothesisProvider._maybe_draw_constant = draw  # type: ignore[method-assign]


def run_round(
    models: TinyModels,
    report: FuzzReport,
    *,
    examples: int,
    rules: int,
    names: tuple[str, ...] = tuple(MODELS),
) -> None:
    """Run `examples` engines under up to `rules` events each, which follow from the report's seed."""

    @hypothesis.seed(report.seed)
    def machine() -> EngineMachine:
        return EngineMachine(models, report, names)

    with _no_constants():
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=rules,
                deadline=None,
                database=None,
                derandomize=False,
                phases=[Phase.generate],  # each takes long, and an engine's threads have their own order
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    report.seed += 1


def fuzz(file: Path, num_steps: int, say: Callable[[str], None]) -> bool:
    """Go on with the run of this file until it has made `num_steps` steps. Whether nothing was wrong."""
    report = FuzzReport.read(file)
    with tempfile.TemporaryDirectory() as folder:
        models = TinyModels(Path(folder))
        while report.num_steps < num_steps:
            try:
                run_round(models, report, examples=6, rules=400)
            except Exception:
                say(f"round {report.seed}\n{traceback.format_exc()}")
                return False
            report.write(file)
            say(f"round {report.seed}: {report}")
    return True
