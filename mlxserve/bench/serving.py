"""Run a load on several servers in turn, and compare what the client measured.

All contenders run at the same time. In each round they get the same prompts one after another, so
that noise of the machine in a round affects all of them. The first round warms up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.bench import loads
from mlxserve.bench.client import LoadClient, TimedRequest, find_model
from mlxserve.bench.report import Figure, Report, quantile, ratios
from mlxserve.bench.servers import Contender, mlx_lm_server, our_server

# Counters of our server that explain a figure.
_COUNTERS = (
    "num_preemptions",
    "recomputed_tokens",
    "swapped_tokens",
    "restored_tokens",
    "prefix_follow_waits",
    "overtakes",
)
MLX_LM = "mlx-lm"  # address that starts mlx-lm's server on the same files


@dataclass(frozen=True, slots=True)
class Variant:
    """Our server with some options, and its name in the tables."""

    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """A load and the variants it compares; ratios are the first variant's over each other one's."""

    name: str
    play: loads.Play
    variants: tuple[Variant, ...]
    about: str
    ratios: loads.Ratios = lambda _: {}
    model: str = "synthetic:llama-100m"


_ON, _OFF = Variant("mlxserve"), Variant("without cache", ("--no-enable-prefix-caching",))
_FEW_PAGES = ("--num-pages", "40")  # the answers of `preempt` end with 100

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "prefix",
            loads.prefix,
            (_ON, _OFF),
            "Prompts that share a prefix, with and without the cache.",
        ),
        Workload(
            "admission",
            loads.admission,
            tuple(
                Variant(variant.name, (*variant.options, "--num-pages", "64"))
                for variant in (_ON, _OFF)
            ),
            "Prompts of 16 pages, 12 of them cached, in a pool of 64 pages.",
        ),
        Workload(
            "chunked",
            loads.chunked,
            (
                _ON,
                Variant("no time target", ("--itl-target-ms", "0")),
                Variant(
                    "no chunks",
                    (
                        "--no-enable-chunked-prefill",
                        "--max-num-batched-tokens",
                        "4096",
                        "--max-model-len",
                        "4096",
                    ),
                ),
            ),
            "Running answers while a long prompt is computed.",
        ),
        Workload(
            "aligned",
            loads.prefix,
            (_ON, Variant("unaligned", ("--no-page-aligned-scheduling",))),
            "Chunks that end at page boundaries, and chunks that end anywhere.",
        ),
        Workload(
            "preempt",
            loads.preempt,
            (
                Variant(
                    "swap",
                    (*_FEW_PAGES, "--preemption-mode", "swap", "--disk-cache-size", "4"),
                ),
                Variant("recompute", _FEW_PAGES),
                Variant("enough pages"),
            ),
            "More answers than fit into memory.",
        ),
        Workload("chat", loads.chat, (_ON, _OFF), "Growing conversations."),
        Workload("agents", loads.agents, (_ON, _OFF), "An agent's calls and a fan-out."),
        Workload(
            "siblings",
            loads.siblings,
            (_ON, _OFF),
            "Cold prompts that share a long prefix, compared with one alone.",
            loads.siblings_ratios,
        ),
        Workload(
            "again", loads.again, (_ON, _OFF), "The same prompt repeated.", loads.again_ratios
        ),
        Workload(
            "beside",
            loads.beside,
            (_ON,),
            "A running answer while a short prompt arrives, then a long one.",
            loads.beside_ratios,
        ),
        Workload(
            "lengths",
            loads.lengths,
            (_ON,),
            "Cold prompts of 300 to 3,000 tokens: their first tokens, and how they grow.",
            loads.lengths_ratios,
        ),
        Workload(
            "answers",
            loads.answers,
            (_ON,),
            "1, 4 and 16 answers at once, and 16 on one prefix.",
            loads.answers_ratios,
        ),
        Workload(
            "edit",
            loads.edit,
            (Variant("drafts", ("--speculative-tokens", "16")), Variant("no drafts")),
            "An answer that repeats its prompt with changes, with and without drafts.",
            loads.edit_ratios,
            model="synthetic:counting-100m",
        ),
        Workload(
            "drafts",
            loads.drafts,
            (
                Variant("drafts", ("--speculative-tokens", "16")),
                Variant("no drafts"),
                Variant("no drafts, again"),
            ),
            "Answers that copy and new ones, 1 to 4 at once, with and without drafts, and without again.",
            loads.drafts_ratios,
            model="synthetic:counting-100m",
        ),
    )
}


def bench_serving(
    workload: Workload,
    model: str,
    *,
    against: Sequence[str] = (),
    pairs: int,
    size: float,
    num_pages: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Play the load `pairs` times on each contender. Raises ServerFailed."""
    with contextlib.ExitStack() as stack:
        servers = []
        for contender in contenders(workload.variants, model, against, num_pages).values():
            progress("starting servers")
            servers.append(stack.enter_context(contender))
        played = asyncio.run(play_rounds(workload, servers, pairs, size, progress))
    settings = {"model": Path(model).name, "pairs": pairs, "size": size}
    runs = {who: [each.figures for each in rounds] for who, rounds in played.items()}
    return Report(workload.name, settings, tuple(figures(runs)))


def contenders(
    variants: Sequence[Variant], model: str, against: Sequence[str], num_pages: int
) -> dict[str, AbstractContextManager[Contender]]:
    """Return what starts or finds each server, by its name in the tables."""
    servers: dict[str, AbstractContextManager[Contender]] = {}
    for variant in variants:
        options = variant.options
        if "--num-pages" not in options:
            options = (*options, "--num-pages", str(num_pages))
        servers[variant.name] = our_server(variant.name, model, options)
    for address in against:
        servers[address] = mlx_lm_server(model) if address == MLX_LM else _running(address)
    return servers


@contextlib.contextmanager
def _running(url: str) -> Iterator[Contender]:
    yield Contender(url, url, asyncio.run(find_model(url)))


Runs = dict[str, list[dict[str, float]]]  # contender -> rounds -> figure -> value


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """The measurements of one load on one server. `failure` is its requests' first error."""

    figures: dict[str, float]
    failure: str | None


async def play_rounds(
    workload: Workload,
    servers: Sequence[Contender],
    pairs: int,
    size: float,
    progress: Callable[[str], None],
    *,
    warm_up: float = 1.0,
) -> dict[str, list[PlayedRound]]:
    """Play the workload on each server in each round; the warm-up round is left out.

    warm_up: the size of the warm-up round, relative to `size`
    """
    played: dict[str, list[PlayedRound]] = {server.name: [] for server in servers}
    for number in range(pairs + 1):
        for server in servers:
            progress(f"round {number} of {pairs}: {server.name}")
            draw = random.Random(f"{workload.name}/{number}")
            run = await _play(workload, server, draw, size if number else warm_up * size)
            if number:
                played[server.name].append(run)
    return played


async def _play(
    workload: Workload, server: Contender, draw: random.Random, size: float
) -> PlayedRound:
    async with LoadClient(server.url, server.model) as client:
        before = {name: await client.metric(f"mlxserve:{name}_total") for name in _COUNTERS}
        await workload.play(loads.LoadContext(client, draw, size))
        measured = measure(client.requests, workload.ratios)
        for name, value in before.items():
            measured[name] = await client.metric(f"mlxserve:{name}_total") - value
    errors = (request.error for request in client.requests if request.error is not None)
    return PlayedRound(measured, next(errors, None))


def measure(
    requests: Sequence[TimedRequest], of_load: loads.Ratios = lambda _: {}
) -> dict[str, float]:
    """Compute milliseconds, and rates from the first request to the last answer.

    `of_load` adds the load's own ratios, unless a request failed.
    """
    done = [request for request in requests if request.error is None]
    seconds = max(e.ended for e in requests) - min(e.started for e in requests)
    gaps = [1e3 * gap for request in done for gap in request.gaps]
    num_prompt = sum(request.num_prompt for request in done)
    by_name = {
        "requests/s": len(done) / seconds,
        "prompt tokens/s": num_prompt / seconds,
        "answer tokens/s": sum(request.num_completion for request in done) / seconds,
        "gap p50, ms": quantile(gaps, 0.5),
        "gap p99, ms": quantile(gaps, 0.99),
        "gap max, ms": max(gaps, default=math.nan),
        "cached share": sum(request.num_cached for request in done) / max(num_prompt, 1),
        "errors": float(len(requests) - len(done)),
    }
    for label in dict.fromkeys(request.label for request in done):
        ttfts = [1e3 * request.ttft for request in done if request.label == label]
        name = f"first token, {label}" if label else "first token"
        by_name[f"{name} p50, ms"] = quantile(ttfts, 0.5)
    return by_name | (of_load(requests) if len(done) == len(requests) else {})


def figures(runs: Runs) -> Iterator[Figure]:
    """Each figure of every contender, then its ratios: the first contender's over each other's."""
    first, *others = runs
    names = dict.fromkeys(name for rounds in runs.values() for run in rounds for name in run)
    for name in names:
        values = {who: tuple(run.get(name, math.nan) for run in runs[who]) for who in runs}
        if not _is_informative(values):
            continue
        for who in runs:
            yield Figure(name, "", values[who], who)
        for other in others:
            if all(value > 0 for value in (*values[first], *values[other])):
                yield Figure(name, "", ratios(values[first], values[other]), f"÷ {other}")


def _is_informative(values: dict[str, tuple[float, ...]]) -> bool:
    """False for counters that are 0 or missing in all contenders."""
    flat: list[Any] = [value for each in values.values() for value in each]
    return any(not math.isnan(value) and value != 0 for value in flat)
