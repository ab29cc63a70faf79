"""After a kill at any moment the next process can use the files, and every confirmed key is there.

The writers are forks of a small process, because two hundred starts of a server would take minutes;
what they do to the disk is what a server does: cached pages, and keys.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import os, random, signal, sys, time
from pathlib import Path
from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.disk.tier import DiskTier

base, loops = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(22)
file, pages = KeyFile(base / "keys.json"), base / "pages"
OPTIONS = {"identity": b"i" * 16, "limit": 20 * 17_000, "daily_writes": 1 << 40}


def page(name):
    return name * 1_024


def write(loop, said):
    """Like a server: writes until it is killed."""
    tier = DiskTier(pages, **OPTIONS)
    number = 0
    while True:
        name = rng.randbytes(16)
        tier.save([(name, page(name))])
        name = f"{loop}.{number}"
        file.create(name, Scope.USER)
        os.write(said, f"+{name}\\n".encode())
        if number:
            os.write(said, f"-{loop}.{number - 1}\\n".encode())
            file.revoke(f"{loop}.{number - 1}")
        number += 1


kept = set()
for loop in range(loops):
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(heard)
        write(loop, said)
    os.close(said)
    if rng.random() < 0.8:  # else perhaps while it starts
        assert os.read(heard, 1) == b"+"
    time.sleep(rng.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    words = b"+"
    while piece := os.read(heard, 65_536):
        words += piece
    os.close(heard)
    for word in words.decode().split():
        if word.lstrip("+") and word.startswith(("+", "-")):
            name = word.lstrip("+-")
            (kept.discard if word.startswith("-") else kept.add)(name)
    found = {key.name for key in file.read()}
    lost = kept - found
    assert not lost, (loop, lost)
    assert len(found - kept) <= 2 * (loop + 1), found  # made or unmade, and not yet said

tier = DiskTier(pages, **OPTIONS)
assert tier.flush(60)
names = [bytes.fromhex(each.stem) for each in pages.rglob("*.page")]
assert names and tier.use().num_pages == len(names)
for name in names:
    tier.load([name])
assert tier.flush(60)
assert [answer.payloads for answer in tier.poll()] == [(page(name),) for name in names]
assert tier.use().num_lost == 0
tier.close()
print("sound", loops, len(kept))
'''


@pytest.mark.parametrize("loops", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_files_are_intact_after_a_kill(tmp_path: Path, loops: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(loops)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"sound {loops}")
