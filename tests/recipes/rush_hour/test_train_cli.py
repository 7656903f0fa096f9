"""The command line of the recipe, a run of two generations, and a small model for it."""

import itertools
import random

from es_cookbook.baselines.small_model import build_tokenizer
from es_cookbook.recipes.rush_hour import warm_start
from es_cookbook.recipes.rush_hour.env import RushHourEnv, RushHourReward
from es_cookbook.recipes.rush_hour.generate import Problem, generate_problems
from es_cookbook.recipes.rush_hour.warm_start import CHARACTERS
from es_cookbook.rl.types import Metrics, Observation


def problems(count: int) -> list[Problem]:
    return list(itertools.islice(generate_problems(0, range(10), size=5, max_moves=8), count))


def graded(problem: Problem, text: str) -> Metrics:
    moves = len(problem.solution or ())
    return RushHourEnv(Observation(()), problem.board, moves, RushHourReward()).grade(text).metrics


def test_demonstrations_earn_everything_within_the_token_budget() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    for problem in problems(30):
        text = warm_start.demonstrate(problem)
        metrics = graded(problem, text)
        assert metrics["optimal"] == metrics["well_formed"] == 1
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) < 48


def test_careless_demonstrations_stop_early_the_more_often_the_lower_the_target() -> None:
    rng = random.Random(0)
    shares: dict[int, list[bool]] = {}
    for problem in problems(150):
        leaves_out = [warm_start.leaves_out_the_last(problem, rng) for _ in range(40)]
        if len(problem.solution or ()) == 1:
            assert not any(leaves_out)
            continue
        shares.setdefault(problem.board.target.start // 5, []).extend(leaves_out)
        metrics = graded(problem, warm_start.demonstrate(problem, without_last=True))
        assert metrics["stops_early"] == metrics["well_formed"] == 1
    by_row = [sum(shares[row]) / len(shares[row]) for row in range(5)]
    assert by_row == sorted(by_row)
    assert 0.4 < by_row[0] < 0.55 < by_row[2] < 0.7 < by_row[4] < 0.8
