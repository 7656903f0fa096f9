"""Win rates of a group's answers, which a judge compares in pairs.

    pattern    judgements of n different answers, in both orders
    all        n (n - 1): each against all others
    ring       n k: each against k others, drawn by a seed
    swiss      n k: k rounds, each against one that has won about as much
    centre     2 n: each against the centre's own answer

Answers that are the same text are one player: what one of them wins, all win, and against each
other they draw. A greedy population of hundreds often has a handful of different answers, and then
`ring` is the same as `all`; where every answer is different, `all` costs a square. A win rate is
the expected result against another answer of the group, drawn at random; against the centre's with
`centre`.

A judge may prefer a place. With `orders=both` each pair is asked twice, once in each order, and the
result is the mean: whatever the place adds is taken off again. `orders=one` asks once, in an order
drawn by a seed, at half the cost: on average over many pairs it favours nobody, but each result has
the bias in it. How large it is, is measured either way (`Tally.metrics`).

A pair of which a judgement was lost has no result. An answer without any result has no win rate.

Left out: ratings (Bradley-Terry, Elo). They differ from win rates where players met different
opponents, and fitness compares genomes anew in each generation.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import anyio
import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import EnvError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.pairings import PlayerPair, pair_of, ring, round_robin, swiss

Compare: TypeAlias = Callable[[str, str], Awaitable[float]]
"""A judge's probability that the first of two answers is the better one; EnvError if lost."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What was judged.

    Attributes:
        firsts: the first place's probability in each judgement.
        swaps: for each pair asked in both orders, whether the winner changed with the order.
        lost: why judgements were lost, one line each.
    """

    firsts: list[float] = dataclasses.field(default_factory=list[float])
    swaps: list[bool] = dataclasses.field(default_factory=list[bool])
    lost: list[str] = dataclasses.field(default_factory=list[str])

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers of one group: `judgements`, and where there are any, what they say of the judge.

        `first_wins` is the share in which the first place wins (one half counts half),
        `swap_changes` the share of pairs whose winner depends on the order, `lost_judgements` the
        share without a verdict.
        """
        count = len(self.firsts) + len(self.lost)
        found = {"judgements": float(count)}
        if count:
            found["lost_judgements"] = len(self.lost) / count
        if self.firsts:
            won = math.fsum((first > 0.5) + (first == 0.5) / 2 for first in self.firsts)
            found["first_wins"] = won / len(self.firsts)
        if self.swaps:
            found["swap_changes"] = sum(self.swaps) / len(self.swaps)
        return found


@chz.chz
class Tournament:
    """Who is compared with whom, and how often."""

    pattern: Literal["all", "ring", "swiss", "centre"] = chz.field(
        default="ring",
        doc="each against all others, some on a ring, some by Swiss rounds, the centre's answer",
    )
    opponents: int = chz.field(default=4, doc="of each answer, for ring and swiss")
    orders: Literal["both", "one"] = chz.field(
        default="both",
        doc="both: each pair in both orders, which cancels a preference for a place; one: at half "
        "the cost, in an order drawn by a seed",
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "opponents", at_least=1)

    async def win_rates(
        self, answers: Sequence[str], compare: Compare, seed: int, against: str | None = None
    ) -> tuple[list[float], Tally]:
        """The win rate of each answer, NaN for one without a result, and what was judged.

        Args:
            answers: of the group; the same text may come more than once.
            compare: asks the judge.
            seed: of the draws.
            against: one answer with which all are compared, in place of each other.
        """
        sizes = Counter(answers)
        players = list(sizes if against is None else {**sizes, against: 0})
        results = _Results(players, compare, self.orders == "both", seed)
        if against is not None:
            other = players.index(against)
            await results.judge([pair_of(i, other) for i in range(len(players)) if i != other])
            rates = [results.of(i, other) for i in range(len(players))]
        else:
            await self._compare_all(results, len(players), seed)
            rates = [
                _win_rate(results, i, [sizes[player] for player in players])
                for i in range(len(players))
            ]
        rate_of = dict(zip(players, rates, strict=True))
        return [rate_of[text] for text in answers], results.tally

    async def _compare_all(self, results: "_Results", n: int, seed: int) -> None:
        if self.pattern == "swiss":
            for turn in range(min(self.opponents, n - 1)):
                met = results.preferred.keys()
                await results.judge(swiss(results.points, met, derive_seed(seed, "swiss", turn)))
        elif self.pattern == "ring":
            await results.judge(ring(n, self.opponents, derive_seed(seed, "ring")))
        else:
            await results.judge(round_robin(n))


class _Results:
    """What the judge said of pairs of players.

    Attributes:
        preferred: by pair (i, j), the probability that i is better; NaN where it was lost.
        tally: what was judged.
    """

    def __init__(self, players: Sequence[str], compare: Compare, both: bool, seed: int) -> None:
        self._players, self._compare = players, compare
        self._both, self._seed = both, seed
        self.preferred: dict[PlayerPair, float] = {}
        self.tally = Tally()

    @property
    def points(self) -> list[float]:
        """Each player's results so far, added up."""
        n = range(len(self._players))
        return [math.fsum(p for j in n if not math.isnan(p := self.of(i, j))) for i in n]

    def of(self, i: int, j: int) -> float:
        """Player i's result against j: one half against itself, NaN without a judgement."""
        if i == j:
            return 0.5
        found = self.preferred.get(pair_of(i, j), math.nan)
        return found if i < j else 1 - found

    async def judge(self, pairs: Sequence[PlayerPair]) -> None:
        """Have these pairs judged, all at once; those that were judged before are not again."""
        async with anyio.create_task_group() as asking:
            for i, j in pairs:
                if (i, j) not in self.preferred:
                    self.preferred[i, j] = math.nan
                    asking.start_soon(self._judge, i, j)

    async def _judge(self, i: int, j: int) -> None:
        if self._both:
            first, second = await self._ask(i, j), await self._ask(j, i)
            if not math.isnan(first + second):
                self.tally.swaps.append((first - 0.5) * (0.5 - second) < 0)
            self.preferred[i, j] = (first + 1 - second) / 2
        elif derive_seed(self._seed, "order", i, j) % 2:
            self.preferred[i, j] = await self._ask(i, j)
        else:
            self.preferred[i, j] = 1 - await self._ask(j, i)

    async def _ask(self, i: int, j: int) -> float:
        try:
            first = await self._compare(self._players[i], self._players[j])
        except EnvError as error:
            self.tally.lost.append(str(error))
            return math.nan
        self.tally.firsts.append(first)
        return first


def _win_rate(results: _Results, i: int, sizes: Sequence[int]) -> float:
    """The expected result against another answer, drawn at random from the group.

    Those of the same text draw; all others count as the ones that i was compared with, each by how
    many answers are the same text.
    """
    same, others = sizes[i] - 1, sum(sizes) - sizes[i]
    met = [j for j in range(len(sizes)) if j != i and not math.isnan(results.of(i, j))]
    if others and not met:
        return math.nan
    won = math.fsum(sizes[j] * results.of(i, j) for j in met)
    against_others = won / sum(sizes[j] for j in met) if met else 0.0
    return (same / 2 + others * against_others) / (same + others) if same + others else math.nan
