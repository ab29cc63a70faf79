"""A prompt is computed once: what a server has computed, the next one reads from disk."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.access.keys import KeyFile
from mlxserve.api.access.keys import Scope as KeyScope
from tests.api.server.process import Process, Start, served

PAGE_SIZE = 32  # the default
QUESTIONS = ["Hello! " * 600, "Tell me more about boats. " * 200, "And the sea? " * 60]
DISK = ("--disk-cache-size", "1", "--disk-cache-dir")

Messages = list[dict[str, str]]


def talk(process: Process, messages: Messages, question: str) -> dict[str, Any]:
    """Ask and note the answer; its usage."""
    messages.append({"role": "user", "content": question})
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    status, text = process.request("POST", "/v1/chat/completions", body)
    assert status == 200, text
    reply = json.loads(text)
    messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return dict(reply["usage"])


@pytest.fixture(scope="module")
def serve(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """As `start`, with a model of a longer context."""
    model = write_model(tmp_path_factory.mktemp("long"), "qwen3", max_position_embeddings=8_000)

    def process(*flags: str, **kwargs: Any) -> contextlib.AbstractContextManager[Process]:
        log = tmp_path_factory.mktemp("log") / "stderr"
        sizes = ("--model", str(model), "--num-pages", "300", "--max-num-seqs", "4")
        return served(log, *sizes, *flags, **kwargs)

    return process


@pytest.fixture(scope="module")
def wanted(serve: Start) -> Messages:
    """The conversation with a server that never stopped."""
    messages: Messages = []
    with serve() as process:
        for question in QUESTIONS:
            talk(process, messages, question)
    return messages


def begin(serve: Start, folder: Path, end: Callable[[Process], object]) -> tuple[Messages, int]:
    """Two turns with a server that then ends; the conversation, and the tokens of its last prompt."""
    messages: Messages = []
    with serve(*DISK, str(folder)) as process:
        for question in QUESTIONS[:-1]:
            usage = talk(process, messages, question)
        end(process)
    return messages, usage["prompt_tokens"]


def goes_on(
    serve: Start, folder: Path, messages: Messages, *flags: str
) -> tuple[dict[str, Any], float]:
    """The last turn with the next server: its usage, and how many pages the disk had lost."""
    with serve(*DISK, str(folder), *flags) as process:
        usage = talk(process, messages, QUESTIONS[-1])
        num_lost = process.metric("disk_cache_lost_total")
        assert process.stop() == (0, "")
    return usage, num_lost


def terminate(process: Process) -> None:
    assert process.stop() == (0, "")


def kill(process: Process) -> None:
    """Once something is on disk."""
    while not json.loads(process.request("GET", "/api/v1/kv/stats")[1])["pages"]["stored"]:
        assert process.popen.poll() is None
    process.popen.kill()
    assert process.popen.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.slow
def test_after_a_restart_a_conversation_is_read_and_not_computed(
    serve: Start, tmp_path: Path, wanted: Messages
) -> None:
    messages, num_old = begin(serve, tmp_path, terminate)
    assert num_old > 3_000
    usage, num_lost = goes_on(serve, tmp_path, messages)
    assert messages == wanted
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= num_old - 2 * PAGE_SIZE
    assert usage["cache"]["tokens_from_disk"] == usage["cache"]["num_tokens"] == cached
    assert num_lost == 0


@pytest.mark.long
def test_after_a_kill_nothing_is_wrong(serve: Start, tmp_path: Path, wanted: Messages) -> None:
    messages, _ = begin(serve, tmp_path, kill)
    _, num_lost = goes_on(serve, tmp_path, messages)
    assert messages == wanted
    assert num_lost == 0  # a file is whole or not there


@pytest.mark.long
def test_another_model_in_between_changes_nothing(
    serve: Start, tmp_path: Path, wanted: Messages, model_folder: Callable[[str], Path]
) -> None:
    messages, num_old = begin(serve, tmp_path, terminate)
    with serve(*DISK, str(tmp_path), "--model", str(model_folder("llama"))) as process:
        usage = talk(process, [], "Hello!")
        assert usage["cache"]["tokens_from_disk"] == 0
    usage, _ = goes_on(serve, tmp_path, messages)
    assert messages == wanted
    assert usage["cache"]["tokens_from_disk"] >= num_old - 2 * PAGE_SIZE


@pytest.mark.long
def test_pages_that_were_cut_off_are_computed(
    serve: Start, tmp_path: Path, wanted: Messages
) -> None:
    messages, _ = begin(serve, tmp_path, terminate)
    for file in tmp_path.rglob("*.page"):
        file.write_bytes(file.read_bytes()[:-1])
    usage, num_lost = goes_on(serve, tmp_path, messages)
    assert messages == wanted
    assert usage["cache"]["reason"] == "lost"
    assert usage["cache"]["tokens_from_disk"] == 0
    assert num_lost > 0


@pytest.mark.long
def test_another_page_size_finds_nothing(serve: Start, tmp_path: Path, wanted: Messages) -> None:
    messages, _ = begin(serve, tmp_path, terminate)
    usage, num_lost = goes_on(serve, tmp_path, messages, "--page-size", "16", "--num-pages", "600")
    assert messages == wanted
    assert usage["cache"]["tokens_from_disk"] == num_lost == 0


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_said_before_the_model_is_served(
    serve: Start, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(AssertionError, match="Choose another disk_cache_dir"),
        serve(*DISK, str(tmp_path / "file")),
    ):
        raise RuntimeError("it has started")


@pytest.mark.slow
def test_a_named_prefix_is_there_after_a_restart(serve: Start, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    kept, revoked = (keys.create(name, KeyScope.USER) for name in ("kept", "revoked"))
    root = keys.create("root", KeyScope.ADMIN)
    flags = (*DISK, str(tmp_path / "pages"), "--keys-file", str(keys.path))
    rules = "You answer in one word. " * 40

    def ask(process: Process, secret: str, method: str, path: str, body: Any = None) -> Any:
        status, text = process.request(method, path, body, {"authorization": f"Bearer {secret}"})
        return status, json.loads(text)

    question = {"prompt": "Yes?", "prefix_name": "rules", "max_tokens": 4, "temperature": 0}
    with serve(*flags) as process:
        for secret in (kept, revoked):
            assert ask(process, secret, "PUT", "/v1/prefixes/rules", {"prompt": rules})[0] == 200
        _, before = ask(process, kept, "POST", "/v1/completions", question)
        terminate(process)
    keys.revoke("revoked")
    with serve(*flags) as process:
        status, after = ask(process, kept, "POST", "/v1/completions", question)
        assert status == 200
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        _, listed = ask(process, kept, "GET", "/v1/prefixes")
        assert [prefix["id"] for prefix in listed["data"]] == ["rules"]
        while ask(process, root, "GET", "/api/v1/kv/stats")[1]["pages"]["pinned"] == 0:
            assert process.popen.poll() is None
        terminate(process)
    [file] = (tmp_path / "pages").rglob("prefixes.json")
    assert "You answer" not in file.read_text()
