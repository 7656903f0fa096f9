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


def test_equal_engines_of_known_speed_share_equally() -> None:
    simulation = Simulation({str(e): 1.0 for e in range(4)})
    for _ in range(3):
        simulation.generation(64)
    blocks, _ = simulation.generation(64)
    assert [size for _, size in blocks] == [16] * 4


def test_engines_of_unknown_speed_leave_genomes_for_whoever_is_free_first() -> None:
    blocks, busy = Simulation({"quick": 1.0, "slow": 4.0}).generation(64)
    of_quick = sum(size for label, size in blocks if label == "quick")
    assert of_quick > 40 and busy > 0.85


def test_where_a_block_takes_long_however_small_engines_end_together_without_small_ones() -> None:
    simulation = Simulation({"quick": 1.0, "slow": 3.0}, fixed=12.0)
    for _ in range(3):
        simulation.generation(64)
    blocks, busy = simulation.generation(64)
    assert blocks == [("quick", 48), ("slow", 16)] and busy == pytest.approx(1)
    one_more, _ = simulation.generation(8)
    assert one_more == [("quick", 6), ("slow", 2)]


def test_an_engine_that_becomes_slow_keeps_only_what_it_has_begun() -> None:
    simulation = Simulation({"a": 1.0, "b": 1.0})
    for _ in range(3):
        simulation.generation(64)
    simulation.seconds_E["b"] = 4.0
    simulation.generation(64)  # It had its whole share.
    blocks, busy = simulation.generation(64)
    assert sum(size for label, size in blocks if label == "b") < 18 and busy > 0.85


def test_blocks_fit_on_an_engine_and_one_alone_takes_all() -> None:
    blocks, _ = Simulation({"a": 1.0, "b": 2.0}, capacity=5).generation(64)
    assert max(size for _, size in blocks) == 5
    assert Simulation({"a": 1.0}).generation(64)[0] == [("a", 64)]


class Alone:
    """Engines that run one after the other, each alone, and take as long as is said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.shares = BlockScheduler(lambda: self.now)
        assert self.shares.num_left == 0

    def ran(self, label: str, size: int, seconds: float) -> None:
        self.shares.begin(size)
        block = self.shares.take(label, 1, 1000)
        assert len(block.range_G) == size, "nobody else is there"
        self.now += seconds
        self.shares.end(block)

    def takes(self, label: str, of: int, num_engines: int = 2) -> int:
        self.shares.begin(of)
        return len(self.shares.take(label, num_engines, 1000).range_G)


@pytest.mark.parametrize(
    ("seconds", "takes"), [(7.4, 3), (7.5, 5), (8.0, 5), (12.0, 5), (12.5, 5), (12.6, 3)]
)
def test_an_engine_that_took_a_quarter_more_or_less_than_expected_has_its_whole_share(
    seconds: float, takes: int
) -> None:
    engines = Alone()
    engines.ran("a", 10, 10.0)
    engines.ran("a", 10, seconds)
    assert engines.takes("a", 10) == takes, "half of 10, or half of that, rounded up"


def test_seconds_of_a_block_are_divided_between_it_and_its_genomes_by_the_last_two() -> None:
    engines = Alone()
    engines.ran("b", 10, 10.0)
    engines.ran("a", 10, 10.0)
    engines.ran("a", 5, 10.0)
    # As long for half as many, of which at most 8 s are the block's: 0.4 s a genome. With b, at 1 s
    # a genome from now on, both end after 80/7 s, when a has done (80/7 - 8) / 0.4 = 8.6 of 20.
    assert engines.takes("a", 20) == 9
    engines = Alone()
    engines.ran("b", 10, 10.0)
    # 0.6 s a genome, and 4 s: both end after 10 s. It is not as expected, but half of its ten
    # genomes would take less than a block does anyway.
    engines.ran("a", 10, 10.0)
    engines.ran("a", 5, 7.0)
    assert engines.takes("a", 20) == 10
    engines = Alone()
    engines.ran("b", 10, 10.0)
    engines.ran("a", 10, 10.4)
    engines.ran("a", 5, 6.65)
    # 0.75 s a genome, and 2.9 s: both end after 9.8 s, but half of 9.2 genomes takes longer: 4.6.
    assert engines.takes("a", 19) == 5
    engines = Alone()
    engines.ran("b", 10, 10.0)
    engines.ran("a", 10, 10.0)
    engines.ran("a", 5, 4.0)
    # A line through both would begin below 0: 0.8 s a genome. Both end after 8 s.
    assert engines.takes("a", 18) == 10


def test_an_engine_that_nobody_has_seen_is_taken_for_the_mean_of_the_others() -> None:
    engines = Alone()
    engines.ran("a", 10, 10.0)
    engines.ran("b", 10, 30.0)
    # 2 s a genome, beside 1 s and 3 s: all end after 12 / (1/2 + 1 + 1/3) = 6.5 s; half of 3.3.
    assert engines.takes("c", 12, num_engines=3) == 2
    engines = Alone()
    engines.ran("b", 10, 10.0)
    engines.ran("a", 10, 10.0)
    engines.ran("a", 5, 7.0)
    # 0.8 s a genome and 2 s, beside 0.6 s and 4 s, and 1 s: all end after 7.4 s; half of 6.8.
    assert engines.takes("c", 20, num_engines=3) == 4


def test_where_generations_overlap_every_share_is_whole_and_knows_of_blocks_that_go_on() -> None:
    now = 0.0
    shares = BlockScheduler(lambda: now)
    shares.begin(8, overlapping=True)
    first = shares.take("one", 2, 1000)
    other = shares.take("two", 2, 1000)
    assert [len(first.range_G), len(other.range_G)] == [4, 4], "of unknown speed, and not halved"
    now = 4.0
    shares.end(first)
    shares.begin(8, overlapping=True)  # "two" still runs, as quick as "one" as far as is known.
    assert len(shares.take("one", 2, 1000).range_G) == 4
    now = 6.0
    shares.end(other)  # Of the four that are left "one" can do one, from second 8 on.
    assert len(shares.take("two", 2, 1000).range_G) == 3
    assert shares.num_left == 1
