"""The address of a page store is checked, and shown without its secrets."""

from __future__ import annotations

import pytest

from mlxserve.core.config import EngineConfig, SchedulerConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.store_url import shown_store


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://studio.local", "redis://studio.local:6379"),
        ("redis://:s3cret@studio.local:7000/2", "redis://studio.local:7000"),
        ("rediss://me:s3cret@studio.local:7000?ssl_ca_certs=/ca", "rediss://studio.local:7000"),
        ("redis://[::1]:7000", "redis://[::1]:7000"),
        ("unix://me:s3cret@/run/store", "unix:///run/store"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert EngineConfig(page_store=url).page_store == url
    assert shown_store(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "studio.local:6379",
        "http://:s3cret@studio.local",
        "redis://",
        "redis://:s3cret@",
        "redis://:s3cret@studio.local:port",
        "redis://:s3cret@studio.local:0",
        "redis://:s3cret@studio.local:70000",
        "unix://",
        "redis://[s3cret",
    ],
)
def test_a_wrong_address_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(InvalidConfig, match="page_store must be redis://HOST:PORT") as refused:
        EngineConfig(page_store=url)
    assert "s3cret" not in str(refused.value)


def test_a_store_needs_the_prefix_cache() -> None:
    url = "redis://studio.local"
    with pytest.raises(InvalidConfig, match="which enable_prefix_caching=false turns off"):
        EngineConfig(page_store=url, scheduler=SchedulerConfig(enable_prefix_caching=False))
