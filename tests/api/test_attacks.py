"""The examination finds nothing wrong with our server, and everything with one that says yes."""

import http.server
import sys
import threading
from collections.abc import Iterator

import pytest

from mlxserve import cli
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.doctor.attacks import ATTACKS, AttackOutcome, AttackResult, Peer, examine
from mlxserve.errors import InvalidConfig, MlxServeError

KEY = "0123456789abcdef"
SMALL = [one for one in ATTACKS if len(one.body) + len(one.extra) < 1_000]


class YesMan(http.server.BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_POST = do_OPTIONS = answer

    def log_message(self, *args: object) -> None:
        """Silent."""


@pytest.fixture
def yes_man() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), YesMan) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def by_outcome(rows: list[AttackResult], outcome: AttackOutcome) -> list[str]:
    return [str(row) for row in rows if row.outcome is outcome]


def test_the_command_prints_the_table_and_its_exit_code_is_the_verdict(
    start_server, yes_man, monkeypatch, capsys
):
    monkeypatch.setattr("mlxserve.doctor.attacks.ATTACKS", ATTACKS[:3])

    def run(url: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["mlxserve", "doctor", "--security", "--url", url])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), capsys.readouterr().out.splitlines()

    code, lines = run(start_server().url)
    assert (code, len(lines)) == (0, 1 + 3 + 1 + 1)
    assert lines[0].split() == ["attack", "expected", "got"]
    assert lines[1].startswith("ok   another name in Host")
    assert lines[-1] == "4 refused as expected, 0 not refused, 0 skipped"
    code, lines = run(yes_man)
    assert (code, lines[1][:3]) == (1, "BAD")


def test_our_server_refuses_everything(start_server):
    server = start_server(access=AccessPolicy(api_keys=[KEY]))
    rows = list(examine(server.url, KEY))
    assert by_outcome(rows, AttackOutcome.ACCEPTED) == []
    assert by_outcome(rows, AttackOutcome.SKIPPED) == []
    assert len(rows) == len(ATTACKS) + 1


def test_a_server_of_this_machine_alone_needs_no_key(start_server, monkeypatch):
    monkeypatch.setattr("mlxserve.doctor.attacks.ATTACKS", SMALL)
    rows = list(examine(start_server().url, None))
    assert by_outcome(rows, AttackOutcome.ACCEPTED) == []
    assert all("key" in row for row in by_outcome(rows, AttackOutcome.SKIPPED))
    assert len(by_outcome(rows, AttackOutcome.SKIPPED)) == 4


def test_a_server_that_says_yes_is_found_out(yes_man, monkeypatch):
    monkeypatch.setattr("mlxserve.doctor.attacks.ATTACKS", SMALL)
    rows = list(examine(yes_man, None))
    assert len(by_outcome(rows, AttackOutcome.ACCEPTED)) > 25
    assert rows[-1].outcome is AttackOutcome.REFUSED


def test_nobody_at_the_address_is_said_so():
    with pytest.raises(MlxServeError, match="No server answers"):
        list(examine("http://127.0.0.1:1", None))
    for url in ("ftp://x", "127.0.0.1:8000", "http://", "http://x:y"):
        with pytest.raises(InvalidConfig, match="is not an address"):
            Peer(url, None)
