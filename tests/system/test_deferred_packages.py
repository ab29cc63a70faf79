"""A deferred package gives its submodules and chosen names without running its `__init__`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mlxserve.system.deferred_packages import defer

INIT = """\
from demo_package import events
events.log.append("whole")
from .inner import work
from . import extra
value = 7
__all__ = ["value", "work"]
"""
FILES = {
    "__init__.py": INIT,
    "events.py": "log = []\n",
    "inner.py": "def work(): return 'done'\n",
    "work.py": "def work(): return 'named like its module'\n",
    "extra.py": "number = 3\n",
}


@pytest.fixture(name="package")
def package_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package `demo_package`, which can be imported."""
    folder = tmp_path / "demo_package"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "demo_package"]:
        del sys.modules[name]


def demo() -> Any:
    return import_module("demo_package")


def log() -> list[str]:
    found: list[str] = import_module("demo_package.events").log
    return found


@pytest.mark.usefixtures("package")
def test_submodules_are_imported_without_the_package() -> None:
    defer("demo_package")
    assert import_module("demo_package.extra").number == 3
    assert demo().extra.number == 3
    assert log() == []


@pytest.mark.usefixtures("package")
def test_a_member_is_taken_from_its_submodule_even_if_it_has_its_name() -> None:
    defer("demo_package", {"work": "work"})
    import_module("demo_package.work")
    assert demo().work() == "named like its module"
    assert log() == []


@pytest.mark.usefixtures("package")
def test_a_submodule_may_be_a_member_of_its_own_name() -> None:
    defer("demo_package", {"extra": None})
    assert demo().extra is import_module("demo_package.extra")
    assert log() == []


@pytest.mark.usefixtures("package")
def test_another_name_imports_the_whole_package_once_in_its_place() -> None:
    defer("demo_package", {"gone": "inner"})
    deferred = demo()
    submodule = import_module("demo_package.extra")
    assert (deferred.value, deferred.work()) == (7, "done")
    assert demo() is not deferred
    assert demo().extra is submodule
    assert demo().events.log == ["whole"]
    assert deferred.__all__ == ["value", "work"]
    assert {"value", "work", "extra"} <= set(dir(deferred))
    with pytest.raises(AttributeError, match="gone"):
        _ = deferred.gone
    assert log() == ["whole"]


@pytest.mark.usefixtures("package")
def test_what_python_looks_for_by_itself_does_not_import_the_package() -> None:
    defer("demo_package")
    assert not hasattr(demo(), "__wrapped__")
    assert log() == []


def test_a_package_that_cannot_be_imported_says_so_each_time(package: Path) -> None:
    (package / "__init__.py").write_text("raise OSError('broken')\n")
    defer("demo_package")
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            _ = demo().value
    assert import_module("demo_package.extra").number == 3


@pytest.mark.usefixtures("package")
def test_an_imported_package_stays_as_it_is() -> None:
    whole = demo()
    defer("demo_package")
    assert demo() is whole


def test_a_missing_package_is_missed_by_its_import() -> None:
    defer("no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_module("no_such_package")


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


_WHOLE = "{'mlx_lm.convert', 'transformers.dependency_versions_check'}"  # only by an __init__


@pytest.mark.slow
def test_a_model_is_served_without_all_of_mlx_lm_and_transformers() -> None:
    code = (
        "import sys; from mlxserve import LLM, SamplingParams; "
        "llm = LLM(num_pages=8, disable_log_stats=True); "
        "llm.chat([{'role': 'user', 'content': 'Hi'}], SamplingParams(max_tokens=2), use_tqdm=False); "
        f"llm.close(); print({_WHOLE} & set(sys.modules))"
    )
    assert run(code) == "set()"


def test_tokenizers_of_most_models_need_no_more_than_that() -> None:
    code = (
        "import sys; from mlxserve.system.deferred_packages import defer_packages; defer_packages(); "
        "import transformers; early = [getattr(transformers, name) for name in ("
        "'AutoTokenizer', 'PreTrainedTokenizer', 'PreTrainedTokenizerFast', 'GPT2Tokenizer', "
        "'GemmaTokenizer', 'LlamaTokenizer', 'Qwen2Tokenizer')]; "
        f"print({_WHOLE} & set(sys.modules)); "
        "transformers.AutoConfig; "
        "whole = sys.modules['transformers']; "
        "print(whole is not transformers, {getattr(whole, c.__name__) is c for c in early})"
    )
    assert run(code).splitlines() == ["set()", "True {True}"]


def test_a_user_of_mlx_lm_finds_all_of_it() -> None:
    code = (
        "from mlxserve.system import machine; machine.import_mlx_lm(); import mlx_lm.generate; "
        "from mlx_lm import generate, convert; import mlx_lm; print(callable(generate), "
        "callable(convert), callable(mlx_lm.load), mlx_lm.__version__.count('.'))"
    )
    assert run(code) == "True True True 2"
