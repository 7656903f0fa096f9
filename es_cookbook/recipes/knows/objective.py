"""The objective `balanced`: mean rewards of right and of wrong answers, counted alike.

    score = 1/2 · mean reward of a genome's right answers + 1/2 · that of its wrong answers

over all problems of a generation. In the recipe `knows` a reward is how well a claim fits the
answer; with a plain mean, claiming what is true of most answers pays.
"""

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.rl.objectives import SOLVED, Objective, Outcomes
from es_cookbook.rl.rollouts import mean_over_attempts


@chz.chz
class Balanced(Objective):
    """The mean reward of right answers and that of wrong answers, counted alike."""

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """Return scores whose mean over the problems is a genome's score.

        A genome whose answers are all right, or all wrong, has none (NaN).
        """
        correct_P_G_K = outcomes.values(SOLVED, "objective")
        right_P_G_K = correct_P_G_K >= 1
        right_G = right_P_G_K.sum(axis=(0, 2))
        wrong_G = (correct_P_G_K < 1).sum(axis=(0, 2))
        least_G = np.minimum(right_G, wrong_G)
        count_P_G_K = np.where(right_P_G_K, right_G[:, None], wrong_G[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            weights_P_G_K = (right_G + wrong_G)[:, None] / 2 / count_P_G_K
        weights_P_G_K[:, least_G == 0] = np.nan
        return mean_over_attempts(outcomes.rewards_P_G_K * weights_P_G_K)
