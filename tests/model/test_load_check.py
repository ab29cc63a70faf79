"""A model that ends the process that computes it is refused by a sentence, once and for all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.files import ModelFiles, find_model
from mlxserve.model.load_check import Verdicts, try_first

GIB = 1 << 30
PASSES = "print('noise'); print('{\"refusal\": null}')"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def files(model_folder: Callable[[str], Path]) -> ModelFiles:
    return find_model(str(model_folder("llama")))


def attempt(files: ModelFiles, child: str, mode: str = "auto", seconds: float = 60.0) -> None:
    """With a child that runs this Python code."""
    config = EngineConfig().with_options(trial_process=mode)
    command = (sys.executable, "-c", f"import os, signal, sys; sys.stdin.read(); {child}")
    try_first(config, files, GIB, command=command, seconds=seconds)


def refusal(files: ModelFiles, child: str, **options: Any) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        attempt(files, child, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE])
def test_a_model_that_ends_its_process_is_refused_and_not_tried_again(
    files: ModelFiles, number: signal.Signals
) -> None:
    dies = f"os.write(2, b'corrupted size'); os.kill(os.getpid(), {int(number)})"
    text = refusal(files, dies)
    assert f"this llama model first, and was ended by {number.name} (corrupted size)" in text
    assert refusal(files, "raise AssertionError('started')") == text
    attempt(files, PASSES, mode="always")
    attempt(files, "raise AssertionError('started')")


def test_who_was_killed_by_others_is_tried_again(files: ModelFiles) -> None:
    assert "not enough memory" in refusal(files, "os.kill(os.getpid(), signal.SIGKILL)")
    assert "exit code 3" in refusal(files, "sys.exit(3)")
    assert "was not through after 0.2 s" in refusal(
        files, "import time; time.sleep(60)", seconds=0.2
    )
    attempt(files, PASSES)


def test_a_refusal_of_the_child_is_the_refusal(files: ModelFiles) -> None:
    assert refusal(files, 'print(\'{"refusal": "no such"}\')') == "no such"
    attempt(files, PASSES)


def test_a_kind_that_has_passed_is_not_tried_again(
    files: ModelFiles, model_folder: Callable[[str], Path]
) -> None:
    attempt(files, PASSES)
    attempt(files, "sys.exit(3)")
    assert "exit code 3" in refusal(files, "sys.exit(3)", mode="always")
    other = find_model(str(model_folder("qwen3")))
    assert "exit code 3" in refusal(other, "sys.exit(3)")


def test_nothing_is_tried_where_it_is_not_wanted(files: ModelFiles, home: Path) -> None:
    attempt(files, "sys.exit(3)", mode="never")
    try_first(EngineConfig(), files, GIB, command=("no-such-command",))
    attempt(find_model(None), "sys.exit(3)")
    assert not home.exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"versions": 3, "models": {"a": 1}}'])
def test_verdicts_of_other_versions_or_broken_ones_do_not_count(
    home: Path, files: ModelFiles, content: str
) -> None:
    attempt(files, PASSES)
    kept = json.loads((home / "trials.json").read_text())
    assert list(kept["models"].values()) == [{"kind": "llama", "refusal": None}]
    (home / "trials.json").write_text(content or json.dumps({**kept, "versions": ["mlx 0"]}))
    assert not Verdicts(home / "trials.json").has_passed("llama")
    attempt(files, PASSES)
    assert Verdicts(home / "trials.json").has_passed("llama")


@pytest.mark.slow
def test_the_real_child_passes_a_model_and_names_what_it_refuses(
    files: ModelFiles, tmp_path: Path
) -> None:
    with LLM(str(files.path), trial_process="auto", num_pages=8) as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
    bad = Path(shutil.copytree(files.path, tmp_path / "bad"))
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    with pytest.raises(UnsupportedModel, match="bad cannot be loaded: Missing"):
        LLM(str(bad), trial_process="always")


@pytest.mark.long
@pytest.mark.slow
def test_a_definition_that_writes_past_its_logits_does_not_end_the_server(
    files: ModelFiles, tmp_path: Path
) -> None:
    """phi3small excludes 91 fixed tokens up to 100,351, whatever the vocabulary."""
    folder = Path(shutil.copytree(files.path, tmp_path / "phi3small"))
    build = """
import json, sys, mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import phi3small as p
c = dict(model_type="phi3small", hidden_size=128, dense_attention_every_n_layers=2,
         ff_intermediate_size=256, gegelu_limit=1.0, num_hidden_layers=4, num_attention_heads=4,
         num_key_value_heads=2, layer_norm_epsilon=1e-4, vocab_size=1000)
m = p.Model(p.ModelArgs.from_dict(c))
mx.save_safetensors(sys.argv[1] + "/model.safetensors", dict(tree_flatten(m.parameters())))
json.dump(c, open(sys.argv[1] + "/config.json", "w"))
"""
    subprocess.run([sys.executable, "-c", build, str(folder)], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "MLXSERVE_TUNING_TRIAL_PROCESS"}
    served = subprocess.run(
        [sys.executable, "-m", "mlxserve", "serve", "--port", "0", "-m", str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert served.returncode > 0, "it ended by itself, not by a signal"
    assert re.search("was ended by SIG|computes different logits", served.stderr)
