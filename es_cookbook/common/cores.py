"""How many threads one may have without getting in the way of others."""

import os


def num_cores() -> int:
    """Cores that this process may use; no more than OMP_NUM_THREADS, where that is set.

    All that counts threads obeys that variable, so it is how several engines share a machine.
    """
    affine = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdigit() and int(asked) > 0 else cores
