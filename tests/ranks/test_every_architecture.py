"""Two ranks answer with every architecture of mlx-lm what one process does, or refuse it by a sentence.

`refused_architectures.json` has for each split the sentences and the architectures that are refused by
them; one that it does not name must answer. A model that mlx-lm cannot divide has no `shard`, and is not
named there.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxserve.model.attention import choose_attention
from mlxserve.model.load import prepare
from mlxserve.system.machine import free_ports
from tests.model.test_every_architecture import ARCHITECTURES, build
from tests.ranks.architectures import SECONDS, SIZE, Answers, answers
from tests.ranks.child import ROOT

REFUSED = json.loads(Path(__file__).with_name("refused_architectures.json").read_text())
_OTHER_SECONDS = 3.0  # until the other rank has refused it as well, or waits for ever
SPLITS = ("heads", "layers")
_SAMPLE = "llama"
# A fast BLAS before mlx is imported.
_PROGRAM = """
from mlxserve.system import machine
machine.import_mlx_lm()
from tests.ranks.architectures import run_cases
run_cases()
"""


@dataclass(frozen=True)
class Outcome:
    """What the ranks made of an architecture: one of the two."""

    answers: Answers | None = None
    refusal: str | None = None


class Rank:
    """A process that runs case after case."""

    def __init__(self, rank: int, hostfile: Path) -> None:
        environment = {
            **os.environ,
            "MLX_RANK": str(rank),
            "MLX_HOSTFILE": str(hostfile),
            "MKL_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._log = hostfile.with_name(f"stderr-{rank}").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def begin(self, case: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()

    def result(self, seconds: float) -> dict[str, Any] | None:
        """None if it has ended, or says nothing for so long."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2_000:]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            stream.close()


class Pair:
    """Two ranks, replaced by new ones where they may be in the middle of a collective."""

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self._new_folder = new_folder
        self._ranks: list[Rank] = []

    def run(self, name: str, split: str) -> Outcome:
        """Raises AssertionError if they neither answer nor refuse."""
        if not self._ranks:
            self._start()
        port = free_ports(1)[0]
        for rank in self._ranks:
            rank.begin({"name": name, "split": split, "port": port})
        results = self._results()
        refusals = [found["refused"] for found in results if found and "refused" in found]
        logs = [rank.log() for rank in self._ranks]
        if not all(found and found.get("is_early", True) for found in results):
            self.end()
        if refusals:
            return Outcome(refusal=refusals[0])
        assert None not in results, "\n".join(logs)
        return Outcome(results[0]["answers"])  # type: ignore[index]

    def _results(self) -> list[dict[str, Any] | None]:
        """Of both ranks. One that refuses alone leaves the other one waiting for ever."""
        results: list[dict[str, Any] | None] = [None] * SIZE
        waiting, seconds = list(range(SIZE)), SECONDS
        while waiting and seconds > 0:
            for rank in tuple(waiting):
                if (found := self._ranks[rank].result(0.1)) is not None:
                    results[rank] = found
                    waiting.remove(rank)
                    seconds = min(seconds, _OTHER_SECONDS) if "refused" in found else seconds
            seconds -= 0.1
        return results

    def _start(self) -> None:
        hostfile = self._new_folder() / "hosts.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(SIZE)]))
        self._ranks = [Rank(rank, hostfile) for rank in range(SIZE)]

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks = []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(lambda: tmp_path_factory.mktemp("pair"))
    try:
        yield pair
    finally:
        pair.end()


@pytest.fixture(scope="module")
def alone() -> Callable[[str], Answers]:
    """What one process answers, computed once for both splits."""
    found: dict[str, Answers] = {}

    def of(name: str) -> Answers:
        if name not in found:
            model, config = build(name)
            found[name] = answers(choose_attention("auto", prepare(model, config, name)))
        return found[name]

    return of


def expected_refusal(name: str, split: str) -> str | None:
    module = importlib.import_module(f"mlx_lm.models.{name.split('.')[0]}")
    kind = ARCHITECTURES[name]["config"]["model_type"]
    if split == "heads" and not hasattr(module.Model, "shard"):
        return (
            f"{name}: {kind} models cannot be split by heads (mlx-lm has no `shard` for them). Use "
            "pipeline_parallel_size, which splits by layers."
        )
    sentences = [text for text, names in REFUSED[split].items() if name in names]
    return sentences[0].format(name=name, kind=kind) if sentences else None


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "name",
    [
        # One in `.ci/run`, so that it sees when the instrument itself is broken.
        pytest.param(name, marks=pytest.mark.slow if name == _SAMPLE else pytest.mark.ranks)
        for name in sorted(ARCHITECTURES)
    ],
)
def test_two_ranks_answer_what_one_process_does(
    name: str, split: str, pair: Pair, alone: Callable[[str], Answers]
) -> None:
    found = pair.run(name, split)
    assert found.refusal == expected_refusal(name, split)
    if found.answers is None:
        return
    wanted = alone(name)
    assert wanted["num_preemptions"] > 0
    for part, expected in wanted.items():
        if part == "logprobs":
            assert found.answers[part] == pytest.approx(expected, abs=5e-3)
        else:
            assert found.answers[part] == expected, part


def test_no_refusal_is_of_an_architecture_that_is_not_tested() -> None:
    assert REFUSED.keys() == set(SPLITS)
    for of_split in REFUSED.values():
        names = [name for names in of_split.values() for name in names]
        assert len(names) == len(set(names))
        assert ARCHITECTURES.keys() >= set(names)
