"""Control groups of Linux (cgroups): what a container may use, of a machine that shows all it has.

A process is in one group of version 2, or in one per controller of version 1, and is held to the
limits of all groups around it as well. Inside a container the path that `/proc/self/cgroup` tells
may be that of the host, where nothing is; its root is then the container's own group.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def group_directories(controller: str, root: Path = _ROOT) -> Iterator[Path]:
    """Where limits of a controller ("cpu", "memory") may be, the process's own group first."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
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


def _quota_of(group: Path) -> float:
    if (limit := _words(group / "cpu.max")) is None:
        quota = _words(group / "cpu.cfs_quota_us")
        period = _words(group / "cpu.cfs_period_us")
        limit = [*(quota or ()), *(period or ())]
    try:
        quota, period = map(float, limit)
    except ValueError:  # "max 100000", or not there
        return float("inf")
    return quota / period if quota > 0 and period > 0 else float("inf")


def _words(path: Path) -> list[str] | None:
    try:
        return path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError):
        return None
