"""Which defaults hold: change one option at a time, and compare with the defaults on equal sessions.

The verdict rests on the differences of paired runs with the same seed, and their standard error
over seeds. A single run proves nothing: with one seed, options without effect have shown 30 %.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mlxserve.bench.report import quantile
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from tests.perf.simulation.costs import CostModel
from tests.perf.simulation.simulator import Simulation, SimulationResult
from tests.perf.simulation.workloads import Scenario

# A difference counts if it is at least this many standard errors and this share of the default.
MIN_ERRORS = 3.0
MIN_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a run; lower is better unless `is_higher_better`."""

    name: str
    unit: str
    of: Callable[[SimulationResult], float]
    floor: float  # smaller differences do not matter
    is_higher_better: bool = False


METRICS = (
    Metric("makespan", "s", lambda r: r.makespan, 1.0),
    Metric("TTFT p50", "s", lambda r: quantile([x.first_token for x in r.records], 0.5), 0.05),
    Metric("TTFT p95", "s", lambda r: quantile([x.first_token for x in r.records], 0.95), 0.05),
    Metric("TTFT p99", "s", lambda r: quantile([x.first_token for x in r.records], 0.99), 0.05),
    Metric("max ITL p95", "s", lambda r: quantile([x.longest_gap for x in r.records], 0.95), 0.02),
    Metric("recomputed", "tokens", lambda r: float(r.recomputed_tokens), 1000.0),
    Metric("preemptions", "", lambda r: float(r.preemptions), 1.0),
    Metric("hit rate", "%", lambda r: 100 * r.hit_rate, 0.5, True),
)


@dataclass(frozen=True, slots=True)
class OptionVariant:
    """One option changed from its default."""

    option: str
    value: Any

    @property
    def name(self) -> str:
        return f"{self.option} {self.value}"

    def of(self, base: EngineConfig, scenario: Scenario) -> EngineConfig:
        changed: dict[str, Any] = {self.option: self.value}
        if self.option == "enable_chunked_prefill" and not self.value:
            changed["max_num_batched_tokens"] = scenario.max_context  # a whole prompt per step
        return base.with_options(**changed)


DEFAULTS = EngineConfig()
VARIANTS = (
    OptionVariant("page_aligned_scheduling", False),
    OptionVariant("long_prefill_token_threshold", 0),
    OptionVariant("long_prefill_token_threshold", 256),
    OptionVariant("long_prefill_token_threshold", 1024),
    OptionVariant("max_num_batched_tokens", 512),
    OptionVariant("max_num_batched_tokens", 1024),
    OptionVariant("max_num_batched_tokens", 4096),
    OptionVariant("max_num_seqs", 4),
    OptionVariant("max_num_seqs", 16),
    OptionVariant("max_num_seqs", 256),
    OptionVariant("itl_target_ms", 0.0),
    OptionVariant("itl_target_ms", 250.0),
    OptionVariant("itl_target_ms", 1000.0),
    OptionVariant("page_size", 16),
    OptionVariant("page_size", 64),
    OptionVariant("enable_chunked_prefill", False),
    OptionVariant("enable_prefix_caching", False),
    OptionVariant("prefix_follow_pages", 10_000),  # no request waits for another's prefix
    OptionVariant("growth_pages", 0),
    OptionVariant("growth_pages", 8),
    OptionVariant("hot_after_hits", 10_000),  # plain least recently used
)


def find_variants(options: Sequence[str] | None) -> tuple[OptionVariant, ...]:
    """The variants of these options, or all. Raises InvalidConfig, which lists the options."""
    known = dict.fromkeys(variant.option for variant in VARIANTS)
    if unknown := [option for option in options or () if option not in known]:
        raise InvalidConfig(f"{unknown[0]!r} is not varied; choose from {', '.join(known)}")
    return tuple(v for v in VARIANTS if not options or v.option in options)


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric under a variant minus the same under the defaults: mean and standard error."""

    metric: Metric
    default: float
    mean: float
    error: float

    @property
    def is_real(self) -> bool:
        size = abs(self.mean)
        least = max(self.metric.floor, MIN_SHARE * abs(self.default))
        return size >= least and size >= MIN_ERRORS * self.error

    @property
    def is_better(self) -> bool:
        return self.is_real and (self.mean > 0) == self.metric.is_higher_better

    @property
    def is_worse(self) -> bool:
        return self.is_real and not self.is_better

    def text(self) -> str:
        shown = f"{_short(self.mean, sign=True)}\n±{_short(self.error)}"
        if self.is_better:
            return f"[green]{shown}[/green]"
        return f"[red]{shown}[/red]" if self.is_real else f"[dim]{shown}[/dim]"

    def brief(self) -> str:
        if self.default and abs(self.mean) < 2 * abs(self.default):
            return f"{self.metric.name} {self.mean / self.default:+.0%}"
        return f"{self.metric.name} {_short(self.mean, sign=True)} {self.metric.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One variant on one workload."""

    variant: OptionVariant
    differences: tuple[Difference, ...]

    def verdict(self) -> str:
        better = [d for d in self.differences if d.is_better]
        worse = [d for d in self.differences if d.is_worse]
        if better and worse:
            return "a trade"
        if better:
            return "better"
        return "worse" if worse else "no difference"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All variants on one workload."""

    scenario: Scenario
    seeds: int
    num_requests: int  # of one run
    defaults: tuple[float, ...]  # mean of every metric
    outcomes: tuple[Outcome, ...]

    def show(self, console: Console) -> None:
        title = (
            f"{self.scenario.name}: {self.num_requests} requests, {self.scenario.num_slots} slots, "
            f"KV cache of {self.scenario.pool_tokens:,} tokens; differences of {self.seeds} paired "
            "runs, ± standard error"
        )
        # Two lines per cell, so that eight metrics fit into 80 columns.
        table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0, 0, 1))
        # Fold in narrow terminals: an ellipsis would hide digits.
        first, others = (9, 7) if console.width < 100 else (None, None)
        table.add_column("", overflow="fold", width=first)
        for metric in METRICS:
            heading = f"{metric.name}\n{metric.unit}".rstrip()
            table.add_column(heading, justify="right", overflow="fold", width=others)
        table.add_row("defaults", *map(_short, self.defaults), end_section=True)
        for outcome in self.outcomes:
            # With spaces, so that the line can break.
            name = f"{outcome.variant.option.replace('_', ' ')}\n{outcome.variant.value}"
            table.add_row(name, *(d.text() for d in outcome.differences))
        console.print(table)

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.scenario.name,
            "seeds": self.seeds,
            "requests": self.num_requests,
            "pool_tokens": self.scenario.pool_tokens,
            "defaults": {m.name: v for m, v in zip(METRICS, self.defaults, strict=True)},
            "variants": [
                {
                    "option": outcome.variant.option,
                    "value": outcome.variant.value,
                    "verdict": outcome.verdict(),
                    "differences": {
                        d.metric.name: {"mean": d.mean, "error": d.error}
                        for d in outcome.differences
                    },
                }
                for outcome in self.outcomes
            ],
        }


def compare(
    scenario: Scenario,
    cost: CostModel,
    *,
    num_requests: int,
    seeds: int,
    variants: Sequence[OptionVariant] = VARIANTS,
    base: EngineConfig = DEFAULTS,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Run the defaults and every variant on the same workloads, one per seed."""

    def run(config: EngineConfig, name: str) -> list[SimulationResult]:
        results = []
        for seed in range(seeds):
            progress(f"{scenario.name}, {name}, seed {seed + 1} of {seeds}")
            results.append(simulate(scenario, config, cost, seed, num_requests))
        return results

    reference = run(base, "defaults")
    outcomes = []
    for variant in variants:
        results = run(variant.of(base, scenario), variant.name)
        outcomes.append(Outcome(variant, tuple(_differences(reference, results))))
    return Comparison(
        scenario=scenario,
        seeds=seeds,
        num_requests=round(statistics.fmean(len(r.records) for r in reference)),
        defaults=tuple(statistics.fmean(map(metric.of, reference)) for metric in METRICS),
        outcomes=tuple(outcomes),
    )


def simulate(
    scenario: Scenario,
    config: EngineConfig,
    cost: CostModel,
    seed: int,
    num_requests: int,
    *,
    jumps: bool = True,
) -> SimulationResult:
    """One run."""
    return simulation(scenario, config, cost, seed, num_requests, jumps=jumps).run()


def simulation(
    scenario: Scenario,
    config: EngineConfig,
    cost: CostModel,
    seed: int,
    num_requests: int,
    *,
    jumps: bool = True,
    num_background: int = 0,
) -> Simulation:
    """A run that has not started. With `num_background` slots of background work it does not jump."""
    # No request is refused, or variants would differ in their work.
    patient = config.with_options(max_num_waiting=1_000_000, max_model_len=scenario.max_context)
    workload = scenario.make(seed=seed, num_requests=num_requests, cost=cost)
    workload.num_background = num_background
    num_pages = scenario.pool_tokens // config.page_size
    return Simulation(patient, num_pages, cost, workload, jumps=jumps and not num_background)


def _differences(
    reference: Sequence[SimulationResult], results: Sequence[SimulationResult]
) -> Iterator[Difference]:
    for metric in METRICS:
        default = [metric.of(result) for result in reference]
        pairs = [metric.of(r) - d for r, d in zip(results, default, strict=True)]
        error = statistics.stdev(pairs) / math.sqrt(len(pairs))
        yield Difference(metric, statistics.fmean(default), statistics.fmean(pairs), error)


def show_verdicts(comparisons: Sequence[Comparison], console: Console) -> None:
    """One row per variant: the verdict on its default, and what got better and worse."""
    table = Table(title="Are the defaults supported?", title_justify="left")
    for column in ("changed to", "verdict", "better", "worse"):
        table.add_column(column)
    for index, outcome in enumerate(comparisons[0].outcomes):
        rows = [(c.scenario.name, c.outcomes[index]) for c in comparisons]
        verdicts = {o.verdict() for _, o in rows}
        table.add_row(
            outcome.variant.name,
            overall(verdicts),
            *(
                "\n".join(filter(None, (_line(name, o, better) for name, o in rows)))
                for better in (True, False)
            ),
        )
    console.print(table)


def overall(verdicts: set[str]) -> str:
    """The verdict on a default, from those of one variant on several workloads."""
    if verdicts <= {"no difference"}:
        return "no difference"
    if verdicts <= {"no difference", "better"}:
        return "not supported"
    if verdicts <= {"no difference", "worse"}:
        return "supported"
    return "a trade"


def _line(name: str, outcome: Outcome, better: bool) -> str:
    shown = [d.brief() for d in outcome.differences if d.is_real and d.is_better == better]
    return f"{name}: {', '.join(shown)}" if shown else ""


def write_json(
    file: Path, cost: CostModel, machine: Mapping[str, str], comparisons: Sequence[Comparison]
) -> None:
    content = {
        "cost": asdict(cost),
        "machine": machine,
        "workloads": [comparison.as_json() for comparison in comparisons],
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _short(value: float, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    if abs(value) >= 1e6:
        return f"{value / 1e6:{plus}.1f}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:{plus}.0f}k"
    if abs(value) < 1:
        return f"{round(value, 3):{plus}g}"  # finer than any metric's floor
    return f"{value:{plus}.3g}" if abs(value) < 1000 else f"{value:{plus}.0f}"
