"""Who meets whom: pairs of players of a tournament, for games and for judgements of answers.

A player is a number from 0 to n - 1, and a pair (i, j) has i < j; which of them goes first is the
caller's choice. With n players

    round_robin      n (n - 1) / 2 pairs: each meets all others
    ring             n k / 2: each meets k others, drawn by a seed; results compare, for all are
                     linked by others whom both have met
    swiss            n / 2 a round: each meets somebody who has done about as well, so few rounds
                     tell the best apart; the next round needs the results of this one

Left out: elimination, which says little about all but the winner, where a population's fitness
needs to know all.
"""

import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeAlias

PlayerPair: TypeAlias = tuple[int, int]
"""Two players, the smaller number first."""


def round_robin(n: int) -> list[PlayerPair]:
    """All pairs of `n` players.

    >>> round_robin(3)
    [(0, 1), (0, 2), (1, 2)]
    """
    return [(i, j) for i in range(n) for j in range(i + 1, n)]


def ring(n: int, k: int, seed: int) -> list[PlayerPair]:
    """Pairs in which each of `n` players meets `k` others: neighbours on a circle, shuffled.

    With n and k both odd one player has an opponent fewer; with k of n - 1 or more all meet all.

    >>> len(ring(8, 3, seed=0)), len(ring(8, 7, seed=0))
    (12, 28)
    """
    if k >= n - 1:
        return round_robin(n)
    circle = list(range(n))
    random.Random(seed).shuffle(circle)
    places = [(at, (at + step) % n) for step in range(1, k // 2 + 1) for at in range(n)]
    if k % 2:
        places += [(at, at + n // 2) for at in range(n // 2)]
    return sorted(pair_of(circle[one], circle[other]) for one, other in places)


def swiss(scores: Sequence[float], met: Collection[PlayerPair], seed: int) -> list[PlayerPair]:
    """One round: players of neighbouring scores, who meet again only where nobody else is left.

    Of an odd number one of those with the most pairs in `met` sits out, the one of the lowest
    score.

    Args:
        scores: of each player so far; who is level is shuffled.
        met: pairs of the rounds before, (i, j) with i < j.
        seed: of the shuffle; give each round its own.

    >>> swiss([2.0, 0.0, 1.0, 2.0], {(0, 3)}, seed=0)
    [(0, 2), (1, 3)]
    """
    ranked = list(range(len(scores)))
    random.Random(seed).shuffle(ranked)
    ranked.sort(key=lambda player: -scores[player])
    if len(ranked) % 2:
        times = Counter(player for pair in met for player in pair)
        ranked.remove(max(reversed(ranked), key=lambda player: times[player]))
    before = set(met)
    pairs: list[PlayerPair] = []
    while ranked:
        first = ranked.pop(0)
        fresh = (at for at, other in enumerate(ranked) if pair_of(first, other) not in before)
        pairs.append(pair_of(first, ranked.pop(next(fresh, 0))))
    return sorted(pairs)


def pair_of(one: int, other: int) -> PlayerPair:
    """The two, the smaller number first."""
    return (one, other) if one < other else (other, one)
