"""The server process: shutdown, signals, kills, keys."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
from pathlib import Path

import pytest

from mlxserve.api.access.keys import KeyFile
from mlxserve.api.access.keys import Scope as KeyScope
from tests.api.server.process import (
    CHAT,
    COMPLETIONS,
    HELLO,
    Start,
    send_endless_request,
)


@pytest.mark.slow
def test_running_answers_end_with_a_readable_error_at_shutdown(
    start: Start,
) -> None:
    with (
        start("--drain-seconds", "0") as process,
        send_endless_request(process, stream=True) as peer,
    ):
        process.wait_for_metric("num_requests_running", 1)
        process.popen.send_signal(signal.SIGTERM)
        data = b""
        while piece := peer.recv(1_000_000):
            data += piece
        assert b'"error":{"message":' in data[-1_000:]
        assert b"[DONE]" not in data
        process.popen.communicate(timeout=60)
        assert process.popen.returncode == 0
        assert "Traceback" not in process.log.read_text()


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(start: Start) -> None:
    flags = ("--drain-seconds", "600")
    with start(*flags) as process, send_endless_request(process, stream=False):
        process.wait_for_metric("num_requests_running", 1)
        process.popen.send_signal(signal.SIGTERM)
        while "Shutting down" not in process.log.read_text():
            assert process.popen.poll() is None
        process.popen.send_signal(signal.SIGTERM)
        process.popen.communicate(timeout=60)
        assert process.popen.returncode == 0


@pytest.mark.long
def test_a_server_killed_under_load_starts_again(start: Start, tmp_path: Path) -> None:
    """Killed while answers stream, pages are written to disk and keys are created: the next server
    gives the same answer and knows the keys."""
    keys, draw = KeyFile(tmp_path / "keys.json"), random.Random(22)
    secret = keys.create("first", KeyScope.ADMIN)
    headers = {"authorization": f"Bearer {secret}"}
    flags = ["--keys-file", str(keys.path), "--num-pages", "200", "--max-model-len", "2400"]
    flags += ["--preemption-mode", "swap", "--max-num-seqs", "4"]
    flags += ["--disk-cache-size", "1", "--disk-cache-dir", str(tmp_path / "pages")]
    question = {"messages": HELLO, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    texts = set()
    num_kills = 5
    for loop in range(num_kills):
        with start(*flags) as process, contextlib.ExitStack() as stack:
            status, text = process.request("POST", CHAT, question, headers)
            assert status == 200, text
            texts.add(json.loads(text)["choices"][0]["message"]["content"])
            peers = [
                stack.enter_context(send_endless_request(process, stream=True, key=secret))
                for _ in range(4)
            ]
            keys.create(f"of-{loop}", KeyScope.USER)
            for peer in peers:
                seen, enough = 0, draw.randrange(1, 20_000)
                while seen < enough:
                    seen += len(peer.recv(4_096))
            process.popen.kill()
            assert process.popen.wait(timeout=30) == -signal.SIGKILL
            for peer in peers:
                with contextlib.suppress(ConnectionError):
                    while peer.recv(1_000_000):
                        pass  # every client sees the end
    with start(*flags) as process:
        status, text = process.request("POST", CHAT, question, headers)
        assert status == 200
        texts.add(json.loads(text)["choices"][0]["message"]["content"])
        assert process.stop() == (0, "")
    assert len(texts) == 1
    assert {key.name for key in keys.read()} == {
        "first",
        *(f"of-{loop}" for loop in range(num_kills)),
    }


@pytest.mark.slow
def test_the_server_ends_when_its_stdin_does(start: Start) -> None:
    with start("--exit-with-parent", stdin=subprocess.PIPE) as process:
        assert process.request("GET", "/health")[0] == 200
        process.popen.stdin.close()
        assert process.popen.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_server_on_every_address_needs_a_key_and_ctrl_c_ends_it(
    start: Start, tmp_path: Path
) -> None:
    keys = ["k" * 32, "q" * 32]
    key_file = tmp_path / "keys"
    key_file.write_text(keys[1])
    key_file.chmod(0o600)
    flags = ("--host", "0.0.0.0", "--api-key-file", str(key_file))
    with start(*flags, env={"MLXSERVE_API_KEY": keys[0]}) as process:
        assert "0.0.0.0" not in process.url
        assert process.request("GET", "/v1/models")[0] == 401
        first, second = ({"authorization": f"Bearer {key}"} for key in keys)
        assert process.request("GET", "/v1/models", headers=first)[0] == 200
        rebound = {**first, "host": "evil.example"}
        assert process.request("GET", "/v1/models", headers=rebound)[0] == 403
        by_address = {**first, "host": "192.168.7.7:8000"}
        assert process.request("GET", "/v1/models", headers=by_address)[0] == 200

        def cached_tokens(headers: dict[str, str]) -> int:
            body = {"prompt": [7] * 100, "max_tokens": 1}
            reply = json.loads(process.request("POST", COMPLETIONS, body, headers)[1])
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached_tokens(first) == 0
        assert cached_tokens(first) > 0
        assert cached_tokens(second) == 0  # keys do not share cached pages
        assert cached_tokens(second) > 0
        process.popen.send_signal(signal.SIGINT)
        rest, _ = process.popen.communicate(timeout=60)
        assert (process.popen.returncode, rest) == (0, "")
        log = process.log.read_text()
        assert "Traceback" not in log
        assert not any(key in log for key in keys)
