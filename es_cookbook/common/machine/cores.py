"""Threads for matrix products, and memory, that a process may use on its machine.

Threads are here for matrix products, and share the work in equal parts. So a thread is worth it

- on a CPU that the process may run on (its affinity), within the quota of a container: two
  for a container limited to two of 64 CPUs. A quota of 1.5 has two threads as well: they are
  held up in turn and do 1.5 times what one does. Less than a quarter of a core has no thread;
- once for each core: hyper-threads share one set of vector units, which the products of one thread
  fill, and the cache;
- on efficiency cores only if all cores together, at the pace of these, do more than the others
  alone, since equal parts end with the slowest.

`OMP_NUM_THREADS` can ask for fewer or, as far as CPUs and quota go, for more.

Limits of containers are those of Linux's control groups of version 2: of the process's own group
and of all groups around it. Inside a container the path in `/proc/self/cgroup` may be that of the
host, where nothing is; its root is then the container's own group.
"""

import functools
import math
import os
import sys
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import psutil

SHARE = "ES_COOKBOOK_MACHINE_SHARE"
"""The environment variable by which a pool tells an engine how many share the machine: 0.5."""
_ROOT = Path("/")
_EFFICIENCY = 0.4
"""Speed of Intel's efficiency cores: vectors half as wide, 4/5 of the clock."""
_WORTH_IT = 1.25
"""Speedup that makes slower cores worthwhile: each thread reads the model's weights again."""
_IGNORED = 0.25
"""Fraction of a core in a quota that is not worth a thread."""


def num_cores() -> int:
    """Return the threads for products: OMP_NUM_THREADS, or one per core that may be used.

    All that counts threads obeys that variable, so it is how several engines share a machine.
    """
    cpus, asked = allowed_cpus(), _asked()
    return usable_cores(cpus) if asked is None else min(asked, _within_quota(len(cpus), _ROOT))


def core_share(root: Path = _ROOT) -> float:
    """Return this process's share of the machine: `SHARE`, or by OMP_NUM_THREADS.

    Hyper-threads count, as they do for clusters that place engines: the shares of engines that take
    every CPU add up to 1.
    """
    if share := os.environ.get(SHARE):
        return float(share)
    asked = _asked()
    return 1.0 if asked is None else min(1.0, asked / _within_quota(len(allowed_cpus()), root))


def _asked() -> int | None:
    """Return the threads that OMP_NUM_THREADS asks for; None if it is not set."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def threads_of(cpus: Collection[int]) -> int:
    """Return the threads for a process that is given some of the CPUs of this one."""
    mine = allowed_cpus()
    share = usable_cores(mine) * len(cpus) // max(1, len(mine))
    return max(1, min(share, num_cores()))


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs that this process may run on, hyper-threads included."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_groups(cpus: Collection[int], root: Path = _ROOT) -> list[tuple[int, ...]]:
    """Group CPUs by core; each is a core by itself if nothing is known."""
    groups: dict[frozenset[int], tuple[int, ...]] = {}
    for cpu in sorted(cpus):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        own = frozenset(_numbers(topology / "thread_siblings_list") & set(cpus)) | {cpu}
        groups.setdefault(own, tuple(sorted(own)))
    return list(groups.values())


@functools.cache
def usable_cores(cpus: frozenset[int], root: Path = _ROOT) -> int:
    """Count the cores of these CPUs that should each run a thread, within the CPU quota.

    Args:
        cpus: CPUs that may be used.
        root: root of the file system that describes them.
    """
    if root == _ROOT and sys.platform != "linux":
        known = _performance_cores() or psutil.cpu_count(logical=False) or len(cpus)
        return max(1, min(known, len(cpus)))
    slow = _numbers(root / "sys/devices/cpu_atom/cpus")
    cores = core_groups(cpus, root)
    fast = [core for core in cores if core[0] not in slow]
    is_worth_it = len(cores) * _EFFICIENCY > _WORTH_IT * len(fast)
    return _within_quota(len(cores) if is_worth_it else len(fast), root)


def _within_quota(count: int, root: Path) -> int:
    quota = cpu_quota(root)
    return max(1, count if math.isinf(quota) else min(count, math.ceil(quota - _IGNORED)))


def _numbers(path: Path) -> set[int]:
    """Return the numbers in a list such as "0,4-7"; empty if the file is missing or invalid."""
    try:
        spans = [part.split("-") for part in path.read_text("utf-8").strip().split(",")]
        return {n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def _performance_cores() -> int | None:
    """Return the number of Apple's performance cores (others are a third as fast), if known."""
    from es_cookbook.common.machine.processes import ran  # Most runs start no processes.

    asked = ["/usr/sbin/sysctl", "-n", "hw.perflevel0.physicalcpu"]
    try:
        return int(ran(asked)[1]) or None
    except (OSError, ValueError):
        return None


def cpu_quota(root: Path = _ROOT) -> float:
    """Return how many CPUs' time all threads together may use, infinite without a limit.

    Docker's `--cpus=2` and Kubernetes' `limits.cpu` are quotas: the process still sees, and may
    run on, all CPUs of the machine.
    """
    limits = [_words(group / "cpu.max") for group in _groups(root)]
    found = [float(each[0]) / float(each[1]) for each in limits if each and each[0] != "max"]
    return min(found, default=math.inf)


def memory_limit(root: Path = _ROOT) -> float:
    """Return the bytes that control groups allow this process, infinite without a limit."""
    return min((limit for limit, _ in _memory(root)), default=math.inf)


def memory_left(root: Path = _ROOT) -> float:
    """Return the bytes that control groups still leave; caches of files count as free."""
    return max(0.0, min((left for _, left in _memory(root)), default=math.inf))


def _memory(root: Path) -> list[tuple[float, float]]:
    """Return the limit of each control group that has one, and what is left of it."""
    found: list[tuple[float, float]] = []
    for group in _groups(root):
        limit, used = (_words(group / f"memory.{name}") for name in ("max", "current"))
        if limit and used and limit[0] != "max":
            words = _words(group / "memory.stat")
            cached = dict(zip(words[::2], words[1::2], strict=False)).get("inactive_file", "0")
            found.append((float(limit[0]), float(limit[0]) - float(used[0]) + float(cached)))
    return found


def _groups(root: Path) -> list[Path]:
    """Return the directories of the control groups of this process, the innermost first."""
    lines = _words(root / "proc/self/cgroup")
    paths = [line.removeprefix("0::/") for line in ("0::/", *lines) if line.startswith("0::/")]
    inside = [group for path in map(PurePosixPath, paths) for group in (path, *path.parents)]
    return [root / "sys/fs/cgroup" / group for group in dict.fromkeys(inside)]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []
