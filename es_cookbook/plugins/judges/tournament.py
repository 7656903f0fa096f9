"""Tournaments: which answers of a group are compared by a judge, and their win rates.

A player is a number from 0 to n - 1, and a pair (i, j) has i < j. With n players

    round robin      n (n - 1) / 2 pairs: each meets all others
    ring             n k / 2: each meets k others, drawn by a seed; results are comparable, because
                     players are linked by others whom both have met

A `Tournament` of answers has a judge compare them:

    pattern    judgements of n different answers, in both orders
    ring       n k: each against k others, drawn by a seed; k of n - 1 or more is a round robin
    centre     2 n: each against the centre's own answer

Equal texts are one player: what one of them wins, all win, and against each other they draw. A
greedy population of hundreds often has a handful of different answers, and then a ring is a round
robin. A win rate is the expected result against another answer of the group, drawn at random, or
against the centre's.

Judges prefer a position. So each pair is judged in both orders, and the result is the mean, which
cancels the preference. Its size is measured (`Judgements.metrics`).

A pair with a lost judgement has no result. An answer without any result has no win rate.

Left out: ratings (Bradley-Terry, Elo). They differ from win rates if players met different
opponents, and fitness compares genomes anew in each generation. Also elimination, which says little
about all but the winner, while a population's fitness needs all.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import anyio
import chz

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import EnvError
from es_cookbook.common.seeds import derive_seed

PlayerPair: TypeAlias = tuple[int, int]
"""Two players, the smaller number first."""
Compare: TypeAlias = Callable[[str, str], Awaitable[float]]
"""A judge's probability that the first of two answers is the better one; EnvError if lost."""


def ring(n: int, k: int, seed: int) -> list[PlayerPair]:
    """Return pairs in which each of `n` players meets `k` others on a shuffled circle.

    With n and k both odd one player has an opponent fewer; with k of n - 1 or more all meet all.

    >>> len(ring(8, 3, seed=0)), len(ring(8, 7, seed=0))
    (12, 28)
    """
    if k >= n - 1:
        return list(itertools.combinations(range(n), 2))
    circle = list(range(n))
    random.Random(seed).shuffle(circle)
    places = [(at, (at + step) % n) for step in range(1, k // 2 + 1) for at in range(n)]
    if k % 2:
        places += [(at, at + n // 2) for at in range(n // 2)]
    return sorted(pair_of(circle[one], circle[other]) for one, other in places)


def pair_of(one: int, other: int) -> PlayerPair:
    """Return the two, the smaller number first."""
    return (one, other) if one < other else (other, one)


class Judgements:
    """A judge's preferences among players.

    Attributes:
        preferred: pair (i, j) -> probability that i is better; NaN if it was lost.
        lost: reasons of lost judgements.
    """

    def __init__(self, players: Sequence[str], compare: Compare) -> None:
        self._players, self._compare = players, compare
        self.preferred: dict[PlayerPair, float] = {}
        self.lost: list[str] = []
        self._firsts: list[float] = []
        """The first place's probability in each judgement."""
        self._swaps: list[bool] = []
        """For each pair asked in both orders, whether the winner changed with the order."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The number of `judgements`, and if there are any, properties of the judge.

        `first_wins` is the share that the first place wins (one half counts half),
        `swap_changes` the share of pairs whose winner depends on the order, `lost_judgements` the
        share without a verdict.
        """
        count = len(self._firsts) + len(self.lost)
        found = {"judgements": float(count)}
        if count:
            found["lost_judgements"] = len(self.lost) / count
        if self._firsts:
            won = math.fsum((first > 0.5) + (first == 0.5) / 2 for first in self._firsts)
            found["first_wins"] = won / len(self._firsts)
        if self._swaps:
            found["swap_changes"] = sum(self._swaps) / len(self._swaps)
        return found

    def result(self, i: int, j: int) -> float:
        """Return player i's result against j: ½ against itself, NaN without a judgement."""
        if i == j:
            return 0.5
        found = self.preferred.get(pair_of(i, j), math.nan)
        return found if i < j else 1 - found

    def win_rate(self, i: int, sizes: Sequence[int]) -> float:
        """Return player i's expected result against a random other answer of the group.

        Those of the same text draw; all others count as the ones that i was compared with, each by
        how many answers are the same text (`sizes`).
        """
        same, others = sizes[i] - 1, sum(sizes) - sizes[i]
        met = [j for j in range(len(sizes)) if j != i and not math.isnan(self.result(i, j))]
        if others and not met:
            return math.nan
        won = math.fsum(sizes[j] * self.result(i, j) for j in met)
        against_others = won / sum(sizes[j] for j in met) if met else 0.0
        drawn = same / 2 + others * against_others
        return drawn / (same + others) if same + others else math.nan

    async def judge(self, pairs: Sequence[PlayerPair]) -> None:
        """Judge these pairs concurrently, except those that were judged before."""
        async with anyio.create_task_group() as asking:
            for i, j in pairs:
                if (i, j) not in self.preferred:
                    self.preferred[i, j] = math.nan
                    asking.start_soon(self._judge, i, j)

    async def _judge(self, i: int, j: int) -> None:
        first, second = await self._ask(i, j), await self._ask(j, i)
        if not math.isnan(first + second):
            self._swaps.append((first - 0.5) * (0.5 - second) < 0)
        self.preferred[i, j] = (first + 1 - second) / 2

    async def _ask(self, i: int, j: int) -> float:
        try:
            first = await self._compare(self._players[i], self._players[j])
        except EnvError as error:
            self.lost.append(str(error))
            return math.nan
        self._firsts.append(first)
        return first


@chz.chz
class Tournament:
    """The pattern of comparisons among answers."""

    pattern: Literal["ring", "centre"] = chz.field(
        default="ring", doc="ring: each with some others; centre: each with the centre's answer"
    )
    opponents: int = chz.field(default=4, doc="number of others that each meets on a ring")

    _opponents = in_range("opponents", at_least=1)

    async def win_rates(
        self, answers: Sequence[str], compare: Compare, seed: int, against: str | None = None
    ) -> tuple[list[float], Judgements]:
        """Return the win rate of each answer, NaN without a result, and what was judged.

        Args:
            answers: the group's answers, with repetitions.
            compare: asks the judge.
            seed: seed of the ring.
            against: one answer with which all are compared, in place of each other.
        """
        sizes = Counter(answers)
        players = list(sizes if against is None else {**sizes, against: 0})
        n, judged = len(players), Judgements(players, compare)
        if against is not None:
            other = players.index(against)
            await judged.judge([pair_of(i, other) for i in range(n) if i != other])
            rates = [judged.result(i, other) for i in range(n)]
        else:
            await judged.judge(ring(n, self.opponents, derive_seed(seed, "ring")))
            counts = [sizes[player] for player in players]
            rates = [judged.win_rate(i, counts) for i in range(n)]
        rate_of = dict(zip(players, rates, strict=True))
        return [rate_of[text] for text in answers], judged
