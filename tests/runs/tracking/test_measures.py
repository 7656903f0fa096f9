"""What a generation measures, on literal arrays."""

import math

import numpy as np
import pytest

from es_cookbook.common.errors import HistoryError
from es_cookbook.evolution.genome import Offsets, OffsetsRule, Step, Term
from es_cookbook.rl.types import LostRollout, TrajectoryGroup
from es_cookbook.runs.recorder import Progress
from tests.fakes import trajectory

LOST = LostRollout("OSError: no", "")
THREE_TOKENS = trajectory(1.0, tokens=3)


def test_progress_adds_up_and_goes_on_from_the_last_line() -> None:
    last = {"progress/rollouts": 10.0, "progress/tokens": 100.0}
    for progress, rollouts, tokens in ((Progress({}), 0, 0), (Progress(last), 10, 100)):
        progress.rolled_out([TrajectoryGroup([[THREE_TOKENS, LOST], [THREE_TOKENS, LOST]])])
        counts = {"progress/rollouts": rollouts + 4, "progress/tokens": tokens + 6}
        assert progress.metrics() == counts, "without a step there is no drift"
    with pytest.raises(HistoryError, match="does not count rollouts"):
        Progress({"progress/rollouts": math.nan})


def test_drift_is_the_root_of_the_squares_and_decays_with_the_centre() -> None:
    progress = Progress({})
    progress.moved(Step((Term(1, 0.3), Term(2, -0.4))))
    assert progress.metrics()["centre/drift_rms"] == pytest.approx(0.5)
    progress.moved(Step((Term(3, 0.6),), decay=0.5))
    assert progress.metrics()["centre/drift_rms"] == pytest.approx(math.hypot(0.25, 0.6))


def test_drift_in_the_direction_of_a_seed_that_comes_again_adds_up() -> None:
    """As momentum's do: each gradient is in all the steps of the window, a part in each."""
    progress = Progress({})
    progress.moved(Step((Term(1, 0.1), Term(2, 0.4))))
    progress.moved(Step((Term(1, 0.3), Term(3, 0.2), Term(3, 0.1))))
    assert progress.metrics()["centre/drift_rms"] == pytest.approx(math.hypot(0.4, 0.4, 0.3))
    progress.moved(Step((Term(1, -0.1), Term(2, 0.1)), decay=0.5))  # As with sharpness in between.
    assert progress.metrics()["centre/drift_rms"] == pytest.approx(math.hypot(0.1, 0.3, 0.15))
    # A step of CMA-ES says where the centre is.
    progress.moved(Step(rule=OffsetsRule(Offsets.of(np.array([3.0, 4.0])), moved=7.0)))
    assert progress.metrics()["centre/drift_rms"] == pytest.approx(12.5**0.5)
