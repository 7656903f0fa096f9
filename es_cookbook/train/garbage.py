"""Python's garbage collector, kept out of the way of a loop that makes many short-lived objects."""

import contextlib
import gc
from collections.abc import Generator

_OBJECTS_BETWEEN_COLLECTIONS = 50_000


@contextlib.contextmanager
def rare_garbage_collection() -> Generator[None]:
    """Inside, the collector leaves alone what is there already, and looks at the rest less often.

    A generation makes tens of thousands of objects, and hardly any of them need the collector.
    Without this it walks the model and the libraries again each time, and the rollouts under way
    over and over, which takes longer than all the rest of the bookkeeping
    (`benchmarks/scheduler.py`).
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
