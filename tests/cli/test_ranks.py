"""What mlx.launch is told by commands that run on several machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Run


@pytest.mark.parametrize("of_the_user", [None, "1"])
def test_every_rank_hands_over_from_gpu_to_cpu_as_this_machine_is_told_to(
    of_the_user: str | None, tmp_path: Path
) -> None:
    hosts, told = tmp_path / "hosts.json", tmp_path / "told"
    hosts.write_text("[]")
    launcher = tmp_path / "mlx.launch"
    launcher.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    launcher.chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "MLX_METAL_FAST_SYNCH"}
    if of_the_user is not None:
        environment["MLX_METAL_FAST_SYNCH"] = of_the_user
    subprocess.run(
        [sys.executable, "-m", "mlxserve", "doctor", "--hostfile", str(hosts)],
        env={**environment, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=True,
    )
    before, _, _ = told.read_text().partition("--\n")
    options = before.splitlines()
    assert options[:2] == ["--hostfile", str(hosts)]
    given = [options[at + 1] for at, name in enumerate(options) if name == "--env"]
    assert given == ([] if of_the_user is None else [f"MLX_METAL_FAST_SYNCH={of_the_user}"])


@pytest.mark.parametrize("code", [0, 2])
def test_doctor_ends_with_the_exit_code_of_the_launcher(
    code: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, launcher = tmp_path / "hosts.json", tmp_path / "mlx.launch"
    hosts.write_text("{")
    launcher.write_text(f"#!/bin/sh\nexit {code}\n")
    launcher.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert run("doctor", "--hostfile", str(hosts)).code == code
