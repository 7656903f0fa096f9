"""How many genomes the next free engine takes, so that unequal engines end together.

No genome belongs to an engine before the engine takes it. A free engine takes the genomes that it
could finish by the time at which all could end: busy engines until their blocks are expected to
end, and then everybody at the speed that it last had. An engine that kept to its expected time
takes its whole share at once, which batches best. One whose speed is not known, or was not as
expected, takes half, and what it leaves goes to whoever is free first.

Where generations overlap nobody has to end together, since whoever is free begins the next one. All
shares are whole then: a block lasts at least as long as its longest answer, so many small blocks
would be many tails.

Which genomes an engine runs changes no rollout, so none of this is in a run's history.
"""

import dataclasses
import math
import time
from collections.abc import Callable

_TRUSTED = 0.25
"""An engine is as expected if its block took at most as much more or less, as a share."""


@dataclasses.dataclass(slots=True)
class _Engine:
    """What was seen of one engine: genomes a second, and whether that could be relied on."""

    speed: float
    is_steady: bool


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """Genomes that an engine has taken, when, and for how long (None if nobody knew)."""

    range_G: range
    label: str
    began: float
    expected: float | None


class Shares:
    """Hands out the genomes of one generation after the other.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._busy: dict[Block, None] = {}
        self._num_genomes = 0
        self._next = 0
        self._is_whole = False

    @property
    def num_left(self) -> int:
        """Genomes that nobody has taken."""
        return self._num_genomes - self._next

    def begin(self, num_genomes: int, *, overlapping: bool = False) -> None:
        """Another generation; if they overlap, blocks of the one before may still be running."""
        self._num_genomes = num_genomes
        self._next = 0
        self._is_whole = overlapping

    def take(self, label: str, num_engines: int, capacity: int) -> Block:
        """Genomes for an engine that is free.

        Args:
            label: the engine's.
            num_engines: that there are, this one and busy ones too.
            capacity: most genomes of a block.
        """
        now = self._clock()
        share = self._share(label, num_engines, now)
        engine = self._engines.get(label)
        is_whole = self._is_whole or num_engines == 1
        if not is_whole and (engine is None or not engine.is_steady):
            share /= 2
        count = min(math.ceil(share), capacity, self.num_left)
        expected = None if engine is None else count / engine.speed
        block = Block(range(self._next, self._next + count), label, now, expected)
        self._next += count
        self._busy[block] = None
        return block

    def end(self, block: Block) -> None:
        """An engine has run a block, and is free."""
        self._busy.pop(block, None)
        now = self._clock()
        took = max(now - block.began, 1e-9)
        expected = block.expected
        is_steady = expected is not None and abs(took - expected) <= _TRUSTED * expected
        self._engines[block.label] = _Engine(len(block.range_G) / took, is_steady)

    def _share(self, label: str, num_engines: int, now: float) -> float:
        """How many of the genomes that are left an engine can finish until all could end."""
        known = self._engines
        mean = sum(e.speed for e in known.values()) / len(known) if known else 1.0

        def speed(of: str) -> float:
            return known[of].speed if of in known else mean

        def ends(block: Block) -> float:
            return max(now, block.began + len(block.range_G) / speed(block.label))

        busy = [(ends(block), speed(block.label)) for block in self._busy]
        taken = {label, *(block.label for block in self._busy)}
        idle = [e.speed for of, e in known.items() if of not in taken]
        num_idle = max(num_engines - len(busy) - 1, 0)
        idle = (idle + [mean] * num_idle)[:num_idle]
        rate = speed(label) + sum(idle)
        # All could end at `until`: free engines begin now, busy ones join as their blocks end.
        until, work = now + self.num_left / rate, float(self.num_left)
        for free_at, its_speed in sorted(busy):
            if free_at >= until:
                break
            work += (free_at - now) * its_speed
            rate += its_speed
            until = now + work / rate
        return (until - now) * speed(label)
