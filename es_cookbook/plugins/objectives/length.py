"""Length penalties: of two right answers the shorter earns more, of two wrong ones the longer.

An answer's length becomes a fraction f from 0 (short) to 1 (long), in one of two ways, and f
changes its reward r by a share s:

    right:  r · (1 − s f)
    wrong:  r + (1 − r) · s f

A right answer loses reward with its length; a wrong one gains reward, so that a model does not
learn to give up early. The second line assumes rewards of at most 1; a wrong answer then never
earns more than 1, and with s = 0.3 a right one keeps at least 0.7 of its reward.

Pitfall: with rewards of 0 and 1 and s above one half, a long wrong answer earns more than a long
right one. `penalised` takes any s from 0 to 1; 0.3 is the usual one.

Lengths may be in any unit: words, characters, tokens. NaN is a lost rollout,
and stays NaN.

`Length` adjusts another reward function by the words of one answer. What compares the answers to a
problem with each other cannot be a function of one of them: it is the objective `length_penalty`
without a limit, which sees all attempts of all genomes.
"""

import dataclasses
import math
from typing import Self

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.names import Names
from es_cookbook.rl.objectives import OBJECTIVE_NAMES, Objective, Outcomes
from es_cookbook.rl.rewards.base import (
    REWARD_NAMES,
    Fields,
    Reward,
    Score,
    name_of,
    reward_and_metrics,
)

STRENGTH = 0.3
"""The usual share of the reward that length can change."""


def dynamic_fractions(lengths: NDArray[np.float64], limit: float) -> NDArray[np.float64]:
    """Return each length as a share of the limit, at most 1.

    >>> dynamic_fractions(np.array([0.0, 5.0, 40.0]), limit=20)
    array([0.  , 0.25, 1.  ])
    """
    return np.minimum(lengths, limit) / limit


def normalised_fractions(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the normal distribution function of each length's z-score.

    So there is no limit to choose: 0.5 is as long as the mean, and lengths that are all the same
    are all 0.5.

    >>> normalised_fractions(np.array([8.0, 10.0, 12.0])).round(3)
    array([0.11, 0.5 , 0.89])
    """
    present = lengths[~np.isnan(lengths)]
    fractions = np.where(np.isnan(lengths), np.nan, 0.5)
    if len(present) and float(np.ptp(present)) > 0:
        z = (lengths - present.mean()) / (present.std() * math.sqrt(2))
        fractions = np.array([0.5 * math.erfc(-value) for value in z.ravel().tolist()])
    return fractions.reshape(lengths.shape)


def penalised(
    rewards: NDArray[np.float64],
    is_right: NDArray[np.bool_],
    fractions: NDArray[np.float64],
    strength: float = STRENGTH,
) -> NDArray[np.float64]:
    """Return rewards adjusted by length; all arrays have one shape.

    >>> penalised(np.array([1.0, 1.0, 0.1, 0.1]), np.array([True, True, False, False]),
    ...           np.array([0.0, 1.0, 0.0, 1.0]))
    array([1.  , 0.7 , 0.1 , 0.37])
    """
    return np.where(
        is_right,
        rewards * (1 - strength * fractions),
        rewards + (1 - rewards) * strength * fractions,
    )


@chz.chz
class _Penalty:
    """The options of both."""

    strength: float = chz.field(default=STRENGTH, doc="share of the reward that length can change")
    right_above: float = chz.field(
        default=0.9, doc="answers are right, and should be short, if their reward is above this"
    )

    _limit = in_range("limit", at_least=1)
    _strength = in_range("strength", at_least=0, at_most=1)
    _right_above = in_range("right_above")


@chz.chz
class Length(_Penalty, Reward):
    """Another reward, adjusted by the number of words (`dynamic_fractions`, `penalised`).

    The other reward is reported as a metric by its own name.

    >>> Length(limit=4)("one two <answer>3</answer>", {"answer": "3"})
    (0.775, {'exact': 1.0})
    """

    of: Reward = Names(REWARD_NAMES, default="exact").field("reward that is adjusted")
    limit: int = chz.field(default=200, doc="words at which an answer is fully long")

    def __call__(self, text: str, row: Fields) -> Score:
        """Return the adjusted reward, and the other one with its metrics."""
        return self._adjusted(text, self.of(text, row))

    async def grade(self, text: str, row: Fields) -> Score:
        return self._adjusted(text, await self.of.grade(text, row))

    def read(self, text: str, row: Fields) -> str | None:
        return self.of.read(text, row)

    def after(self, prompt: str) -> Self:
        of = self.of.after(prompt)
        return self if of is self.of else chz.replace(self, of=of)

    def check(self) -> None:
        self.of.check()

    def check_row(self, row: Fields) -> None:
        self.of.check_row(row)

    def _adjusted(self, text: str, score: Score) -> Score:
        reward, metrics = reward_and_metrics(score)
        words = len(text.split(maxsplit=self.limit))  # One more than the limit is enough to know.
        moved = penalised(
            np.array(reward),
            np.array(reward > self.right_above),
            dynamic_fractions(np.array(float(words)), self.limit),
            self.strength,
        )
        return float(moved), {**metrics, name_of(self.of): reward}


@chz.chz
class LengthPenalty(_Penalty, Objective):
    """Another objective over rewards adjusted by length.

    Length is in sampled tokens. Without a limit an answer is long or short among all attempts of
    all genomes at its problem, since problems need answers of different lengths.
    """

    limit: int | None = chz.field(
        default=None,
        doc="tokens at which an answer is fully long; None: relative to the problem's answers",
    )
    inner: Objective = Names(OBJECTIVE_NAMES, default="mean").field("objective over them")

    @chz.validate
    def _inner(self) -> None:
        if counted := self.inner.counted:
            raise ConfigError(
                f"inner counts the metric {', '.join(map(repr, counted))}, on which a length "
                "penalty has no effect; use inner=max_of_k, or inner.metric=reward, or "
                "inner.rewards=reward,..."
            )

    @property
    @override
    def compares_genomes(self) -> bool:
        return self.limit is None or super().compares_genomes

    @override
    def check(self, attempts: int, temperature: float, path: str = "objective") -> None:
        self.inner.check(attempts, temperature, f"{path}.inner")

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        lengths_P_G_K = outcomes.tokens_P_G_K
        if self.limit is None:
            fractions_P_G_K = np.stack([normalised_fractions(of_p) for of_p in lengths_P_G_K])
        else:
            fractions_P_G_K = dynamic_fractions(lengths_P_G_K, self.limit)
        rewards_P_G_K = outcomes.rewards_P_G_K
        is_right_P_G_K = rewards_P_G_K > self.right_above
        moved_P_G_K = penalised(rewards_P_G_K, is_right_P_G_K, fractions_P_G_K, self.strength)
        return self.inner(dataclasses.replace(outcomes, rewards_P_G_K=moved_P_G_K))
