"""Downloads with the real huggingface_hub, from a local hub."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from mlxserve.hub.model_choices import (
    Downloaded,
    Model,
    ModelCatalog,
    ModelCommandFailed,
    ModelOrigin,
)
from tests.tui.hub import Hub

REPOSITORY = "org/tiny-4bit"
SIZE = 24 << 20  # huggingface_hub writes 10 MB at a time
FILES = {
    "config.json": json.dumps(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "max_position_embeddings": 512,
        }
    ).encode(),
    "model.safetensors": bytes(range(256)) * (SIZE // 256),
    "run_me.py": b"print('never downloaded')",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(FILES)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub.start()
    yield hub
    hub.stop()


@pytest.mark.slow
async def test_a_download_reports_progress_pauses_and_resumes(hub: Hub, tmp_path: Path) -> None:
    async def until_it_stops() -> int:
        async with aclosing(ModelCatalog().download(REPOSITORY)) as steps:
            async for step in steps:
                assert isinstance(step, Downloaded)
                assert step.total == sum(map(len, FILES.values())) - len(FILES["run_me.py"])
                if step.done >= SIZE // 3:
                    return step.done
        raise AssertionError("it did not stop")

    paused = await until_it_stops()
    assert SIZE // 3 <= paused < SIZE
    hub.resume.set()
    async with aclosing(ModelCatalog().download(REPOSITORY)) as steps:
        async for step in steps:
            assert isinstance(step, Model) or step.done >= paused
        assert isinstance(step, Model)
        assert (step.name, step.weight_size) == (REPOSITORY, SIZE)
    assert len(hub.ranges) == 2
    assert hub.ranges[0] is None
    assert hub.ranges[1] is not None, "nothing is downloaded twice"
    assert int(hub.ranges[1].removeprefix("bytes=").removesuffix("-")) >= SIZE // 3
    assert not any("run_me.py" in path for path in hub.paths), "no program is downloaded"
    (file,) = (tmp_path / "hub").glob("models--*/snapshots/*/model.safetensors")
    assert file.read_bytes() == FILES["model.safetensors"]
    found = {model.name: model for model in await ModelCatalog().find()}
    assert found[REPOSITORY].source is ModelOrigin.DOWNLOADED
    assert found[REPOSITORY].weight_size == SIZE


@pytest.mark.slow
def test_a_damaged_file_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    name = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    (blobs / f"{name}.part").write_bytes(b"x" * 1000)
    hub.resume.set()

    async def download() -> None:
        async with aclosing(ModelCatalog().download(REPOSITORY)) as steps:
            async for _ in steps:
                pass

    with pytest.raises(ModelCommandFailed, match="arrived damaged"):
        asyncio.run(download())
    assert hub.ranges == ["bytes=1000-"]
    assert list(blobs.iterdir()) == []


@pytest.mark.slow
def test_an_unreachable_hub_is_reported(hub: Hub) -> None:
    hub.stop()

    async def download() -> None:
        async with aclosing(ModelCatalog().download(REPOSITORY)) as steps:
            async for _ in steps:
                pass

    with pytest.raises(ModelCommandFailed, match=r"huggingface\.co cannot be reached"):
        asyncio.run(download())
