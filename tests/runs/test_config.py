"""Numbers that a run's Config refuses, and the nearest ones that it accepts."""

from pathlib import Path

import chz
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.objectives import PassAtK
from es_cookbook.runs.setup import load_problems
from tests.tiny_run import TinyConfig, tiny

CONFIG = TinyConfig(model_name="a/model", log_path="run", num_generations=1)


@pytest.mark.parametrize(
    ("field", "wrong", "said", "accepted"),
    [
        ("attempts", 0, "attempts must be at least 1, found 0", 1),
        ("num_generations", 10**9, r"num_generations must be in \[1, 1000000\], found", 10**6),
        ("snapshot_every", -1, "snapshot_every must be 0 or more, found -1", 0),
        ("eval_every", -1, "eval_every must be 0 or more, found -1", 0),
        ("rollout_timeout", 0.0, "rollout_timeout must be above 0, found 0", 1e-3),
        ("objective", PassAtK(k=4), "objective.k=4 needs attempts=4 or more", PassAtK(k=1)),
        ("eval_attempts", 2, "eval_attempts=2 would all be alike, since eval_temperature=0", 1),
        ("max_failed_fraction", 1.1, r"max_failed_fraction must be in \[0, 1\], found 1.1", 1.0),
        ("turn_timeout", 0.0, "turn_timeout must be above 0, found 0", 1e-3),
    ],
)
def test_numbers_that_cannot_be_are_refused_and_those_beside_are_not(
    field: str, wrong: object, said: str, accepted: object
) -> None:
    with pytest.raises(ConfigError, match=said):
        chz.replace(CONFIG, **{field: wrong})
    assert getattr(chz.replace(CONFIG, **{field: accepted}), field) == accepted


async def test_a_metric_that_no_gold_answer_reports_is_refused(tmp_path: Path) -> None:
    await load_problems(tiny(tmp_path, objective=PassAtK(k=1)))
    with pytest.raises(ConfigError, match=r"objective.metric must be .* did you mean 'correct'"):
        await load_problems(tiny(tmp_path, objective=PassAtK(k=1, metric="corect")))
