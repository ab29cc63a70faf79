"""The limits of control groups, of both versions, wherever in the tree they are set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxserve.system import machine
from mlxserve.system.memory_groups import group_limits

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
DISK = "24 1 8:1 / / rw - ext4 /dev/sda1 rw"
MAX_V1 = str(0x7FFFFFFFFFFFF000)


@pytest.fixture
def system(tmp_path: Path) -> Callable[..., Path]:
    def make(own: str, mounts: tuple[str, ...], limits: Mapping[str, str]) -> Path:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(own)
        (tmp_path / "proc/self/mountinfo").write_text("\n".join((DISK, *mounts)) + "\n")
        for name, limit in limits.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{limit}\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("own", "mounts", "limits", "wanted"),
    [
        ("0::/\n", (V2,), {"memory.max": "300"}, [300]),
        ("0::/\n", (V2,), {"memory.max": "max"}, []),
        (
            "0::/user.slice/mlxserve.service\n", (V2,),
            {"user.slice/mlxserve.service/memory.max": "300", "user.slice/memory.max": "max"}, [300],
        ),
        (
            "0::/user.slice/mlxserve.service\n", (V2,),
            {"user.slice/mlxserve.service/memory.max": "max", "user.slice/memory.max": "500"}, [500],
        ),
        (
            "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n", (CPU, V1),
            {"memory/a/b/memory.limit_in_bytes": "300",
             "memory/memory.limit_in_bytes": MAX_V1, "cpu/a/memory.limit_in_bytes": "1"},
            [300, int(MAX_V1)],
        ),
        (
            "4:memory:/docker/4711\n", (V1.replace(" / /sys", " /docker/4711 /sys"),),
            {"memory/memory.limit_in_bytes": "300"}, [300],
        ),
        (
            "0::/../other\n", (V2,), {"memory.max": "300"}, [300],
        ),
        (
            "4:memory:/a\n0::/b\n", (V1, V2.replace("cgroup rw,nosuid", "cgroup/unified rw,nosuid")),
            {"memory/a/memory.limit_in_bytes": "300", "unified/b/memory.max": "200"}, [300, 200],
        ),
        ("", (), {}, []),
    ],
    ids=["container", "without", "unit", "slice", "version 1", "namespace of 1", "outside", "both",
         "no groups"],
)  # fmt: skip
def test_every_group_that_holds_this_process_is_read(
    system: Callable[..., Path], own: str, mounts: tuple[str, ...], limits: dict[str, str],
    wanted: list[int],
) -> None:  # fmt: skip
    assert group_limits(system(own, mounts, limits)) == wanted


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert group_limits(tmp_path) == []


def test_memory_is_the_least_of_the_machine_and_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limits, wanted in (([], whole), ([3 << 20, 1 << 62], 3 << 20), ([1 << 62], whole)):
        monkeypatch.setattr(machine, "group_limits", lambda limits=limits: limits)
        assert machine.total_memory.__wrapped__() == wanted
