"""A cache with a limit on the total size of its values.

`functools.lru_cache` limits the number of values, not their size: a chat may have a hundred
characters or a million.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """Values by key; the least recently used go first. Threads may share it.

    >>> kept = Kept[str, str](most=10)
    >>> for name, size in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("d", 11)):
    ...     _ = kept.of(name, name.upper, lambda found: size)
    >>> [kept.get(name) for name in "abcd"], kept.size
    (['A', None, 'C', None], 8)

    Args:
        most: total size of all values, in the unit in which sizes are given.
    """

    def __init__(self, most: int) -> None:
        self._most, self.size = most, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return Kept, (self._most,)

    def get(self, key: K) -> V | None:
        """The value; None if it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def keep(self, key: K, value: V, size: int) -> None:
        """Keep a value, unless it alone is larger than `most`."""
        with self._lock:
            if key in self._values:
                self.size -= self._values.pop(key)[1]
            if size > self._most:
                return
            self._values[key] = value, size
            self.size += size
            while self.size > self._most:
                _, (_, gone) = self._values.popitem(last=False)
                self.size -= gone

    def of(self, key: K, make: Callable[[], V], size: Callable[[V], int]) -> V:
        """The value; it is made if it is not kept."""
        found = self.get(key)
        if found is None:
            found = make()
            self.keep(key, found, size(found))
        return found
