"""How the genomes of a generation are shared by engines of unequal speed, in simulated time."""

import heapq
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from es_cookbook.population.scheduling import BlockScheduler


class Simulation:
    """Engines that need so many seconds a genome, and `fixed` a block, one block at a time."""

    def __init__(
        self, seconds_E: Mapping[str, float], capacity: int = 1000, fixed: float = 0.0
    ) -> None:
        self.fixed = fixed
        self.now = 0.0
        self.seconds_E = dict(seconds_E)
        self.capacity = capacity
        self.shares = BlockScheduler(lambda: self.now)

    def generation(
        self, num_genomes: int, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[list[tuple[str, int]], float]:
        """The blocks in the order in which they were taken, and the share of time engines ran."""
        self.shares.begin(num_genomes)
        began, busy, number = self.now, 0.0, 0
        blocks: list[tuple[str, int]] = []
        runs_G: list[int] = []
        events: list[tuple[float, int, str, Any]]
        events = [(self.now, n, label, None) for n, label in enumerate(self.seconds_E)]
        while events:
            self.now, _, label, ended = heapq.heappop(events)
            if ended is not None:
                self.shares.end(ended)
            if not self.shares.num_left:
                continue
            block = self.shares.take(label, len(self.seconds_E), self.capacity)
            meanwhile()
            seconds = self.fixed + len(block.range_G) * self.seconds_E[label]
            busy, number = busy + seconds, number + 1
            blocks.append((label, len(block.range_G)))
            runs_G += block.range_G
            heapq.heappush(events, (self.now + seconds, 100 + number, label, block))
        assert runs_G == list(range(num_genomes)), "each genome once"
        return blocks, busy / (self.now - began) / len(self.seconds_E)


def test_engines_of_known_speed_take_their_share_at_once_and_end_together() -> None:
    simulation = Simulation({"quick": 1.0, "slow": 3.0})
    for _ in range(3):
        simulation.generation(64)
    blocks, busy = simulation.generation(64)
    assert blocks == [("quick", 48), ("slow", 16)] and busy == pytest.approx(1)


def test_engines_of_unknown_speed_leave_genomes_for_whoever_is_free_first() -> None:
    blocks, busy = Simulation({"quick": 1.0, "slow": 4.0}).generation(64)
    of_quick = sum(size for label, size in blocks if label == "quick")
    assert of_quick > 40 and busy > 0.85


def test_an_engine_that_becomes_slow_keeps_only_what_it_has_begun() -> None:
    simulation = Simulation({"a": 1.0, "b": 1.0})
    for _ in range(3):
        simulation.generation(64)
    simulation.seconds_E["b"] = 4.0
    simulation.generation(64)  # It had its whole share.
    blocks, busy = simulation.generation(64)
    assert sum(size for label, size in blocks if label == "b") < 18 and busy > 0.85
