"""docs/sharing.md, run as it is written: by the owner of a server and by another user of the machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxserve.history.messages import Role
from mlxserve.history.store import Store
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOBODY = 65_534


def commands_of(page: Path) -> dict[str, list[str]]:
    """The commands of each section, by its heading."""
    sections = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        title: re.findall(r"^\$ (.+)$", text, re.MULTILINE)
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
    }


@dataclass
class User:
    """Runs commands with a shell. `number`: None for the user who runs the tests."""

    environment: dict[str, str]
    port: int
    number: int | None = None

    def run(self, line: str) -> str:
        """Run a line of the page, with a free port in place of 8000. Returns what it prints."""
        if export := re.fullmatch(r"export (\w+)=\S+", line):
            assert export[1] in self.environment, "it was given"
            return ""
        done = subprocess.run(
            ["bash", "-c", line.replace(":8000", f":{self.port}")],
            cwd="/",
            env=self.environment,
            user=self.number,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout


@pytest.fixture
def port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


@pytest.fixture
def you(tmp_path: Path, port: int) -> Iterator[User]:
    program = tmp_path / "bin" / "mlxserve"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m mlxserve "$@"\n')
    program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXSERVE_")}
    kept |= {"HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    user = User({**kept, "MLXSERVE_PORT": str(port)}, port)
    yield user
    subprocess.run(["bash", "-c", "mlxserve stop --all"], env=user.environment, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a command as another user")
def test_two_users_of_a_machine_share_a_server_as_the_page_says(
    you: User, port: int, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / ".mlxserve" / "chat.sqlite")
    store.add(store.create_chat("A private chat").id, None, Role.USER, "A private chat")
    store.close()
    page = commands_of(ROOT / "docs" / "sharing.md")
    create, serve = page["You"]
    key = you.run(create).strip()
    assert re.fullmatch(r"mlxserve-[\w-]+", key)
    you.run(serve)

    anna = User({"PATH": os.environ["PATH"], "MLXSERVE_API_KEY": key}, port, NOBODY)
    without, *_, models, chats = page["Anna"]
    assert "invalid_api_key" in anna.run(without)
    assert "mlxserve-mini" in anna.run(models)
    assert "A private chat" in you.run(chats.partition(" -H ")[0]), "the owner needs no key"
    assert anna.run(chats) == '{"object":"list","data":[]}'

    listed, revoke, stop = page["You, later"]
    assert re.search(r"^anna +user .*60 a minute", you.run(listed), re.MULTILINE)
    you.run(revoke)
    # It was the last key: models need none any more, and the owner's chats are still the owner's.
    wait_until(lambda: "mlxserve-mini" in anna.run(without))
    assert "chats_not_allowed" in anna.run(chats)
    you.run(stop)
