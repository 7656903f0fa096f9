"""What rollouts in progress have brought up to now, for who looks at a run meanwhile.

A generation of a large model may take an hour. The event loop counts here what each rollout earned,
and a view reads it from a thread of its own. Nothing of it is recorded: what counts is measured
again when all rollouts have ended.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from es_cookbook.rl.types import LostRollout, Trajectory

_BEGINNING = 2.0
"""Seconds in which prompts are read, that tell nothing of how long answers take."""


@dataclasses.dataclass(slots=True, eq=False)
class Rollouts:
    """Those of one generation, or of an evaluation.

    Attributes:
        generation: None of an evaluation.
        count: of all of them.
        stats: the engine's counters, as they are now.
        usual_tokens: of a rollout, as far as is known from others; 0: it is not.
        began: when, by `time.monotonic`.
        num_done: that have ended; of them `num_lost` were lost.
        is_over: all have ended, or the run has.
    """

    generation: int | None
    count: int
    stats: Callable[[], Mapping[str, float]]
    usual_tokens: float = 0.0
    began: float = dataclasses.field(default_factory=time.monotonic)
    num_done: int = 0
    num_lost: int = 0
    is_over: bool = False
    _total: float = 0.0
    _num_rewards: int = 0
    _tokens_of_done: int = 0
    _tokens_before: float = 0.0

    def __post_init__(self) -> None:
        self._tokens_before = self.stats().get("tokens", 0.0)

    def ended(self, rollout: Trajectory | LostRollout, has_reward: bool) -> None:
        """Count one; whether its own reward is what its genome earned, or only a part of it."""
        self.num_done += 1
        if isinstance(rollout, LostRollout):
            self.num_lost += 1
            return
        self._tokens_of_done += rollout.num_tokens
        if has_reward:
            self._total += rollout.reward
            self._num_rewards += 1

    @property
    def mean_reward(self) -> float:
        """Of those that have ended and have one of their own; NaN without any."""
        return self._total / self._num_rewards if self._num_rewards else math.nan

    @property
    def mean_tokens(self) -> float:
        """Of those that have ended; 0 before the first."""
        return self._tokens_of_done / max(self.num_done, 1)

    @property
    def num_tokens(self) -> float:
        """That were sampled since these rollouts began, as far as the engine counts them."""
        return self.stats().get("tokens", 0.0) - self._tokens_before

    @property
    def share_done(self) -> float:
        """Of the tokens to sample, where the engine counts them: it samples many rollouts at once.

        How many that are in all follows from those that have ended. Of short ones there are too
        many at first, so it is no fewer than usual.
        """
        of_tokens = self.count * max(self.mean_tokens, self.usual_tokens)
        by_tokens = self.num_tokens / of_tokens if of_tokens else 0.0
        return max(self.num_done / self.count, min(by_tokens, 0.99))

    @property
    def seconds(self) -> float:
        """Since they began."""
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        """Until all have ended, if the rest takes as long; NaN while nobody can tell."""
        share, is_known = self.share_done, self.usual_tokens or self.num_done >= self.count / 20
        can_tell = is_known and share > 0.01 and self.seconds >= _BEGINNING
        return self.seconds * (1 - share) / share if can_tell else math.nan


@dataclasses.dataclass(slots=True, eq=False)
class Underway:
    """What a run is doing.

    Attributes:
        rollouts: that began last; None before the first.
    """

    rollouts: Rollouts | None = None

    def begin(
        self, generation: int | None, count: int, stats: Callable[[], Mapping[str, float]]
    ) -> Rollouts:
        """So many rollouts begin, of a generation or of an evaluation (None)."""
        before = self.rollouts
        usual = before.mean_tokens or before.usual_tokens if before else 0.0
        self.rollouts = Rollouts(generation, count, stats, usual)
        return self.rollouts
