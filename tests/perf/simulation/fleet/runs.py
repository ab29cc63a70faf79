"""The runs of the plot: each policy, with and without a store, over numbers of servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tests.perf.simulation.fleet.fleet import FleetConfig, FleetResult, FleetSimulation

SIZES = (1, 3, 10, 30, 100, 300, 1000)
LINK = 1.1e9  # bytes per second of 10 Gb/s Ethernet
# (policy, whether there is a store)
LINES = (
    ("round_robin", False),
    ("round_robin", True),
    ("cache_aware", False),
    ("consistent_hash", False),
    ("kv_aware", False),
    ("kv_aware", True),
    ("kv_aware, sessions", False),
    ("kv_aware, sessions", True),
)


def configs(sizes: Sequence[int], seconds: float, seed: int) -> Iterator[FleetConfig]:
    """Yield the runs; half of `seconds` more is simulated before, to warm up."""
    for policy, has_store in LINES:
        for size in sizes:
            yield FleetConfig(
                policy,
                size,
                LINK if has_store else None,
                warm_up=seconds / 2,
                seconds=seconds,
                seed=seed,
            )


def run_all(
    sizes: Sequence[int], seconds: float, seed: int, progress: Callable[[str], None]
) -> list[FleetResult]:
    results = []
    for config in configs(sizes, seconds, seed):
        progress(f"{config.label}, {config.num_servers} servers")
        results.append(FleetSimulation(config).run())
    return results
