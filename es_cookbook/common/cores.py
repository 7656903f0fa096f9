"""How many threads one may have without getting in the way of others."""

import os


def num_cores() -> int:
    """Cores that this process may use; no more than OMP_NUM_THREADS, where that is set.

    All that counts threads obeys that variable, so it is how several engines share a machine.
    """
    cores = _cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdigit() and int(asked) > 0 else cores


def core_share() -> float:
    """What share of the machine's cores that is: 1 where OMP_NUM_THREADS says nothing."""
    return num_cores() / _cores()


def _cores() -> int:
    affine = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
