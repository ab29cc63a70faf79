"""Stores that are set up in other ways: with TLS, as a node of a cluster, Valkey."""

from __future__ import annotations

import logging
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from mlxserve.disk.tier import DiskState
from tests.fleet.redis_server import RedisServer
from tests.fleet.test_store_faults import NAMES, PAYLOADS, Open, load, open_tier, save, state
from tests.waiting import wait_until

pytestmark = pytest.mark.fleet

__all__ = ["open_tier"]

_VALKEY = shutil.which("valkey-server")


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A certificate for 127.0.0.1, which is its own authority, beside its key."""
    # `certificates_are_read_once` gives all clients one context, which would trust what one of them trusts.
    make_context: Any = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", make_context.__wrapped__)
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("not run: it needs openssl")
    folder = tmp_path / "tls"
    folder.mkdir()
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem"


@pytest.fixture
def tls_store(certificate: Path, tmp_path: Path) -> Iterator[RedisServer]:
    key = certificate.with_name("key.pem")
    server = RedisServer(
        tmp_path,
        *("--port", "0", "--tls-port", "PORT", "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(certificate)),
        client_options={"ssl": True, "ssl_ca_certs": str(certificate)},
    )
    yield server
    server.stop()


def test_a_store_with_tls(tls_store: RedisServer, certificate: Path, open_tier: Open) -> None:
    url = tls_store.url.replace("redis://", "rediss://")
    known = f"{url}?ssl_ca_certs={quote(str(certificate))}"
    save(open_tier(known))
    assert load(open_tier(known)) == tuple(PAYLOADS)
    assert len(tls_store.keys()) == len(NAMES)


@pytest.mark.parametrize("scheme", ["rediss", "redis"])
def test_a_store_whose_certificate_nobody_knows_is_not_used(
    scheme: str, tls_store: RedisServer, open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither with TLS and another authority, nor without TLS."""
    caplog.set_level(logging.WARNING)
    tier = open_tier(tls_store.url.replace("redis://", f"{scheme}://"))
    assert load(tier) == ()
    wait_until(lambda: state(tier) == DiskState.STALLED)
    assert "does not answer" in caplog.text
    assert tls_store.keys() == []


def test_a_cluster_of_one_node(tmp_path: Path, open_tier: Open) -> None:
    server = RedisServer(tmp_path, "--cluster-enabled", "yes")
    try:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
            wait_until(lambda: client.cluster("info")["cluster_state"] == "ok")
        writer = open_tier(server.url)
        save(writer)
        reader = open_tier(server.url)
        assert load(reader) == tuple(PAYLOADS)
        # The names are in several slots, and are counted as used and deleted in one call each.
        reader.touch(dict.fromkeys(NAMES, 1.0))
        assert reader.flush(60.0)
        assert state(reader) == DiskState.WORKS
        assert reader.delete(NAMES) == len(NAMES)
        wait_until(lambda: server.keys() == [])
    finally:
        server.stop()


@pytest.mark.skipif(_VALKEY is None, reason="not run: it needs valkey-server")
def test_valkey(tmp_path: Path, open_tier: Open) -> None:
    server = RedisServer(tmp_path, program=_VALKEY)
    try:
        save(open_tier(server.url))
        assert load(open_tier(server.url)) == tuple(PAYLOADS)
    finally:
        server.stop()
