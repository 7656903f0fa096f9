"""What a generation measures, from its rollouts and its step: the keys of `metrics.jsonl`."""

import math
from collections.abc import Mapping, Sequence

from es_cookbook.common.errors import HistoryError
from es_cookbook.evolution.genome import Step
from es_cookbook.rl.rollouts import count_tokens
from es_cookbook.rl.types import TrajectoryGroup


class Progress:
    """How far a run has come: rollouts and tokens so far, and how far the centre is from the base.

    Args:
        last: the last row of metrics of the run that is resumed; empty if none.

    Raises:
        HistoryError: It does not count rollouts.
    """

    def __init__(self, last: Mapping[str, float]) -> None:
        counts = [last.get(key, 0) for key in ("progress/rollouts", "progress/tokens")]
        if any(math.isnan(count) for count in counts):
            raise HistoryError("metrics.jsonl is damaged: its last line does not count rollouts")
        self._rollouts, self._tokens = map(int, counts)
        self._latest: dict[int, float] = {}
        """What the seeds of the last step have added up to in the centre."""
        self._earlier_squared = 0.0
        """Mean square of all that the centre has of other seeds."""
        self._has_moved = False

    def moved(self, step: Step) -> None:
        """Count a step of evolution strategies."""
        self._has_moved = True
        kept = 1 - step.decay
        earlier = {seed: kept * coefficient for seed, coefficient in self._latest.items()}
        self._earlier_squared *= kept * kept
        self._latest = {}
        if step.rule is None:
            # A seed of the step before as well, of momentum's window, goes on in its direction.
            for term in step.terms:
                so_far = self._latest.get(term.seed) or earlier.pop(term.seed, 0.0)
                self._latest[term.seed] = so_far + term.coefficient
        else:
            self._earlier_squared += step.mean_square
        # Different seeds are independent: they add up as squares.
        self._earlier_squared += math.fsum(value * value for value in earlier.values())

    def rolled_out(self, groups_P: Sequence[TrajectoryGroup]) -> None:
        """Count rollouts and their tokens."""
        self._rollouts += sum(len(ks) for group in groups_P for ks in group.trajectories_G_K)
        self._tokens += count_tokens(groups_P)

    def metrics(self) -> Mapping[str, float]:
        """`progress/rollouts`, `progress/tokens`, and `centre/drift_rms` over the search space.

        The drift is that of a parameter that has all of every term. Where the search space scales
        or masks noise, and steps are plain sums of terms, a parameter with factor f on σ has f
        times it, one that is outside the mask has none, and each of n blocks has 1 / √n of it.
        Steps by a rule (Adam's, Muon's) are taken as independent of each other, so where one goes
        on in the direction of the last the drift is more than this.
        """
        counted = {"progress/rollouts": self._rollouts, "progress/tokens": self._tokens}
        if not self._has_moved:
            return counted
        latest_squared = math.fsum(value * value for value in self._latest.values())
        return {**counted, "centre/drift_rms": math.sqrt(self._earlier_squared + latest_squared)}
