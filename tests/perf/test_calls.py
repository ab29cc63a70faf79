"""The functions of a decode step are counted where they are ours, and on a step of decodes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mlxserve.cache.pages import PagePool
from tests.perf import calls, host

SMALL = {
    **host.GEOMETRIES["qwen3"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 640,
}


def test_only_our_functions_are_counted_and_comprehensions_belong_to_theirs() -> None:
    pool = PagePool(4, 2)

    def work() -> None:
        assert sorted([len(text) for text in ("a", "b")]) == [1, 1]
        pool.num_idle([])
        pool.num_idle(int(text) for text in "")

    found = calls.calls_of(work, warm_up=2)
    assert calls.functions(found) == {"mlxserve/cache/pages.py PagePool.num_idle": 2}
    assert calls.by_file(found) == {"mlxserve/cache/pages.py": 2}


_TRACE = "import json; from tests.perf import calls; print(json.dumps(calls.functions(calls.engine_calls())))"


@pytest.mark.slow
def test_a_step_of_the_engine_is_planned_computed_and_committed_once() -> None:
    # In a process of its own: what other tests have installed in mlx would be entered as well.
    run = subprocess.run(
        [sys.executable, "-c", _TRACE], cwd=calls.ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    assert len(found) <= 150, "\n".join(sorted(found))
    once = ("engine/engine.py Engine.step", "model/runner.py ModelRunner.launch")
    assert [found[f"mlxserve/{name}"] for name in once] == [1, 1]
    commits = [name for name in found if name.endswith("Scheduler.update")]
    assert [found[name] for name in commits] == [1]


@pytest.mark.usefixtures("compiled")
def test_a_recorded_step_enters_the_model_for_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for num_layers in (1, 3):
        geometry = {**SMALL, "num_hidden_layers": num_layers}
        monkeypatch.setattr(host, "GEOMETRIES", {"qwen3": geometry})
        found.append(calls.functions(calls.recorded_calls()))
    few, more = found
    assert few.keys() == more.keys()
    assert not [name for name in few if "LayerKV" in name]
