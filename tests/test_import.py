"""What importing the package loads; each test runs in a new process."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_mlxserve_does_not_import_mlx() -> None:
    heavy = "{'mlx', 'mlx.core', 'mlx_lm', 'numpy', 'transformers'}"
    assert run(f"import mlxserve, sys; print({heavy} & set(sys.modules))") == "set()"


def test_a_star_import_imports_the_public_names_and_other_names_are_missing() -> None:
    code = (
        "from mlxserve import *; import mlxserve; "
        "print(all(getattr(mlxserve, n) is not None for n in mlxserve.__all__), LLM.__name__, "
        "issubclass(QueueFull, MlxServeError), hasattr(mlxserve, 'nothing'))"
    )
    assert run(code) == "True LLM True False"


def test_modules_used_before_a_model_is_loaded_do_not_import_mlx() -> None:
    modules = ["llm", "chat", "cli.commands", "api.app", "bench.cli"]
    code = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module('mlxserve.' + name)\n"
        "    assert 'mlx.core' not in sys.modules, name"
    )
    assert run(code) == ""


@pytest.mark.skipif(sys.platform == "darwin", reason="Accelerate is linked there")
def test_an_llm_prepares_the_machine_before_it_imports_mlx_and_imports_nothing_of_a_fleet() -> None:
    fleet = "{'zmq', 'mlxserve.cache.events', 'mlxserve.engine.kv_events', 'mlxserve.engine.tier_events', 'redis', 'mlxserve.disk.store'}"
    code = (
        "import sys; from mlxserve import LLM; from mlxserve.system import machine; "
        "llm = LLM(disable_log_stats=True, num_pages=64); "
        f"assert not {fleet} & set(sys.modules); "
        "print(machine.prepare().is_fast); llm.close()"
    )
    assert run(code) == "True"


@pytest.mark.slow
def test_a_script_that_never_closes_its_engine_ends_cleanly() -> None:
    code = (
        "from mlxserve import LLM, SamplingParams; "
        "llm = LLM(num_pages=8, disable_log_stats=True); "
        "out = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3), use_tqdm=False); "
        "print(len(out[0].token_ids) >= 1)"
    )
    assert run(code) == "True"
