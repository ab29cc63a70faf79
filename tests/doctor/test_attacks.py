"""The attacks: our server refuses each of them, and a server that accepts everything is found out."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator

import pytest

from mlxserve import cli
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.doctor.attacks import ATTACKS, AttackOutcome, AttackResult, Target, examine
from mlxserve.errors import InvalidConfig, MlxServeError
from tests.api.fake_chat import FakeChat
from tests.api.serving import serving

KEY = "0123456789abcdef"
SMALL = [attack for attack in ATTACKS if len(attack.body) + len(attack.extra) < 1_000]


class AcceptAll(http.server.BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_POST = do_OPTIONS = answer

    def log_message(self, *args: object) -> None:
        """Silent."""


@pytest.fixture
def permissive_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), AcceptAll) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def with_outcome(results: list[AttackResult], outcome: AttackOutcome) -> list[str]:
    return [str(result) for result in results if result.outcome is outcome]


def test_the_command_prints_the_table_and_exits_with_1_for_an_accepted_attack(
    permissive_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlxserve.doctor.attacks.ATTACKS", ATTACKS[:3])

    def run(url: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["mlxserve", "doctor", "--security", "--url", url])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), capsys.readouterr().out.splitlines()

    with serving(FakeChat()) as server:
        code, lines = run(server.url)
    assert (code, len(lines)) == (0, 1 + 3 + 1 + 1)
    assert lines[0].split() == ["attack", "expected", "got"]
    assert lines[1].startswith("ok   another name in Host")
    assert lines[-1] == "4 refused as expected, 0 not refused, 0 skipped"
    code, lines = run(permissive_url)
    assert (code, lines[1][:3]) == (1, "BAD")


@pytest.fixture(scope="module")
def results() -> list[AttackResult]:
    """Of all attacks on our server with a key, then of its health."""
    with serving(FakeChat(), access=AccessPolicy(api_keys=[KEY])) as server:
        return list(examine(server.url, KEY))


@pytest.mark.parametrize("number", range(len(ATTACKS)), ids=[attack.name for attack in ATTACKS])
def test_our_server_refuses(results: list[AttackResult], number: int) -> None:
    assert results[number].attack is ATTACKS[number]
    assert results[number].outcome is AttackOutcome.REFUSED, results[number]


def test_our_server_is_healthy_after_all_attacks(results: list[AttackResult]) -> None:
    assert len(results) == len(ATTACKS) + 1
    assert results[-1].got == "200"


def test_on_a_local_server_without_keys_the_attacks_on_keys_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxserve.doctor.attacks.ATTACKS", SMALL)
    with serving(FakeChat()) as server:
        results = list(examine(server.url, None))
    assert with_outcome(results, AttackOutcome.ACCEPTED) == []
    skipped = with_outcome(results, AttackOutcome.SKIPPED)
    assert len(skipped) == 4
    assert all("key" in row for row in skipped)


def test_a_server_that_accepts_everything_is_found_out(
    permissive_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.doctor.attacks.ATTACKS", SMALL)
    results = list(examine(permissive_url, None))
    assert len(with_outcome(results, AttackOutcome.ACCEPTED)) > 25
    assert results[-1].outcome is AttackOutcome.REFUSED


def test_a_missing_server_and_an_invalid_url_are_errors() -> None:
    with pytest.raises(MlxServeError, match="No server answers"):
        list(examine("http://127.0.0.1:1", None))
    for url in ("ftp://x", "127.0.0.1:8000", "http://", "http://x:y"):
        with pytest.raises(InvalidConfig, match="is not a URL"):
            Target(url, None)
