"""`mlxserve doctor`'s report, and what its self-test notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from mlxserve.core.config import EngineConfig
from mlxserve.doctor import report
from mlxserve.doctor.finding import Finding, Grade
from mlxserve.doctor.report import diagnose, measure_matmul, self_test, time_rows
from mlxserve.doctor.sections import section
from mlxserve.system import machine

ModelFolder = Callable[[str], Path]


def small(folder: Path, **options: bool) -> EngineConfig:
    return EngineConfig().with_options(
        model=str(folder), num_pages=32, disable_log_stats=True, **options
    )


def test_a_finding_is_one_aligned_line() -> None:
    assert str(Finding("mlx", "0.32")) == "       mlx             0.32"
    assert str(Finding("self-test", "no", Grade.BROKEN)) == "BROKEN self-test       no"


def test_matmul_is_measured() -> None:
    finding = measure_matmul()
    assert "GFLOP/s" in finding.value
    assert finding.grade in (Grade.OK, Grade.SLOW)


def test_a_model_that_cannot_be_loaded_is_broken_with_the_reason(tmp_path: Path) -> None:
    finding = self_test(EngineConfig().with_options(model=str(tmp_path)))
    assert finding.is_broken
    assert "config.json" in finding.value


def test_a_wrong_answer_is_broken(model_folder: ModelFolder) -> None:
    finding = self_test(small(model_folder("qwen3")))
    assert finding.is_broken
    assert report.EXPECTED in finding.value


@pytest.mark.slow
def test_a_cache_without_hits_is_broken(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random model's answer counts as right; everything else is real."""
    monkeypatch.setattr(report, "EXPECTED", "")
    folder = model_folder("qwen3")
    assert self_test(small(folder)).grade is Grade.OK
    monkeypatch.setattr(report, "QUESTION", "Too short to fill a page")
    assert "cache" in self_test(small(folder)).value
    assert self_test(small(folder)).is_broken
    assert not self_test(small(folder, enable_prefix_caching=False)).is_broken


def test_the_embedded_model_passes() -> None:
    finding = self_test(EngineConfig().with_options(num_pages=64, disable_log_stats=True))
    assert finding.grade is Grade.OK, finding.value


def test_the_rows_of_a_step_are_timed() -> None:
    finding = time_rows(EngineConfig())
    assert finding.grade is Grade.FACT
    assert finding.value.startswith("1, 2, 3")
    assert finding.value.endswith(" ms")


@pytest.mark.instruments
def test_the_facts_of_the_machine_come_first(model_folder: ModelFolder) -> None:
    findings = {finding.name: finding for finding in diagnose(small(model_folder("qwen3")))}
    for name in ("python", "system", "memory", "mlx", "mlx-lm", "device", "blas"):
        assert findings[name].value
        assert findings[name].grade is Grade.FACT
    assert list(findings)[-3:] == ["matmul", "rows of a step", "self-test"]


Fails = Callable[..., object]


def failing(error: BaseException) -> Fails:
    def fail(*_arguments: object, **_options: object) -> object:
        raise error

    return fail


WELL = Finding("part", "well")
# section: where its function lives, the function's name, what it returns where it does not fail
PARTS: dict[str, tuple[object, str, object]] = {
    "machine": (machine, "facts", {"part": "well"}),
    "kernels": (report, "check_kernels", [WELL]),
    "matmul": (report, "measure_matmul", WELL),
    "rows of a step": (report, "time_rows", WELL),
    "self-test": (report, "self_test", WELL),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    "error",
    [RuntimeError("\nfirst\nsecond"), ValueError("first"), OSError("first"), KeyError("first")],
)
def test_a_section_that_fails_is_a_finding_and_the_others_follow(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, function, result in PARTS.values():
        monkeypatch.setattr(module, function, partial(returned, result))
    module, function, _ = PARTS[name]
    monkeypatch.setattr(module, function, failing(error))
    found = list(diagnose())
    assert len(found) == len(PARTS)
    [broken] = [finding for finding in found if finding != WELL]
    assert (broken.name, broken.grade) == (name, Grade.BROKEN)
    assert broken.value.replace("'", "") == f"{type(error).__name__}: first"


def returned(result: object, *_arguments: object) -> object:
    return result


def test_a_section_keeps_what_it_found_before_it_failed() -> None:
    def check() -> Iterator[Finding]:
        yield Finding("first", "well")
        raise ValueError

    assert list(section("ops", check)) == [
        Finding("first", "well"),
        Finding("ops", "ValueError: without a message", Grade.BROKEN),
    ]


def test_control_c_ends_the_doctor() -> None:
    with pytest.raises(KeyboardInterrupt):
        list(section("ops", cast(Callable[[], list[Finding]], failing(KeyboardInterrupt()))))
