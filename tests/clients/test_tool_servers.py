"""Two servers of tools as they are published, if they are on the PATH: mcp-server-time and mcp-server-git."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mlxserve.mcp.toolbox import Toolbox
from tests.mcp.kept_settings import KeptSettings, write_servers

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        shutil.which("mcp-server-time") is None or shutil.which("mcp-server-git") is None,
        reason="needs mcp-server-time and mcp-server-git, for example by pip",
    ),
]


def test_published_servers_start_answer_and_end(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git[:3], "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first words"], check=True)
    servers = {"time": {"command": "mcp-server-time"}, "git": {"command": "mcp-server-git"}}
    file = write_servers(tmp_path / "mcp.json", servers)

    async def story() -> None:
        toolbox = Toolbox(file, KeptSettings())
        await toolbox.start()
        try:
            assert [card.problem for card in toolbox.cards] == ["", ""]
            converted = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
            tokyo = await toolbox.call("time__convert_time", json.dumps(converted))
            assert "T21:00:00+09:00" in tokyo.text
            nowhere = await toolbox.call("time__get_current_time", '{"timezone": "Nowhere"}')
            assert nowhere.is_error
            log = await toolbox.call("git__git_log", json.dumps({"repo_path": str(tmp_path)}))
            assert "first words" in log.text
        finally:
            await toolbox.close()

    asyncio.run(story())
