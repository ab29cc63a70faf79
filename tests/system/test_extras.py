"""The command that adds packages fits the way in which mlxserve was installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mlxserve.system import extras
from mlxserve.system.extras import extra_command, package_command

Origin = dict[str, object]


class FakeDistribution:
    """What an installer has written about mlxserve."""

    def __init__(self, origin: Origin | str | None) -> None:
        self._text = origin if isinstance(origin, str) or origin is None else json.dumps(origin)

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._text


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own, whose Python lies in the user's folder."""
    folder = tmp_path / "me" / "an env"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "me")
    return folder


def come_from(monkeypatch: pytest.MonkeyPatch, origin: Origin | str | None) -> None:
    monkeypatch.setattr(extras, "distribution", lambda _name: FakeDistribution(origin))


def have_pip(monkeypatch: pytest.MonkeyPatch, *, is_there: bool) -> None:
    monkeypatch.setattr(
        extras.importlib.util, "find_spec", lambda _name: object() if is_there else None
    )


def checkout(tmp_path: Path, **info: bool) -> Origin:
    folder = tmp_path / "me" / "my src"
    folder.mkdir(exist_ok=True)
    return {"url": folder.as_uri(), "dir_info": info}


def test_a_tool_of_uv_is_installed_again_from_its_checkout_and_keeps_its_extras(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come_from(monkeypatch, checkout(tmp_path))
    receipt = prefix / "uv-receipt.toml"
    receipt.write_text('[tool]\nrequirements = [{ name = "mlxserve", directory = "/a" }]\n')
    assert extra_command("documents") == "uv tool install --reinstall ~/'my src[documents]'"
    receipt.write_text('[tool]\nrequirements = [{ name = "mlxserve", extras = ["mcp"] }]\n')
    assert extra_command("documents").endswith(" ~/'my src[documents,mcp]'")


@pytest.mark.parametrize("text", ["[tool", "[tool]\n", ""])
def test_a_receipt_that_says_nothing_leaves_the_extra_alone(
    text: str, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come_from(monkeypatch, checkout(tmp_path))
    (prefix / "uv-receipt.toml").write_text(text)
    assert extra_command("mcp").endswith(" ~/'my src[mcp]'")


@pytest.mark.usefixtures("prefix")
def test_an_environment_is_extended_by_its_own_pip_or_by_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come_from(monkeypatch, checkout(tmp_path, editable=True))
    have_pip(monkeypatch, is_there=True)
    python = "~/'an env/bin/python'"
    assert extra_command("mcp") == f"{python} -m pip install -e ~/'my src[mcp]'"
    assert package_command("pillow>=11") == f"{python} -m pip install 'pillow>=11'"
    have_pip(monkeypatch, is_there=False)
    assert extra_command("mcp") == f"uv pip install --python {python} -e ~/'my src[mcp]'"
    assert package_command("a", "b", flags="--no-deps").endswith(" --no-deps a b")


@pytest.mark.usefixtures("prefix")
@pytest.mark.parametrize(
    "origin", [None, "{", {"url": "file:///no/such/checkout"}, {"url": "https://a.example/b"}]
)
def test_without_a_checkout_the_index_has_it(
    origin: Origin | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    come_from(monkeypatch, origin)
    assert extra_command("mcp").endswith(" 'mlxserve[mcp]'")
