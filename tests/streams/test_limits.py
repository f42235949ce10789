"""The limits of a container, read from control groups of both versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from relaygr.runtime.limits import Memory, available_memory, cpu_quota, usable_cores
from tests.worlds.container import memory_limit

GIB = 1 << 30
UNLIMITED_V1 = "9223372036854771712"
V2_MOUNT = "35 24 0:30 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate"
V1_MOUNTS = (
    "33 31 0:30 {shown} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {shown} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB, of which 20 are available, and of eight cores."""
    memory = SimpleNamespace(available=20 * GIB, total=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)


class Tree:
    """`/proc` and `/sys` of a container, in a folder."""

    def __init__(self, root: Path, mounts: str, groups: str, shown: str = "/") -> None:
        self.root = root
        self.write("proc/self/mountinfo", mounts.format(shown=shown))
        self.write("proc/self/cgroup", groups)

    def write(self, path: str, text: object) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")

    def v2(self, group: str, **files: object) -> None:
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{group}/{name.replace('_', '.', 1)}", text)

    def memory_v1(self, group: str, limit: object, used: int, stat: str = "") -> None:
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        self.write(f"{folder}/memory.stat", stat)


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == Memory(20 * GIB, 64 * GIB)
    assert (cpu_quota(tmp_path), usable_cores(tmp_path)) == (None, 8)


def test_a_container_of_version_2(tmp_path: Path) -> None:
    """Page cache counts as free: the kernel drops it. Memory on tmpfs (shmem) does not."""
    tree = Tree(tmp_path, V2_MOUNT, "0::/")
    stat = f"anon {GIB}\nfile {3 * GIB}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {GIB}"
    tree.v2("", memory_max=6 * GIB, memory_current=4 * GIB, memory_stat=stat, cpu_max="150000 100000")
    assert available_memory(tmp_path) == Memory(4 * GIB, 6 * GIB)
    assert (cpu_quota(tmp_path), usable_cores(tmp_path)) == (1.5, 1)


def test_a_container_of_version_1_with_the_path_of_its_host(tmp_path: Path) -> None:
    groups = "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc"
    tree = Tree(tmp_path, V1_MOUNTS, groups, shown="/docker/abc")
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    tree.memory_v1("", 3 * GIB, 2 * GIB, stat)
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 400_000)
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100_000)
    assert available_memory(tmp_path) == Memory(2 * GIB, 3 * GIB)
    assert usable_cores(tmp_path) == 4


@pytest.mark.parametrize(("leaf", "above", "left"), [(8, 3, 2), (3, 8, 1), ("max", 3, 2), (8, "max", 6)])
def test_the_tightest_group_above_the_process_counts(tmp_path: Path, leaf: object, above: object, left: int) -> None:
    """The pod has a limit of its own, which its containers share."""
    tree = Tree(tmp_path, V2_MOUNT, "0::/pod/container")
    for group, limit, used in (("pod", above, 1), ("pod/container", leaf, 2)):
        text = limit if limit == "max" else int(str(limit)) * GIB
        tree.v2(group, memory_max=text, memory_current=used * GIB, cpu_max="max 100000")
    assert available_memory(tmp_path).available_bytes == left * GIB
    assert cpu_quota(tmp_path) is None


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    """Above it the kernel slows the process down until nothing is answered in time."""
    tree = Tree(tmp_path, V2_MOUNT, "0::/")
    tree.v2("", memory_max=6 * GIB, memory_high=2 * GIB, memory_current=GIB)
    assert available_memory(tmp_path) == Memory(GIB, 2 * GIB)


def test_both_versions_at_once(tmp_path: Path) -> None:
    tree = Tree(
        tmp_path,
        f"{V1_MOUNTS}\n36 31 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        "4:memory:/job\n0::/",
    )
    tree.memory_v1("job", GIB, GIB // 2)
    tree.memory_v1("", UNLIMITED_V1, 30 * GIB)
    assert available_memory(tmp_path) == Memory(GIB // 2, GIB)


@pytest.mark.parametrize("path", ["/../../other", "/elsewhere/deep", "/"])
def test_a_path_outside_the_mounted_groups_means_the_mounted_one(tmp_path: Path, path: str) -> None:
    tree = Tree(tmp_path, V2_MOUNT, f"0::{path}")
    tree.v2("", memory_max=GIB, memory_current=0)
    assert available_memory(tmp_path).total_bytes == GIB


@pytest.mark.parametrize("text", ["", "max", "many", "-1", "1 2 3"])
def test_an_unreadable_number_is_no_limit(tmp_path: Path, text: str) -> None:
    tree = Tree(tmp_path, V2_MOUNT, "0::/")
    tree.v2("", memory_max=text, cpu_max=text)
    assert available_memory(tmp_path) == Memory(20 * GIB, 64 * GIB)
    assert usable_cores(tmp_path) == 8


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2_MOUNT, "0::/")
    tree.v2("", memory_max=GIB, memory_current=2 * GIB)
    assert available_memory(tmp_path).available_bytes == 0


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("20000 10000", 2), ("9000000 100000", 8)])
def test_a_process_uses_whole_cores_and_at_least_one(tmp_path: Path, quota: str, cores: int) -> None:
    tree = Tree(tmp_path, V2_MOUNT, "0::/")
    tree.v2("", cpu_max=quota)
    assert usable_cores(tmp_path) == cores


def test_a_real_limit_is_seen() -> None:
    with memory_limit(300 << 20) as within:
        code = "from relaygr.runtime.limits import available_memory as a; print(a().available_bytes, a().total_bytes)"
        run = subprocess.run([*within, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    available, total = map(int, run.stdout.split())
    assert total == 300 << 20 and 200 << 20 < available < total
