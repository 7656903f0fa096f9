"""What containers may use, from files as Linux writes them."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from es_cookbook.common.machine.control_groups import cpu_quota, memory_left, memory_limit

_V1 = "sys/fs/cgroup/cpu,cpuacct"


def _root(path: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{text}\n")
    return path


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
        (
            {
                "proc/self/cgroup": "0::/user.slice/run.scope",
                "sys/fs/cgroup/user.slice/cpu.max": "150000 100000",
                "sys/fs/cgroup/user.slice/run.scope/cpu.max": "400000 100000",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/docker/0abc\n0::/",
                f"{_V1}/cpu.cfs_quota_us": 300000,
                f"{_V1}/cpu.cfs_period_us": 100000,
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a",
                f"{_V1}/a/cpu.cfs_quota_us": -1,
                f"{_V1}/a/cpu.cfs_period_us": 100000,
                "sys/fs/cgroup/memory/cpu.cfs_quota_us": 100000,
                "sys/fs/cgroup/memory/cpu.cfs_period_us": 100000,
            },
            math.inf,
        ),
        ({"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "many 100000"}, math.inf),
        ({}, math.inf),
    ],
    ids=["container", "none", "around", "version 1", "version 1, none", "damaged", "no Linux"],
)
def test_the_quota_is_the_least_of_all_groups_around_a_process(
    tmp_path: Path, files: dict[str, object], quota: float
) -> None:
    assert cpu_quota(_root(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit", "left"),
    [
        (
            {
                "sys/fs/cgroup/memory.max": 1000,
                "sys/fs/cgroup/memory.current": 700,
                "sys/fs/cgroup/memory.stat": "anon 500\ninactive_file 150",
            },
            1000,
            450,
        ),
        (
            {
                "proc/self/cgroup": "0::/slice/unit",
                "sys/fs/cgroup/slice/memory.max": 2000,
                "sys/fs/cgroup/slice/memory.current": 1900,
                "sys/fs/cgroup/slice/unit/memory.max": 1500,
                "sys/fs/cgroup/slice/unit/memory.current": 100,
            },
            1500,
            100,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/docker/0abc",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 4000,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 3000,
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500",
            },
            4000,
            1500,
        ),
        ({"sys/fs/cgroup/memory.max": 10, "sys/fs/cgroup/memory.current": 30}, 10, 0),
        (
            {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": 3},
            math.inf,
            math.inf,
        ),
        ({"sys/fs/cgroup/memory.max": 10}, 10, math.inf),
        ({}, math.inf, math.inf),
    ],
    ids=["container", "around", "version 1", "above", "none", "use unknown", "no Linux"],
)
def test_memory_is_the_least_that_all_groups_around_a_process_leave(
    tmp_path: Path, files: dict[str, object], limit: float, left: float
) -> None:
    root = _root(tmp_path, files)
    assert (memory_limit(root), memory_left(root)) == (limit, left)
