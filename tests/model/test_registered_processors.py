"""The processor of a model's images is the one that mlx-vlm registers, or the refusal says why there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, dynamic_module_utils

from mlxserve.hub.embedded import model_path
from mlxserve.model import registered_processors
from mlxserve.model.registered_processors import (
    Registration,
    load_processor,
    processor_class,
    registration_of,
)
from tests.model import coverage

ROOT = Path(__file__).parents[2]
QWEN = "Qwen3VLProcessor"


@pytest.mark.parametrize(
    ("model_type", "name", "architecture"),
    [
        ("qwen3_5_moe", QWEN, ""),  # in `__init__`, with another package's class
        ("Qwen3_VL_MoE", QWEN, ""),
        ("indic_ocr", QWEN, ""),
        ("jvlm", "JinaVLMProcessor", ""),  # whose package is jina_vlm
        ("aya_vision", "AyaVisionOutputProcessor", ""),  # the second class of its file
        ("phi4mm", "Phi4MMProcessor", ""),  # by keywords
        ("llava_next", "LlavaNextProcessor", ""),  # which granite_vision registers too
        ("molmo2", "Molmo2Processor", ""),  # without `install_auto_processor_patch`
        ("lfm2_vl", "Lfm2VlProcessor", "D1Model"),  # by another package than the definition's
    ],
)
def test_a_registered_processor_is_found(model_type: str, name: str, architecture: str) -> None:
    config = {"model_type": model_type, "auto_map": {"AutoModel": architecture}}
    registration = registration_of(config)
    assert registration is not None
    assert registration.name == name


@pytest.mark.parametrize(
    "model_type",
    [
        "llava-qwen2",  # whose package imports LLaVA's processor
        "cohere2_vision",  # whose package registers Aya's
        "mistral_large3",
        "qwen3_5_text",
        "llama",
        "no_such_model",
    ],
)
def test_a_model_without_a_processor_has_no_other_models(model_type: str) -> None:
    assert registration_of({"model_type": model_type}) is None
    with pytest.raises(
        ValueError, match=f"mlx-vlm registers no processor of images for '{model_type}'"
    ):
        processor_class({"model_type": model_type})


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.model.registrations_child"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_sources_say_what_every_package_registers(report: dict[str, Any]) -> None:
    read, registered = report["read"], report["registered"]
    assert {name: calls for name, calls in read.items() if name != "molmo2"} == registered
    assert len(registered) >= 94  # packages of mlx-vlm 0.7.10


# mlx-vlm has no package of these model types, and loads no model of them.
NOT_FOUND = {"phi3-v", "phi3v"}


@pytest.mark.slow
def test_every_registered_processor_is_found(report: dict[str, Any]) -> None:
    read, found = report["read"], report["found"]
    expected: dict[str, str] = {}
    for package, calls in read.items():
        for model_types, kind in calls:
            for each in model_types:
                if (
                    each not in expected or each == package
                ):  # granite_vision registers llava_next too
                    expected[each] = kind
    assert {each for each, kind in expected.items() if found[each] != kind} == NOT_FOUND
    rows = [coverage.rows(library).items() for library in coverage.FILES]
    served = {name for library in rows for name, row in library if "served" in row} & read.keys()
    assert len(served) >= 50
    assert not NOT_FOUND & {each for name in served for types, _ in read[name] for each in types}


@pytest.mark.slow
def test_no_requirement_of_mlx_vlm_is_imported_with_a_processor(report: dict[str, Any]) -> None:
    assert report["imported"] == []
    missing = {"No module named 'mlx_audio'", "No module named 'cv2'"}
    assert set(report["errors"].values()) <= missing


def registered(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    registration = Registration(frozenset({"qwen3_vl"}), module, "Processor")
    monkeypatch.setattr(registered_processors, "registrations", lambda _: (registration,))


def test_a_package_that_the_processor_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needing_processor.py").write_text("import no_such_package.part")
    monkeypatch.syspath_prepend(str(tmp_path))
    registered(monkeypatch, "needing_processor")
    sentence = (
        r"its processor cannot be imported: the package no_such_package is missing "
        r"\(.* install .*no-such-package, and restart\)"
    )
    with pytest.raises(ValueError, match=sentence):
        processor_class({"model_type": "qwen3_vl"})


def test_a_module_that_another_version_lacks_is_no_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered(monkeypatch, "transformers.no_such_module")
    with pytest.raises(
        ValueError, match=r"imported: No module named 'transformers\.no_such_module'"
    ):
        processor_class({"model_type": "qwen3_vl"})


def raising(error: Exception) -> Any:
    class Raising:
        @classmethod
        def from_pretrained(cls, folder: str, **_: Any) -> None:
            raise error

    return Raising


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ModuleNotFoundError("No module named 'cv3'", name="cv3"),
            r"cv3 is missing \(.* install .*cv3",
        ),
        (KeyError("image_size"), "loaded: KeyError: 'image_size'"),
        (Exception("of the library in Rust"), "loaded: Exception: of the library in Rust"),
        (OSError("no file"), "loaded: no file"),
        (
            ValueError("Pass trust_remote_code=True."),
            r"loaded: it needs code .* which is never run",
        ),
    ],
)
def test_what_a_processor_raises_becomes_a_sentence(
    error: Exception, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_processor(raising(error), tmp_path)


class TrustingProcessor:
    """A processor that trusts every folder, as Inkling's does."""

    @classmethod
    def from_pretrained(cls, folder: str, **_: Any) -> Any:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture
def folder_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose tokenizer is code, which leaves the file `ran` when it runs."""
    modules = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    folder = tmp_path / "folder"
    folder.mkdir()
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    (folder / "own.py").write_text(code)
    (folder / "config.json").write_text(json.dumps({"model_type": "inkling"}))
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((model_path() / "tokenizer.json").read_bytes())
    return folder


def test_code_in_a_folder_is_not_run(folder_with_code: Path) -> None:
    with pytest.raises(ValueError, match=r"it needs code in the model's folder .* never run"):
        load_processor(TrustingProcessor, folder_with_code)
    assert not (folder_with_code.parent / "ran").exists()


def test_code_runs_for_those_who_trust_it_elsewhere(folder_with_code: Path) -> None:
    with pytest.raises(ValueError, match="never run"):
        load_processor(TrustingProcessor, folder_with_code)
    run: Callable[[str], Any] = TrustingProcessor.from_pretrained
    run(str(folder_with_code))
    assert (folder_with_code.parent / "ran").exists()
