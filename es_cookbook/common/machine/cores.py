"""How many threads a process may have without getting in the way of others, or of itself.

Threads are here for matrix products, and share the work in equal parts. So a thread is worth it

- on a CPU that the process may run on (its affinity), within the quota of a container: a machine of
  64 CPUs of which a container may use two has two. Of a quota of 1.5, too, two threads: they are
  held up in turn and do 1.5 times what one does. Less than a quarter of a core has no thread;
- once for each core: hyper-threads have one set of vector units between them, which the products of
  one thread fill, and half of the cache each;
- on cores that are not much slower than the rest, since equal parts end with the slowest.
  Efficiency cores count where all cores together, at the pace of the slowest, do more.

`OMP_NUM_THREADS` can ask for fewer or, as far as CPUs and quota go, for more.
"""

import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from es_cookbook.common.machine.control_groups import cpu_quota

SHARE = "ES_COOKBOOK_MACHINE_SHARE"
"""The environment variable by which a pool tells an engine how many share the machine: 0.5."""
_ROOT = Path("/")
_CPUS = "sys/devices/system/cpu"
_FULL_SPEED = 1024
"""Of Linux's `cpu_capacity`, the fastest cores'."""
_EFFICIENCY_SPEED = 0.4 * _FULL_SPEED
"""Of Intel's efficiency cores, if Linux tells none: vectors half as wide, 4/5 of the clock."""
_WORTH_IT = 1.25
"""How much more must be done with slower cores too: each thread reads the model's weights again."""
_IGNORED = 0.25
"""Part of a core in a quota that is no thread's."""


def num_cores() -> int:
    """Threads for products: one a core that this process may use, or OMP_NUM_THREADS, if set.

    All that counts threads obeys that variable, so it is how several engines share a machine.
    """
    cpus, asked = allowed_cpus(), _asked()
    return usable_cores(cpus) if asked is None else min(asked, _within_quota(len(cpus), _ROOT))


def core_share(root: Path = _ROOT) -> float:
    """What share of this machine is this process's: 1 where nobody says anything.

    Whoever started it may say so (`SHARE`). Else it is that of the CPUs which OMP_NUM_THREADS asks
    for. Hyper-threads count there, as they do for clusters that place engines: the shares of
    engines that take every CPU are 1 in all.
    """
    if share := os.environ.get(SHARE):
        return float(share)
    asked = _asked()
    return 1.0 if asked is None else min(1.0, asked / _within_quota(len(allowed_cpus()), root))


def _asked() -> int | None:
    """Threads that OMP_NUM_THREADS asks for."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def threads_of(cpus: Collection[int]) -> int:
    """Threads for a process that is given some of the CPUs that this one may run on."""
    mine = allowed_cpus()
    share = usable_cores(mine) * len(cpus) // max(1, len(mine))
    return max(1, min(share, num_cores()))


def allowed_cpus() -> frozenset[int]:
    """Those that this process may run on, hyper-threads included."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_groups(cpus: Collection[int], root: Path = _ROOT) -> list[tuple[int, ...]]:
    """The CPUs of each core, as far as they are among some; each is a core if nothing is known."""
    groups: dict[frozenset[int], tuple[int, ...]] = {}
    for cpu in sorted(cpus):
        threads = _numbers(root / f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list")
        own = frozenset(threads & set(cpus)) | {cpu}
        groups.setdefault(own, tuple(sorted(own)))
    return list(groups.values())


@functools.cache
def usable_cores(cpus: frozenset[int], root: Path = _ROOT) -> int:
    """Cores of some CPUs that are worth a thread each, within the quota.

    Args:
        cpus: that may be used.
        root: of the file system that describes them.
    """
    if root == _ROOT and sys.platform != "linux":
        known = _performance_cores() or psutil.cpu_count(logical=False) or len(cpus)
        return max(1, min(known, len(cpus)))
    speeds = sorted(_speeds(cpus, root), reverse=True)
    best = 0
    for count, (speed, slower) in enumerate(itertools.pairwise([*speeds, 0.0]), 1):
        if slower < speed and count * speed > _WORTH_IT * best * speeds[best - 1]:
            best = count
    return _within_quota(best, root)


def _within_quota(count: int, root: Path) -> int:
    quota = cpu_quota(root)
    return max(1, count if math.isinf(quota) else min(count, math.ceil(quota - _IGNORED)))


def _speeds(cpus: Collection[int], root: Path) -> Iterator[float]:
    """Of each core, as Linux tells, or by its kind."""
    slow = _numbers(root / "sys/devices/cpu_atom/cpus")
    for cpu, *_ in core_groups(cpus, root):
        told = _numbers(root / f"{_CPUS}/cpu{cpu}/cpu_capacity")
        speed = float(max(told, default=0) or _FULL_SPEED)
        # Hybrid processors with hyper-threads have the same capacity everywhere.
        yield _EFFICIENCY_SPEED if cpu in slow and speed >= _FULL_SPEED else speed


def _numbers(path: Path) -> set[int]:
    """Those of a list like "0,4-7"; none where no such file is, or nothing like it in it."""
    try:
        spans = [part.split("-") for part in path.read_text("utf-8").strip().split(",")]
        return {n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def _performance_cores() -> int | None:
    """Of Apple's processors, whose other cores do a third as much; None if nobody tells."""
    asked = ["/usr/sbin/sysctl", "-n", "hw.perflevel0.physicalcpu"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=5).stdout
        return int(told) or None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
