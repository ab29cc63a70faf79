import os
import stat
from pathlib import Path

import pytest

from tui.home import MAX_LOGS, Home


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "here"))
    assert Home.from_environment().chats == tmp_path / "here" / "chat.sqlite"


def test_the_default_folder_is_hidden_in_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MLXSERVE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Home.from_environment().folder == tmp_path / ".mlxserve"


def test_only_the_owner_can_read_folders_and_logs(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    log = home.new_log("a.log")
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_old_logs_are_removed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for number in range(MAX_LOGS + 3):
        os.utime(home.new_log(f"{number}.log"), (number, number))
    home.new_log("last.log")
    names = {log.name for log in home.logs.glob("*.log")}
    assert len(names) == MAX_LOGS
    assert "last.log" in names
    assert "0.log" not in names


def test_a_symbolic_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (home.logs / "a.log").symlink_to(victim)
    with pytest.raises(OSError, match=r"a\.log"):
        home.new_log("a.log")
    assert victim.read_text() == "precious"
