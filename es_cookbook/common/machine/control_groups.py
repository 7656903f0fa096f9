"""Control groups of Linux (cgroups): what a container may use, of a machine that shows all it has.

A process is in one group of version 2, or in one per controller of version 1, and is held to the
limits of all groups around it as well. Inside a container the path that `/proc/self/cgroup` tells
may be that of the host, where nothing is; its root is then the container's own group.
"""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def group_directories(controller: str, root: Path = _ROOT) -> Iterator[Path]:
    """Where limits of a controller ("cpu", "memory") may be, the process's own group first."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").strip().split("\n")
    except OSError:  # not Linux, or no /proc
        lines = []
    mounted = root / "sys/fs/cgroup"
    for line in ["0::/", *lines]:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers:
            places = (controllers, controller) if controller in controllers.split(",") else ()
        else:
            places = ("", "unified")
        for place in places:
            inside = PurePosixPath(path.lstrip("/"))
            yield from (mounted / place / group for group in (inside, *inside.parents))


def cpu_quota(root: Path = _ROOT) -> float:
    """CPUs whose time all threads together may use, infinite without a limit.

    Docker's `--cpus=2` and Kubernetes' `limits.cpu` are quotas: the process still sees, and may
    run on, all CPUs of the machine.
    """
    groups = list(group_directories("cpu", root))
    return min((_quota_of(group) for group in groups), default=float("inf"))


def memory_limit(root: Path = _ROOT) -> float:
    """Bytes that all groups around this process allow it, infinite without a limit."""
    groups = list(group_directories("memory", root))
    return min((_limit_of(group) for group in groups), default=float("inf"))


def memory_left(root: Path = _ROOT) -> float:
    """Bytes that they still leave; caches of files count as free."""
    groups = list(group_directories("memory", root))
    return max(0.0, min((_left_of(group) for group in groups), default=float("inf")))


def _quota_of(group: Path) -> float:
    limit = _words(group / "cpu.max") or [
        *_words(group / "cpu.cfs_quota_us"),
        *_words(group / "cpu.cfs_period_us"),
    ]
    try:
        quota, period = map(float, limit)
    except ValueError:  # "max 100000", or not there
        return float("inf")
    return quota / period if quota > 0 and period > 0 else float("inf")


def _limit_of(group: Path) -> float:
    return _number(group / "memory.max", group / "memory.limit_in_bytes")


def _left_of(group: Path) -> float:
    used = _number(group / "memory.current", group / "memory.usage_in_bytes")
    words = _words(group / "memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=False))
    cached = stat.get("total_inactive_file", stat.get("inactive_file", ""))
    left = _limit_of(group) - used  # NaN where it is not known
    return left + (int(cached) if cached.isdigit() else 0) if left > -math.inf else math.inf


def _number(*paths: Path) -> float:
    """Of the first of these files that has one."""
    for path in paths:
        match _words(path):
            case [word] if word.isdigit():
                return float(word)
            case _:
                continue
    return float("inf")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []
