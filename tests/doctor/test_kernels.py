"""What the doctor reports about the attention kernels, with Metal and without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_kernels import checkup, kernels, metal, selftest, speeds
from metal_kernels.checkup import OpCheck
from metal_kernels.chunk_trial import ChunkTimes, WayTimes
from mlxserve.doctor import kernels as doctor
from mlxserve.doctor.finding import Finding, Grade
from mlxserve.doctor.kernels import check_kernels
from mlxserve.model import chunk_choice
from tests.emulated import emulated_factory

DTYPES = ("float16", "bfloat16", "float32")
LOADS = (*DTYPES, "q8")
OPS = [f"{dtype}{pools} ops" for dtype in DTYPES for pools in ("", " q8")]
NAMES = ["in-place writes", *(f"fences {load}" for load in LOADS), *OPS]
CONTROL = "step 3 attended over a mixture of keys"
SMALL = replace(selftest.QUICK, length=75, steps=2)


def answer_of_the_child(task: str, environment: dict[str, str]) -> list[dict[str, str | None]]:
    assert (task, environment) == ("fences", {"MLX_MAX_OPS_PER_BUFFER": "0"})
    return [{"dtype": d, "with_fences": None, "without_fences": CONTROL} for d in LOADS]


@pytest.fixture
def mac(on_metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator in place of Metal, and small sizes."""
    monkeypatch.setattr(kernels, "on_metal", emulated_factory())
    loads = [replace(SMALL, dtype=d) for d in metal.DTYPES] + [replace(SMALL, is_quantised=True)]
    proofs = partial(selftest.prove, loads=loads)
    monkeypatch.setattr(selftest, "prove", proofs)
    monkeypatch.setattr(doctor, "run_child", answer_of_the_child)
    real = checkup.check_ops
    monkeypatch.setattr(checkup, "check_ops", lambda backend, _dims: real(backend, [64]))
    small: dict[str, Any] = {"batch": 1, "context": 64, "head_dim": 64, "repeats": 1, "queued": 1}
    monkeypatch.setattr(speeds, "measure", partial(speeds.measure, **small))


@pytest.mark.instruments
@pytest.mark.usefixtures("on_a_cpu")
def test_without_metal_the_backend_that_computes_there_is_checked() -> None:
    missing, *ops = check_kernels()
    assert missing == Finding("Metal kernels", "not run: there is no Metal on this machine")
    assert [finding.name for finding in ops] == OPS
    exact = "on the CPU: write_kv exact, copy_pages exact, rotate_and_write"
    for finding in ops:
        assert finding.grade is Grade.OK
        assert finding.value.startswith(exact)


@pytest.mark.instruments
@pytest.mark.usefixtures("mac")
def test_on_metal_speeds_and_the_gain_of_page_writes_are_reported() -> None:
    lines = {finding.name: finding.value for finding in check_kernels()}
    assert list(lines) == [*NAMES, "decode reads", "page writes", "long chunks"]
    assert lines["float16 ops"].startswith("on Metal: ")
    assert "GB/s of keys and values" in lines["decode reads"]
    assert "times" in lines["page writes"]
    assert "nothing was timed on this machine yet" in lines["long chunks"]


@pytest.mark.usefixtures("mac")
def test_a_wrong_op_is_broken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [
        OpCheck("paged_prefill", mx.float16, 64, 1e-4, 3e-3),
        OpCheck("paged_prefill", mx.float16, 128, 2e-4, 3e-3),
        OpCheck("paged_decode", mx.float16, 64, 1e-4, 3e-3),
        OpCheck("paged_decode", mx.float16, 128, 0.5, 3e-3),
    ]
    monkeypatch.setattr(checkup, "check_ops", lambda _backend, _dims: iter(wrong))
    finding = {finding.name: finding for finding in check_kernels()}["float16 ops"]
    assert finding.grade is Grade.BROKEN
    assert "paged_prefill off by 2e-04, " in finding.value, "one number for an op that is right"
    assert (
        "paged_decode off by 64:1e-04 128:5e-01, paged_decode at 128 may be 3e-03" in finding.value
    )


@pytest.mark.usefixtures("mac")
def test_an_op_that_does_not_run_is_one_broken_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n  Unable to build metal library from source\nprogram_source:41:9: error: no\n"
    found = [
        OpCheck("write_kv", mx.float16, 64, 0.0, 0.0),
        OpCheck("paged_decode", mx.float16, 64, float("nan"), 3e-3, text),
        OpCheck("paged_decode", mx.float16, 128, float("nan"), 3e-3, text),
    ]
    monkeypatch.setattr(checkup, "check_ops", lambda _backend, _dims: iter(found))
    findings = {finding.name: finding for finding in check_kernels()}
    assert findings["float16 ops"] == Finding("float16 ops", "on Metal: write_kv exact", Grade.OK)
    assert findings["paged_decode"] == Finding(
        "paged_decode",
        "does not run on Metal in float16 at head dimension 64, 128: "
        "Unable to build metal library from source",
        Grade.BROKEN,
    )
    assert "GB/s" in findings["decode reads"].value


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("in-place writes", selftest, "why_not_in_place"),
        ("fences", selftest, "prove"),
        ("one op a buffer", doctor, "run_child"),
        ("ops", checkup, "check_ops"),
        ("speeds", speeds, "measure"),
    ],
)
@pytest.mark.usefixtures("mac")
def test_a_check_that_raises_is_broken_and_the_others_follow(
    name: str, module: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed\nmore")

    quick = speeds.Speeds(1.0, 1.0, 1.0)
    monkeypatch.setattr(selftest, "why_not_in_place", lambda _backend: None)
    monkeypatch.setattr(checkup, "check_ops", lambda _backend, _dims: iter(()))
    monkeypatch.setattr(speeds, "measure", lambda _backend: quick)
    monkeypatch.setattr(selftest, "prove", lambda _factory: iter(()))
    monkeypatch.setattr(module, function, fail)
    findings = {finding.name: finding for finding in check_kernels()}
    assert findings[name] == Finding(
        name, "RuntimeError: [METAL] Command buffer execution failed", Grade.BROKEN
    )
    assert sum(finding.is_broken for finding in findings.values()) == 1
    assert "in-place writes" in findings
    assert ("page writes" in findings) == (name != "speeds")


@pytest.mark.usefixtures("on_a_cpu")
def test_without_metal_a_check_that_raises_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("no BLAS")

    monkeypatch.setattr(checkup, "check_ops", fail)
    assert list(check_kernels())[1:] == [Finding("ops", "OSError: no BLAS", Grade.BROKEN)]


@pytest.mark.usefixtures("mac")
def test_writes_that_are_not_in_place_are_broken_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selftest, "why_not_in_place", lambda _backend: "step 1 came late")
    monkeypatch.setattr(checkup, "check_ops", lambda _backend, _dims: iter(()))
    finding = next(iter(check_kernels()))
    assert (finding.name, finding.grade) == ("in-place writes", Grade.BROKEN)
    assert "step 1 came late" in finding.value


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("is_timed", [False, True])
def test_how_long_chunks_attend_and_why_is_reported(
    is_timed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quick = speeds.Speeds(1.0, 1.0, 1.0)
    monkeypatch.setattr(chunk_choice, "data_home", lambda: tmp_path)
    monkeypatch.setattr(speeds, "measure", lambda _backend: quick)
    monkeypatch.setattr(checkup, "check_ops", lambda _backend, _dims: iter(()))
    if is_timed:
        by_rows = {32: (0.5, 1.25), 64: (1.0, 1.5), 128: (2.0, 1.75), 256: (4.0, 3.0)}
        times = ChunkTimes({rows: WayTimes(*each) for rows, each in by_rows.items()})
        chunk_choice.kept_times().keep("8 kv heads of 128", times)
    [finding] = [each for each in check_kernels() if each.name == "long chunks"]
    assert finding.value == (
        "8 kv heads of 128: copies from 128 rows on: 32, 64, 128, 256 rows take "
        "0.50 and 1.25, 1.00 and 1.50, 2.00 and 1.75, 4.00 and 3.00 ms by tiles and copies"
        if is_timed
        else "by MLX's own routing until a model is loaded: nothing was timed on this machine yet"
    )


def proved(monkeypatch: pytest.MonkeyPatch, *reasons: str | None) -> list[Finding]:
    """What is said of the self-test's and its control's reasons."""
    proof = selftest.FenceProof(selftest.thorough(mx.float16), *reasons)
    monkeypatch.setattr(selftest, "prove", lambda _factory: iter([proof]))
    monkeypatch.setattr(checkup, "check_ops", lambda _backend, _dims: iter(()))
    findings = list(check_kernels())
    assert [finding.name for finding in findings[1:5]] == ["fences float16", *NAMES[1:4]]
    return findings[1:5]


@pytest.mark.usefixtures("mac")
def test_fences_are_proved_by_a_control_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    here, *of_child = proved(monkeypatch, None, CONTROL)
    assert here.grade is Grade.OK
    assert here.value == f"67 MB written 8 times: right; without fences, {CONTROL}"
    for finding in of_child:
        assert finding.grade is Grade.OK
        assert finding.value == f"one op per command buffer: right; without fences, {CONTROL}"


@pytest.mark.usefixtures("mac")
def test_a_control_that_passes_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = proved(monkeypatch, None, None)[0]
    assert finding.grade is Grade.FACT
    assert finding.value.endswith("right without fences too: this shows nothing on this machine")


@pytest.mark.usefixtures("mac")
def test_fences_that_do_not_hold_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = proved(monkeypatch, "step 1 came late", CONTROL)[0]
    assert finding.grade is Grade.BROKEN
    assert finding.value == "67 MB written 8 times: step 1 came late"
