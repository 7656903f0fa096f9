"""An objective whose numbers follow what was solved lately."""

from collections.abc import Sequence
from typing import cast

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.names import Names
from es_cookbook.rl.objectives import OBJECTIVE_NAMES, Objective, Outcomes
from es_cookbook.rl.rollouts import mean_of
from es_cookbook.rl.types import Metrics


@chz.chz
class ByPerformance(Objective):
    """An objective whose numbers follow what was solved lately: a curriculum of the reward.

        x = (1 − d) · first_x + d · last_x,   d = (share − low) / (high − low), within 0 and 1

    for every option x in which `first` and `last` differ: weights, thresholds, limits of length.
    `share` is the mean share of rollouts that solved their problem, by the metric `SOLVED` or else
    by the reward, over the last `window` generations; before the first it is 0. A mixture with a
    curriculum, filter or replay measures it by its `solved_metric`.

    The history records the shares of each generation. So d follows from the history, and a run that
    was interrupted goes on with the same.

    Pitfall: scores under different options do not compare; what was learned shows in Env metrics.
    """

    first: Objective = Names(OBJECTIVE_NAMES, default=None).field(
        "objective while little is solved"
    )
    last: Objective = Names(OBJECTIVE_NAMES, default=None).field(
        "the same with other numbers, once much is solved"
    )
    low: float = chz.field(default=0.2, doc="share solved up to which it is `first`")
    high: float = chz.field(default=0.8, doc="share solved from which on it is `last`")
    window: int = chz.field(default=5, doc="generations whose share solved counts")

    @chz.validate
    def _options(self) -> None:
        check_range(self, "low", "high")
        check_range(self, "high", above=self.low)
        check_range(self, "window", at_least=1)
        if type(self.first) is not type(self.last) or self.first == self.last:
            raise ConfigError(
                "first and last must be the same objective with different numbers, such as "
                "first=length_penalty first.limit=256 last=length_penalty last.limit=64; found "
                f"{self.first} and {self.last}"
            )
        self.at(0.5)

    @property
    @override
    def follows_results(self) -> bool:
        return True

    @property
    @override
    def counted(self) -> Sequence[str]:
        return self.first.counted

    @override
    def check(self, attempts: int, temperature: float, path: str = "objective") -> None:
        self.first.check(attempts, temperature, f"{path}.first")
        self.last.check(attempts, temperature, f"{path}.last")

    def at(self, done: float) -> Objective:
        """The objective between `first` (0) and `last` (1).

        >>> from es_cookbook.plugins.objectives.length import LengthPenalty
        >>> ends = {"first": LengthPenalty(limit=400), "last": LengthPenalty(limit=100)}
        >>> ByPerformance(**ends).at(0.5).limit
        250

        Raises:
            ConfigError: They differ in what is no number.
        """
        first, last = self.first, self.last
        moved = {
            name: _between(name, field.final_type, getattr(first, name), getattr(last, name), done)
            for name, field in chz.chz_fields(first).items()
        }
        return chz.replace(first, **moved)

    def done(self, solved_T: Sequence[float]) -> float:
        """How far it has gone from `first` (0) to `last` (1), after generations of these shares."""
        share = mean_of(solved_T[-self.window :]) if solved_T else 0.0
        return min(max((share - self.low) / (self.high - self.low), 0.0), 1.0)

    @override
    def metrics(self, outcomes: Outcomes) -> Metrics:
        return {"objective/done": self.done(outcomes.solved_T)}

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        return self.at(self.done(outcomes.solved_T))(outcomes)


def _between(name: str, kind: object, first: object, last: object, done: float) -> object:
    """(1 − done) · first + done · last, of numbers and of tuples of them; whole where `kind` is."""
    if first == last:
        return first
    if isinstance(first, tuple) and isinstance(last, tuple):
        of_first, of_last = cast("tuple[object, ...]", first), cast("tuple[object, ...]", last)
        if len(of_first) == len(of_last):
            pairs = zip(of_first, of_last, strict=True)
            return tuple(_between(name, float, *pair, done) for pair in pairs)
    if {type(first), type(last)} <= {int, float}:
        value = (1 - done) * cast(float, first) + done * cast(float, last)
        return round(value) if kind in (int, int | None) else value
    raise ConfigError(
        f"first.{name} and last.{name} must be equal, or numbers, as many in both; found {first!r} "
        f"and {last!r}"
    )
