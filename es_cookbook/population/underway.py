"""Rollouts in progress, for views of a run.

A generation of a large model may take an hour. The event loop counts here what each rollout earned,
and a view reads it from a thread of its own. None of it is recorded: results are measured again
when all rollouts have ended.
"""

import dataclasses
import math
import time

from es_cookbook.rl.types import LostRollout, Trajectory

_LEAST_SECONDS, _LEAST_SHARE = 2.0, 0.05
"""Before which the time left is not estimated."""


@dataclasses.dataclass(slots=True, eq=False)
class Rollouts:
    """The rollouts of one generation, or of an evaluation.

    Attributes:
        generation: None of an evaluation.
        count: of all of them.
        began: when, by `time.monotonic`.
        num_done: that have ended; of them `num_lost` were lost.
        is_over: all have ended, or the run has.
    """

    generation: int | None
    count: int
    began: float = dataclasses.field(default_factory=time.monotonic)
    num_done: int = 0
    num_lost: int = 0
    is_over: bool = False
    _total: float = 0.0
    _num_rewards: int = 0

    def ended(self, rollout: Trajectory | LostRollout, has_reward: bool) -> None:
        """Count one; whether its own reward is what its genome earned, or only a part of it."""
        self.num_done += 1
        if isinstance(rollout, LostRollout):
            self.num_lost += 1
        elif has_reward:
            self._total += rollout.reward
            self._num_rewards += 1

    @property
    def mean_reward(self) -> float:
        """Of those that have ended and have one of their own; NaN without any."""
        return self._total / self._num_rewards if self._num_rewards else math.nan

    @property
    def seconds(self) -> float:
        """Since they began."""
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        """Until all have ended, if the others take as long; NaN if it is too early to tell."""
        if self.num_done < _LEAST_SHARE * self.count or self.seconds < _LEAST_SECONDS:
            return math.nan
        return self.seconds * (self.count - self.num_done) / self.num_done


@dataclasses.dataclass(slots=True, eq=False)
class Underway:
    """What a run is doing.

    Attributes:
        rollouts: that began last; None before the first.
    """

    rollouts: Rollouts | None = None

    def begin(self, generation: int | None, count: int) -> Rollouts:
        """Begin so many rollouts, of a generation or of an evaluation (None)."""
        self.rollouts = Rollouts(generation, count)
        return self.rollouts
