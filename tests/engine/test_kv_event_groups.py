"""KV events of models with windows and recurrent states: by their groups, a subscriber knows what the server has.

The subscriber below does what a router would: it follows the three kinds of events, and says for how much of a
prompt a server has the pages, the last window and the state. The server must find exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlxserve.build import build_engine
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.disk.tier import DiskTier
from mlxserve.hub.files import find_model
from mlxserve.request import Request
from tests.engine.test_kv_events import PAGE, free_addresses, replay

WINDOW = 24
LONG = 60.0
SPECS: dict[str, dict[int, tuple[str | None, int | None]]] = {
    "llama": {0: (None, None)},
    "gpt_oss": {0: ("full_attention", None), 1: ("sliding_window", WINDOW)},
    "qwen3_next": {0: ("full_attention", None), 1: ("mamba", None)},
    "gear": {0: ("full_attention", None), 1: ("sliding_window", WINDOW), 2: ("mamba", None)},
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {"num_window_pages": 12},
    "qwen3_next": {"num_state_slots": 12},
    "gear": {"num_window_pages": 12, "num_state_slots": 12},
}


@dataclass
class Subscriber:
    """What a router knows of one server, by medium and group."""

    next_number: int = 0
    names: dict[tuple[int | None, tuple[int, ...]], int] = field(default_factory=dict)
    held: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    specs: dict[int, tuple[str | None, int | None]] = field(default_factory=dict)
    num_removed: int = 0

    def read(self, address: str) -> None:
        """Follow what was published since the last call."""
        for number, (_, events, _) in replay(address, self.next_number):
            assert number == self.next_number
            self.next_number += 1
            for event in events:
                self._follow(event)

    def _follow(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
            return
        group = event.get("group_idx", 0)
        held = self.held.setdefault((event["medium"], group), set())
        if event["type"] == "BlockRemoved":
            assert held.issuperset(event["block_hashes"]), "a unit was removed that was not told of"
            held.difference_update(event["block_hashes"])
            self.num_removed += len(event["block_hashes"])
            return
        window = event.get("kv_cache_spec_sliding_window")
        self.specs[group] = event.get("kv_cache_spec_kind"), window
        parent, size = event["parent_block_hash"], event["block_size"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for index, name in enumerate(event["block_hashes"]):
            assert name not in held, "a unit was stored twice"
            held.add(name)
            self.names[parent, tuple(event["token_ids"][index * size : (index + 1) * size])] = name
            parent = name

    def num_found(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that the server can continue after; the last one is computed in any case."""
        chain: list[int] = []
        pages = self._held(0)
        for start in range(0, len(prompt) - PAGE, PAGE):
            parent = chain[-1] if chain else None
            name = self.names.get((parent, tuple(prompt[start : start + PAGE])))
            if name is None or name not in pages:
                break
            chain.append(name)
        while chain and not all(self._can_continue(group, chain) for group in self.specs if group):
            chain.pop()
        return len(chain) * PAGE

    def _held(self, group: int) -> set[int]:
        return set().union(*(names for (_, each), names in self.held.items() if each == group))

    def _can_continue(self, group: int, chain: list[int]) -> bool:
        kind, window = self.specs[group]
        if kind == "mamba":
            return chain[-1] in self._held(group)
        assert window is not None
        first = max(0, (len(chain) * PAGE - window + 1) // PAGE)
        return self._held(group).issuperset(chain[first:])


class Served:
    """A random model of one kind with few pages, and what a subscriber knows of it."""

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        address, self.replays = free_addresses(2)
        config = EngineConfig().with_options(
            model=str(folder),
            num_pages=24,
            page_size=PAGE,
            max_model_len=256,
            kv_events=address,
            kv_events_replay=self.replays,
            **SIZES[kind],
            **options,
        )
        self.engine = build_engine(config, find_model(str(folder)))[0]
        self.subscriber = Subscriber()
        self._num_asked = 0

    def ask(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return how many tokens of a prompt the subscriber expected, and how many were found."""
        self.subscriber.read(self.replays)
        expected = self.subscriber.num_found(prompt)
        params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
        self._num_asked += 1
        live = self.engine.add(Request(str(self._num_asked), tuple(prompt), params))
        while self.engine.has_work:
            self.engine.step()
        return expected, live.num_cached


def prompts() -> Iterator[list[int]]:
    """Conversations that go on, begin anew and branch, of up to 12 pages."""
    random = Random(5)
    talks: list[list[int]] = []
    for _ in range(30):
        if len(talks) < 3 or random.random() < 0.2:
            talks.append([])
        talk = talks[random.randrange(max(0, len(talks) - 4), len(talks))]
        if len(talk) > 150:
            talk = talk[: random.randrange(150)]
            talks.append(talk)
        talk += [random.randrange(3, 200) for _ in range(random.randrange(20, 60))]
        yield list(talk)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
def test_a_server_finds_what_a_subscriber_expects(
    kind: str, model_folder: Callable[[str], Path]
) -> None:
    served = Served(kind, model_folder(kind))
    num_found = 0
    try:
        for number, prompt in enumerate(prompts()):
            if number == 12:
                served.engine.restart()
            elif number == 20:
                assert served.engine.reset_prefix_cache()
            expected, found = served.ask(prompt)
            assert found == expected, number
            num_found += found
        served.subscriber.read(served.replays)
        late = Subscriber()
        late.read(served.replays)
        assert late.held == served.subscriber.held, "a replay tells the same"
        assert served.subscriber.specs == SPECS[kind]
        assert served.subscriber.num_removed > 0, "units are evicted"
        assert num_found > 400
        served.engine.check()
    finally:
        served.engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried_disk")
@pytest.mark.parametrize("kind", SPECS)
def test_units_on_disk_are_told_of_by_their_groups(
    kind: str,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiers: list[DiskTier] = []

    class Recorded(DiskTier):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            tiers.append(self)

    monkeypatch.setattr("mlxserve.build.DiskTier", Recorded)
    disk = {"disk_cache_size": 1, "disk_cache_dir": str(tmp_path)}
    served = Served(kind, model_folder(kind), **disk)
    num_from_disk = 0
    try:
        for number, prompt in enumerate(prompts()):
            expected, found = served.ask(prompt)
            assert found == expected, number
            while served.engine.idle():
                pass
            assert tiers[-1].flush(LONG)
            num_from_disk = served.engine.monitor.stats().disk.num_read
        assert num_from_disk > 5
        expected_groups = {(medium, group) for medium in ("GPU", "DISK") for group in SPECS[kind]}
        assert served.subscriber.held.keys() == expected_groups
    finally:
        served.engine.close()
