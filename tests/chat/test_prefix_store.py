"""PrefixStore: names and tokens outlive the process, salts only as digests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mlxserve.chat.prefix_store import NamedPrefix, PrefixStore
from mlxserve.core.errors import UnknownPrefix

RULES = NamedPrefix((1, 2, 3), b"salt" * 4, "key", 0.5, "request-1")
TERMS = NamedPrefix((4,), b"other salt here!", request_id="request-2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prefixes.json"


def test_names_outlive_the_process_and_pages_do_not(file: Path) -> None:
    before = PrefixStore(file)
    assert before.put("rules", RULES) is None
    assert before.put("terms", TERMS) is None
    after = PrefixStore(file)
    assert after.sizes() == {"rules": 3, "terms": 1}
    found = after.find("rules")
    assert found == NamedPrefix((1, 2, 3), b"salt" * 4, "key", 0.5)
    assert [name for name, _ in after.missing()] == ["rules", "terms"]
    assert before.missing() == []
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_removed_or_replaced_one_stays_so(file: Path) -> None:
    before = PrefixStore(file)
    before.put("rules", RULES)
    before.put("terms", TERMS)
    assert before.put("rules", TERMS) == RULES
    assert before.remove("terms") == TERMS
    assert PrefixStore(file).sizes() == {"rules": 1}
    with pytest.raises(UnknownPrefix):
        before.remove("terms")


def test_two_servers_of_a_model_share_the_file(file: Path) -> None:
    one, other = PrefixStore(file), PrefixStore(file)
    one.put("rules", RULES)
    other.put("terms", TERMS)
    assert PrefixStore(file).sizes() == {"rules": 3, "terms": 1}
    one.remove("rules")
    assert PrefixStore(file).sizes() == {"terms": 1}


def test_what_was_changed_while_it_was_computed_is_not_computed(file: Path) -> None:
    PrefixStore(file).put("rules", RULES)
    prefixes = PrefixStore(file)
    [(name, prefix)] = prefixes.missing()
    prefixes.put(name, TERMS)
    assert not prefixes.computed(name, prefix, "request-9")
    assert prefixes.find(name) is TERMS
    prefixes.remove(name)
    assert not prefixes.computed(name, prefix, "request-9")


def test_what_was_computed_is_not_missing(file: Path) -> None:
    PrefixStore(file).put("rules", RULES)
    prefixes = PrefixStore(file)
    [(name, prefix)] = prefixes.missing()
    assert prefixes.computed(name, prefix, "request-9")
    assert prefixes.missing() == []
    assert prefixes.find("rules").request_id == "request-9"


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    PrefixStore().put("rules", RULES)
    assert PrefixStore().sizes() == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"version": 2, "prefixes": {}}',
        b'{"version": 1}',
        b'{"version": 1, "prefixes": {"a": {"token_ids": [], "salt": "", "max_share": 1, "client": ""}}}',
        b'{"version": 1, "prefixes": {"a": {"token_ids": [-1], "salt": "", "max_share": 1, "client": ""}}}',
        b'{"version": 1, "prefixes": {"a": {"token_ids": [99999999999], "salt": "", "max_share": 1,'
        b' "client": ""}}}',
        b'{"version": 1, "prefixes": {"a": {"token_ids": [1], "salt": "", "max_share": 1e400,'
        b' "client": ""}}}',
        b"[" * 100_000,
    ],
    ids=lambda content: content[:40].decode("latin-1"),
)
def test_a_damaged_file_is_kept_aside(
    file: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_bytes(content)
    prefixes = PrefixStore(file)
    assert prefixes.sizes() == {}
    assert len([r for r in caplog.records if "cannot be read" in r.message]) == 1
    assert file.with_name("prefixes.json.damaged").read_bytes() == content
    prefixes.put("rules", RULES)
    assert json.loads(file.read_text())["prefixes"].keys() == {"rules"}


def test_what_is_no_file_is_kept_aside(file: Path) -> None:
    os.mkfifo(file)
    prefixes = PrefixStore(file)
    prefixes.put("rules", RULES)
    assert PrefixStore(file).sizes() == {"rules": 3}


def test_a_disk_that_refuses_loses_nothing_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefixes = PrefixStore(tmp_path / "no folder" / "prefixes.json")
    prefixes.put("rules", RULES)
    assert prefixes.find("rules") is RULES
    assert "are lost at the end of this process" in caplog.text
