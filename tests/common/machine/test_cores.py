"""Threads for products: one a core, of those that a process may use and that are worth it."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from es_cookbook.common.machine.cores import (
    SHARE,
    allowed_cpus,
    core_groups,
    core_share,
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


def _capacities(*capacities: int) -> dict[str, int]:
    return {f"{_CPU}/cpu_capacity".format(cpu): each for cpu, each in enumerate(capacities)}


@pytest.mark.parametrize("asked", ["", "0", "2,2", "two"])
def test_a_variable_that_asks_for_nothing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert num_cores() == usable_cores(allowed_cpus()) <= (os.cpu_count() or 1)
    assert core_share() == 1


def test_threads_are_at_most_what_omp_num_threads_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert num_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    assert usable_cores(allowed_cpus()) <= num_cores() <= (os.cpu_count() or 1)
    assert core_share() == 1


@pytest.mark.parametrize(
    ("quota", "asked", "share"),
    [
        ("max", "1", 1 / 8),
        ("max", "4", 1 / 2),
        ("max", "9", 1),
        ("max", "", 1),
        ("200000", "1", 0.5),
    ],
)
def test_shares_of_engines_on_all_hyper_threads_are_one_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, asked: str, share: float
) -> None:
    files = _threads((0, 4), (1, 5), (2, 6), (3, 7))
    _write(tmp_path, {**files, "sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    monkeypatch.setattr(
        "es_cookbook.common.machine.cores.allowed_cpus", lambda: frozenset(range(8))
    )
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert core_share(tmp_path) == share


def test_the_share_is_what_a_pool_says_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(SHARE, "0.375")
    assert core_share() == 0.375


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


def test_a_machine_that_tells_nothing_has_a_core_per_cpu(tmp_path: Path) -> None:
    assert usable_cores(frozenset({0, 3, 5}), tmp_path) == 3
    damaged = {"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "many 100000"}
    damaged |= {"sys/devices/cpu_atom/cpus": "4-", f"{_CPU}/cpu_capacity".format(0): "?"}
    assert usable_cores(frozenset({0, 3, 5}), _write(tmp_path, damaged)) == 3


@pytest.mark.parametrize(
    ("quota", "cores"), [(0.1, 1), (1, 1), (1.2, 1), (1.5, 2), (2, 2), (2.2, 2), (100, 64)]
)
def test_a_container_has_as_many_threads_as_its_quota_keeps_busy(
    tmp_path: Path, quota: float, cores: int
) -> None:
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
    ("capacities", "cores"),
    [
        ([1024] * 4, 4),
        ([1024] * 4 + [300] * 4, 4),
        ([300] * 4 + [1024] * 4, 4),
        ([1024] * 8 + [300] * 2, 8),
        ([1024] * 2 + [400] * 8, 10),
        ([1024] * 8 + [850] * 16, 24),
        ([1024] * 2 + [1000] * 6 + [600] * 8, 8),
        ([400] * 3, 3),
    ],
)
def test_slower_cores_have_threads_where_all_do_more_at_their_pace(
    tmp_path: Path, capacities: list[int], cores: int
) -> None:
    _write(tmp_path, _capacities(*capacities))
    assert usable_cores(frozenset(range(len(capacities))), tmp_path) == cores


@pytest.mark.parametrize(
    ("fast", "slow", "cores"), [(4, 8, 4), (2, 8, 10), (8, 16, 8), (0, 8, 8), (4, 0, 4)]
)
def test_efficiency_cores_are_known_where_all_have_one_capacity(
    tmp_path: Path, fast: int, slow: int, cores: int
) -> None:
    """Intel's hybrid processors with hyper-threads: two on each of the fast cores."""
    pairs = [(2 * core, 2 * core + 1) for core in range(fast)]
    cpus = 2 * fast + slow
    files = _threads(*pairs) | _capacities(*[1024] * cpus)
    if slow:
        files["sys/devices/cpu_atom/cpus"] = f"{2 * fast}-{cpus - 1}"
    assert usable_cores(frozenset(range(cpus)), _write(tmp_path, files)) == cores
