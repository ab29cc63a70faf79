"""Memory limits of Linux's control groups: containers, systemd's MemoryMax.

A process is in one group of version 2 and in one of version 1's memory groups; the limits of all
that they lie in hold. `/proc/self/cgroup` names the groups and `/proc/self/mountinfo` where they
are:

    0::/user.slice/mlxserve.service         a container sees its own group as /, or its full path,
    4:memory:/docker/4711                   of which a part is the root of the mount
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_SYSTEM = Path("/")


def group_limits(system: Path = _SYSTEM) -> list[int]:
    """Bytes of each effective limit; empty without control groups. `system`: for tests."""
    limits = []
    for mount, folder, file in _groups(system):
        for group in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limits.append(int((group / file).read_text(encoding="ascii")))
            if group == mount:
                break
    return limits


def _groups(system: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yield (mount, folder of this process's group, file with its limit)."""
    try:
        own = (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (system / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    groups = {tuple(line.split(":", 2)[1].split(",")): line.split(":", 2)[2] for line in own}
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        _, _, _, root, point, *_ = fields.split(" ")
        kind, _, options = rest.split(" ")[:3]
        if kind == "cgroup2":
            wanted, file = "", "memory.max"
        elif kind == "cgroup" and "memory" in options.split(","):
            wanted, file = "memory", "memory.limit_in_bytes"
        else:
            continue
        path = next((path for names, path in groups.items() if wanted in names), "/")
        mount = system / point.lstrip("/")
        yield mount, _below(mount, root, path), file


def _below(mount: Path, root: str, path: str) -> Path:
    """Return the folder of a group; the mount itself if the group is not below its root."""
    whole = root.rstrip("/") + "/"
    if path.startswith(whole) and ".." not in path.split("/"):
        return mount / path.removeprefix(whole)
    return mount
