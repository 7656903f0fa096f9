"""Samples of large families of cases: different ones each day, all of them with `FAMILIES=all`."""

import os
import random
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeVar

Case = TypeVar("Case")

# Set in the environment, so that all workers of one run of the suite draw the same cases.
SEED = os.environ.setdefault("FAMILIES", str(datetime.now(UTC).toordinal()))


def sampled(cases: Iterable[Case], count: int) -> list[Case]:
    """Return `count` of the cases, in their order, or all of them with `FAMILIES=all`."""
    every = list(cases)
    if SEED == "all" or len(every) <= count:
        return every
    chosen = random.Random(SEED).sample(range(len(every)), count)
    return [every[index] for index in sorted(chosen)]
