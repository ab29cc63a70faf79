"""Downloads with the real huggingface_hub, from a local hub."""

import asyncio
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tui.talk.errors import ChatError
from tui.talk.models import Downloaded, Model, ModelCatalog, ModelOrigin

REPOSITORY = "org/tiny-4bit"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
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


class Hub:
    """Serves the routes of a download. The large file stops half way until `resume` is set."""

    def __init__(self) -> None:
        self.ranges: list[str | None] = []
        self.paths: list[str] = []
        self.resume = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Log nothing."""

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.paths.append(self.path)
                if self.path.startswith(f"/api/models/{REPOSITORY}"):
                    self._card()
                elif found := re.fullmatch(rf"/{REPOSITORY}/resolve/[^/]+/([\w.]+)", self.path):
                    self._file(found[1])
                else:
                    self.send_error(404)

            def _card(self) -> None:
                files = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": f"{at:040}"}
                    for at, (name, data) in enumerate(FILES.items())
                ]
                card = {"id": REPOSITORY, "sha": COMMIT, "siblings": files}
                body = json.dumps(tree if "/tree/" in self.path else card).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _file(self, name: str) -> None:
                data, wanted = FILES[name], self.headers["range"]
                start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
                self.send_response(206 if start else 200)
                self.send_header("x-repo-commit", COMMIT)
                self.send_header("etag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("accept-ranges", "bytes")
                self.send_header("content-length", str(len(data) - start))
                if start:
                    self.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.end_headers()
                if self.command == "GET":
                    self._send(name, data[start:], wanted)

            def _send(self, name: str, data: bytes, wanted: str | None) -> None:
                half = len(data)
                if name == "model.safetensors":
                    hub.ranges.append(wanted)
                    half = len(data) if hub.resume.is_set() else SIZE // 2
                try:
                    self.wfile.write(data[:half])
                    self.wfile.flush()
                    hub.resume.wait()
                    self.wfile.write(data[half:])
                except OSError:
                    self.close_connection = True  # the download was paused

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.resume.set()
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.http.server_address[1]}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub.start()
    yield hub
    hub.stop()


@pytest.mark.slow
def test_a_download_reports_progress_pauses_and_resumes(hub: Hub, tmp_path: Path) -> None:
    async def until_it_stops() -> int:
        async with aclosing(ModelCatalog().download(REPOSITORY)) as steps:
            async for step in steps:
                assert isinstance(step, Downloaded)
                assert step.total == sum(map(len, FILES.values())) - len(FILES["run_me.py"])
                if step.done >= SIZE // 3:
                    return step.done
        raise AssertionError("it did not stop")

    async def to_the_end() -> None:
        async with aclosing(ModelCatalog().download(REPOSITORY)) as steps:
            async for step in steps:
                assert isinstance(step, Model) or step.done >= paused
            assert isinstance(step, Model)
            assert (step.name, step.weight_size) == (REPOSITORY, SIZE)

    paused = asyncio.run(until_it_stops())
    assert SIZE // 3 <= paused < SIZE
    hub.resume.set()
    asyncio.run(to_the_end())
    assert len(hub.ranges) == 2
    assert hub.ranges[0] is None
    assert hub.ranges[1] is not None, "nothing is downloaded twice"
    assert int(hub.ranges[1].removeprefix("bytes=").removesuffix("-")) >= SIZE // 3
    assert not any("run_me.py" in path for path in hub.paths), "no program is downloaded"
    (file,) = (tmp_path / "hub").glob("models--*/snapshots/*/model.safetensors")
    assert file.read_bytes() == FILES["model.safetensors"]
    found = {model.name: model for model in asyncio.run(ModelCatalog().find())}
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

    with pytest.raises(ChatError, match="arrived damaged"):
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

    with pytest.raises(ChatError, match=r"huggingface\.co cannot be reached"):
        asyncio.run(download())
