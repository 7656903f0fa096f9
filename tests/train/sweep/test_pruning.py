"""Which runs are stopped early, on literal curves."""

import pytest

from es_cookbook.train.sweep.loop import falls_behind
from es_cookbook.train.sweep.results import Curve

GOOD = [(0, 0.1), (10, 0.5), (20, 0.6), (27, 0.7)]
FAIR = [(0, 0.1), (10, 0.3), (20, 0.4)]
POOR = [(0, 0.1), (10, 0.2), (20, 0.2)]


@pytest.mark.parametrize(
    ("curve", "others", "expected"),
    [
        (POOR, [GOOD, FAIR], True),
        (FAIR, [GOOD, FAIR, POOR], False),
        (GOOD, [FAIR, POOR], False),
        (POOR, [GOOD], False),
        (POOR[:1], [GOOD, FAIR], False),
        ([], [GOOD, FAIR], False),
        ([(0, 0.0)], [[(0, 1.0)], [(0, 1.0)]], False),
        ([(10, 0.4), (20, 0.0)], [FAIR, POOR], False),
        (POOR, [GOOD, FAIR[:2]], False),
        (POOR, [[(20, 0.1)], [(27, 0.9)]], False),
    ],
    ids=[
        *("below", "at the median", "above", "too few others", "the base is nobody's fault"),
        *("nothing yet", "only the base", "its best counts", "others are not there yet"),
        "what others measure later does not count",
    ],
)
def test_a_run_below_the_median_of_the_others_is_stopped(
    curve: Curve, others: list[Curve], expected: bool
) -> None:
    assert falls_behind(curve, others, "median", at_least=2, num_generations=27) is expected


@pytest.mark.parametrize(
    ("curve", "others", "expected"),
    [
        (POOR[:2], [GOOD, FAIR], True),
        (FAIR[:2], [GOOD, FAIR], True),
        (GOOD[:2], [FAIR, POOR], False),
        (FAIR[:2], [GOOD, POOR, POOR, POOR, POOR], False),
        (POOR[:1], [GOOD, FAIR], False),
        ([(0, 0.1), (2, 0.0)], [GOOD, FAIR], False),
    ],
    ids=["worst", "second of three", "best", "second of six", "no rung", "before the first rung"],
)
def test_halving_keeps_the_best_third_at_a_rung(
    curve: Curve, others: list[Curve], expected: bool
) -> None:
    """Rungs of 27 generations are 3 and 9; the standing at 9 is what was measured by then."""
    early = [[(0, 0.1), (9, value[1][1])] for value in others]
    assert (
        falls_behind([(min(at, 9), value) for at, value in curve], early, "halving", 2, 27)
        is expected
    )
