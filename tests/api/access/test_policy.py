from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy, keys_file, read_access
from mlxserve.api.config import ServerConfig
from mlxserve.core.errors import InvalidConfig

KEY = "0123456789abcdef"


def access_to(host: str, *, environment_key: str | None = None, **options: Any) -> AccessPolicy:
    options = {"keys_file": "none", **options}
    return read_access(ServerConfig(host=host, **options), environment_key)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n{KEY[::-1]}\n")
    file.chmod(0o600)
    return file


def test_loopback_needs_no_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        access = access_to(host)
        assert access == AccessPolicy(hosts=access.hosts)
        assert socket.gethostname().lower() in access.hosts


def test_listening_on_the_network_without_a_key_is_refused_with_instructions() -> None:
    for host in ["0.0.0.0", "::", "192.168.1.5", "studio.local", ""]:
        with pytest.raises(InvalidConfig, match="mlxserve key create"):
            access_to(host)
        assert access_to(host, environment_key=KEY).admin_keys == (KEY,), host


def test_keys_come_from_the_file_and_the_environment(key_file: Path) -> None:
    access = access_to("127.0.0.1", api_key_file=str(key_file), environment_key="another-long-key")
    assert access.api_keys == (KEY, KEY[::-1])
    assert access.admin_keys == ("another-long-key",)


def test_a_key_file_others_can_read_is_refused(key_file: Path) -> None:
    key_file.chmod(0o640)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        access_to("127.0.0.1", api_key_file=str(key_file))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_key_file_without_keys_is_refused(key_file: Path, text: str) -> None:
    key_file.write_text(text)
    with pytest.raises(InvalidConfig, match="holds no key"):
        access_to("127.0.0.1", api_key_file=str(key_file))


def test_a_key_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        access_to("127.0.0.1", api_key_file=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "key", ["short", "with a space in it", "naïve-long-enough-key", "x" * 20 + "\n"]
)
def test_a_weak_or_malformed_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        access_to("127.0.0.1", environment_key=key)
    assert key.strip() not in str(caught.value)


def test_a_server_on_one_address_accepts_it_as_host() -> None:
    access = access_to("192.168.1.5", environment_key=KEY)
    assert access.hosts[0] == "192.168.1.5"
    assert not access.any_address
    assert access_to("fe80::1", environment_key=KEY).hosts[0] == "[fe80::1]"


def test_a_server_on_all_addresses_accepts_any_address_and_its_own_names() -> None:
    access = access_to("0.0.0.0", environment_key=KEY, allowed_host=("Proxy.Example",))
    assert access.any_address
    assert access.allowed_hosts == ("proxy.example",)
    assert any(host.endswith(".local") for host in access.hosts)
    assert access_to("::", environment_key=KEY).any_address


def test_an_invalid_origin_is_refused() -> None:
    for origin in ["*", "null", "chat.example", "https://", "https://a/b", "file://x"]:
        with pytest.raises(InvalidConfig, match="not an origin"):
            access_to("127.0.0.1", allowed_origin=(origin,))


def test_created_keys_allow_listening_on_the_network(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(InvalidConfig):
        access_to("0.0.0.0", keys_file=str(file))
    secret = KeyFile(file).create("laptop", Scope.USER)
    ring = access_to("0.0.0.0", keys_file=str(file)).keyring()
    assert ring.find(secret).name == "laptop"


def test_the_key_file_is_in_the_configuration_folder_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert keys_file(None) == tmp_path / "mlxserve" / "keys.json"
    assert keys_file("none") is None
    assert keys_file("/x/y") == Path("/x/y")


def test_remote_images_are_of_the_domains_that_are_named() -> None:
    assert access_to("127.0.0.1").remote_images is None
    domains = access_to("127.0.0.1", allow_remote_images=("example.org",)).remote_images
    assert domains is not None
    assert domains.allow("cdn.example.org")
    assert not domains.allow("example.com")
    for text in ("true", "https://example.org", "example.org:80", "*.example.org"):
        with pytest.raises(InvalidConfig, match=r"--allow-remote-images .*example\.org"):
            access_to("127.0.0.1", allow_remote_images=(text,))
