from pathlib import Path

import pytest

from mlxserve.api.access import Access, read_access
from mlxserve.errors import InvalidConfig

KEY = "0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n{KEY[::-1]}\n")
    file.chmod(0o600)
    return file


def test_loopback_needs_no_key():
    for host in ("127.0.0.1", "localhost", "::1"):
        assert read_access(host) == Access()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "studio.local", ""])
def test_listening_to_the_network_without_a_key_is_refused_with_what_to_do(host):
    with pytest.raises(InvalidConfig, match="MLXSERVE_API_KEY"):
        read_access(host)
    assert read_access(host, environment_key=KEY).api_keys == (KEY,)


def test_keys_come_from_the_file_and_the_environment(key_file):
    access = read_access("127.0.0.1", key_file=key_file, environment_key="another-long-key")
    assert access.api_keys == (KEY, KEY[::-1], "another-long-key")


def test_a_key_file_others_can_read_is_refused(key_file):
    key_file.chmod(0o640)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        read_access("127.0.0.1", key_file=key_file)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_key_file_without_keys_is_refused(key_file, text):
    key_file.write_text(text)
    with pytest.raises(InvalidConfig, match="holds no key"):
        read_access("127.0.0.1", key_file=key_file)


def test_a_key_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_access("127.0.0.1", key_file=tmp_path / "none")


@pytest.mark.parametrize(
    "key", ["short", "with a space in it", "naïve-long-enough-key", "x" * 20 + "\n"]
)
def test_a_weak_or_malformed_key_is_refused_and_not_shown(key):
    with pytest.raises(InvalidConfig) as caught:
        read_access("127.0.0.1", environment_key=key)
    assert key.strip() not in str(caught.value)


def test_a_server_on_one_address_answers_to_it():
    access = read_access("192.168.1.5", environment_key=KEY)
    assert access.hosts == ("192.168.1.5",)
    assert not access.any_address
    assert read_access("fe80::1", environment_key=KEY).hosts == ("[fe80::1]",)


def test_a_server_on_all_addresses_answers_to_each_of_them_and_to_its_names():
    access = read_access("0.0.0.0", environment_key=KEY, hosts=["Proxy.Example"])
    assert access.any_address
    assert "proxy.example" in access.hosts
    assert any(host.endswith(".local") for host in access.hosts)
    assert read_access("::", environment_key=KEY).any_address


@pytest.mark.parametrize(
    "origin", ["*", "null", "chat.example", "https://", "https://a/b", "file://x"]
)
def test_what_is_not_an_origin_is_refused(origin):
    with pytest.raises(InvalidConfig, match="not an origin"):
        read_access("127.0.0.1", origins=[origin])
