"""Threads for products: one a core, of those that a process may use and that are worth it."""

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from es_cookbook.common.machine.cores import (
    allowed_cpus,
    core_groups,
    core_share,
    cpu_quota,
    memory_left,
    memory_limit,
    num_cores,
    threads_of,
    usable_cores,
)

_CPU = "sys/devices/system/cpu/cpu{}"


def _write(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def _threads(*groups: Collection[int]) -> dict[str, str]:
    """The files that tell which CPUs are one core."""
    name = f"{_CPU}/topology/thread_siblings_list"
    return {name.format(cpu): ",".join(map(str, cpus)) for cpus in groups for cpu in cpus}


def test_omp_num_threads_limits_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert num_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    assert usable_cores(allowed_cpus()) <= num_cores() <= (os.cpu_count() or 1)
    assert core_share() == 1


@pytest.mark.parametrize(
    ("quota", "asked", "share"),
    [("max", "1", 1 / 8), ("max", "9", 1), ("max", "", 1), ("200000", "1", 0.5)],
)
def test_shares_of_engines_that_use_every_cpu_add_up_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, asked: str, share: float
) -> None:
    files = _threads((0, 4), (1, 5), (2, 6), (3, 7))
    _write(tmp_path, {**files, "sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    monkeypatch.setattr(
        "es_cookbook.common.machine.cores.allowed_cpus", lambda: frozenset(range(8))
    )
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert core_share(tmp_path) == share


def test_a_process_with_some_of_the_cpus_has_its_share_of_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpus = frozenset(range(1000, 1008))
    monkeypatch.setattr("es_cookbook.common.machine.cores.allowed_cpus", lambda: cpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    whole = num_cores()  # 8, or fewer where a container's limit is
    assert threads_of([1000, 1002, 1004, 1006]) == max(1, whole // 2)
    assert threads_of([1000]) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_of(range(1000, 1008)) == 1


@pytest.mark.parametrize(
    ("quota", "cores"), [(0.1, 1), (1, 1), (1.2, 1), (1.5, 2), (2, 2), (2.2, 2), (100, 64)]
)
def test_a_quota_limits_threads(tmp_path: Path, quota: float, cores: int) -> None:
    _write(tmp_path, {"sys/fs/cgroup/cpu.max": f"{int(quota * 100_000)} 100000"})
    assert usable_cores(frozenset(range(64)), tmp_path) == cores


def test_hyper_threads_of_a_core_have_one_thread(tmp_path: Path) -> None:
    _write(tmp_path, _threads((0, 4), (1, 5), (2, 6), (3, 7)))
    assert core_groups(range(8), tmp_path) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert usable_cores(frozenset(range(8)), tmp_path) == 4
    # Of the CPUs that the process may run on: both threads of core 0, and one of core 1.
    assert core_groups({0, 4, 5}, tmp_path) == [(0, 4), (5,)]
    assert usable_cores(frozenset({0, 4, 5}), tmp_path) == 2


@pytest.mark.parametrize(
    ("fast", "slow", "cores"), [(4, 8, 4), (2, 8, 10), (8, 16, 8), (0, 8, 8), (4, 0, 4)]
)
def test_efficiency_cores_are_used_only_if_that_is_faster(
    tmp_path: Path, fast: int, slow: int, cores: int
) -> None:
    """Intel's hybrid processors with hyper-threads: two on each of the fast cores."""
    files: dict[str, object] = {**_threads(*((2 * core, 2 * core + 1) for core in range(fast)))}
    cpus = 2 * fast + slow
    if slow:
        files["sys/devices/cpu_atom/cpus"] = f"{2 * fast}-{cpus - 1}"
    assert usable_cores(frozenset(range(cpus)), _write(tmp_path, files)) == cores


def test_unreadable_files_of_the_system_count_a_core_per_cpu(tmp_path: Path) -> None:
    _write(tmp_path, {"sys/devices/cpu_atom/cpus": "4-", "proc/self/cgroup": "nonsense"})
    assert usable_cores(frozenset({0, 3, 5}), tmp_path) == 3


GROUP = "sys/fs/cgroup"


def test_the_quota_is_the_least_of_all_groups_around_a_process(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf
    _write(tmp_path, {f"{GROUP}/cpu.max": "max 100000"})
    assert cpu_quota(tmp_path) == math.inf
    files = {
        "proc/self/cgroup": "0::/user.slice/run.scope",
        f"{GROUP}/user.slice/cpu.max": "150000 100000",
        f"{GROUP}/user.slice/run.scope/cpu.max": "400000 100000",
    }
    assert cpu_quota(_write(tmp_path, files)) == 1.5


@pytest.mark.parametrize(
    ("files", "limit", "left"),
    [
        (
            {
                f"{GROUP}/memory.max": 1000,
                f"{GROUP}/memory.current": 700,
                f"{GROUP}/memory.stat": "anon 500\ninactive_file 150",
            },
            1000,
            450,
        ),
        (
            {
                "proc/self/cgroup": "0::/slice/unit",
                f"{GROUP}/slice/memory.max": 2000,
                f"{GROUP}/slice/memory.current": 1900,
                f"{GROUP}/slice/unit/memory.max": 1500,
                f"{GROUP}/slice/unit/memory.current": 100,
            },
            1500,
            100,
        ),
        ({f"{GROUP}/memory.max": 10, f"{GROUP}/memory.current": 30}, 10, 0),
        ({}, math.inf, math.inf),
    ],
)
def test_memory_is_limited_by_every_group_around_a_process(
    tmp_path: Path, files: dict[str, object], limit: float, left: float
) -> None:
    root = _write(tmp_path, files)
    assert (memory_limit(root), memory_left(root)) == (limit, left)
