import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from es_cookbook.common.errors import HistoryError
from es_cookbook.rl.types import (
    Action,
    GroupReward,
    LostRollout,
    Observation,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics


def info(path: Path) -> RunInfo:
    return RunInfo(path, "{}", run_seed=0, num_generations=4)


def no_constants(name: str) -> None:
    pytest.fail(f"{name} is not JSON")


def test_metrics_are_valid_json_even_when_they_are_not_numbers(tmp_path: Path) -> None:
    tracker = JsonlTrackerBuilder()(info(tmp_path))
    tracker.log(0, {"reward/mean": math.nan, "a": math.inf, "b": -math.inf, "c": 0.1 + 0.2})
    tracker.log(1, {"reward/mean": math.nan, "c": np.float32(0.5), "d": 3})
    tracker.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=no_constants) for line in lines] == [
        {"progress/generation": 0, "reward/mean": None, "a": None, "b": None, "c": 0.1 + 0.2},
        {"progress/generation": 1, "reward/mean": None, "c": 0.5, "d": 3},
    ]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(rows[0]["reward/mean"]) and rows[1]["c"] == 0.5


def logged(
    path: Path, groups_P: Sequence[TrajectoryGroup], generation: int = 0, **settings: int
) -> list[dict[str, Any]]:
    """The lines that a generation's rollouts leave."""
    tracker = JsonlTrackerBuilder(**settings)(info(path))
    tracker.log_rollouts(generation, groups_P, lambda tokens_T: f"decoded {tokens_T}")
    tracker.close()
    lines = (path / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=no_constants) for line in lines]


def test_rollouts_are_kept_in_full_with_every_turn(tmp_path: Path) -> None:
    turns = tuple(
        Transition(
            Observation((turn,)),
            Action((7, 8), f"[red]\x1b[31m turn {turn} \ud800", "stop"),
            reward,
            {"correct": math.nan},
            {"grader": "line\nline"},
        )
        for turn, reward in enumerate((0.25, 0.5))
    )
    group = TrajectoryGroup([[Trajectory(turns)]], [[GroupReward(1.0)]], tags=("easy",))
    (row,) = logged(tmp_path, [group], generation=5)
    assert {key: value for key, value in row.items() if key != "turns"} == {
        "generation": 5,
        "problem": 0,
        "genome": 0,
        "attempt": 0,
        "tags": ["easy"],
        "reward": 1.75,
    }
    assert row["turns"][1] == {
        "prompt": "decoded (1,)",
        "action": "[red]\x1b[31m turn 1 \ud800",
        "stop_reason": "stop",
        "reward": 0.5,
        "metrics": {"correct": None},
        "logs": {"grader": "line\nline"},
    }


def test_a_later_turn_shows_what_was_added(tmp_path: Path) -> None:
    prompts = (1,), (1, 7, 8, 2), (3,)
    turns = tuple(
        Transition(Observation(prompt), Action((7, 8), "", "stop"), 0.0, {}, {})
        for prompt in prompts
    )
    shown = logged(tmp_path, [TrajectoryGroup([[Trajectory(turns)]])])[0]["turns"]
    assert [turn.get("prompt") for turn in shown] == ["decoded (1,)", None, "decoded (3,)"]
    assert [turn.get("added") for turn in shown] == [None, "decoded (2,)", None]


def test_rollouts_are_bounded_in_number_and_length(tmp_path: Path) -> None:
    transition = Transition(
        Observation((1,)), Action((2,), "y" * 1_000, "length"), 0.0, {}, {"log": "z" * 13}
    )
    groups_P = [TrajectoryGroup([[Trajectory((transition,))]] * 16)] * 8
    rows = logged(tmp_path, groups_P, rollouts_per_generation=3, max_text_chars=12)
    turns = [row["turns"][0] for row in rows]
    assert len(turns) == 3
    assert turns[0]["action"] == "y" * 12 + " [988 more characters]"
    assert turns[0]["logs"]["log"] == "z" * 12 + " [1 more characters]"
    assert turns[0]["prompt"] == "decoded (1,)"


def test_texts_of_group_rewards_are_shown_with_the_rollout(tmp_path: Path) -> None:
    turn = Transition(Observation((1,)), Action((2,), "5", "stop"), 0.0, {}, {})
    rollouts = [[Trajectory((turn,))], [LostRollout("it raised", "")]]
    given = GroupReward(1.0, logs={"games": "X" * 11})
    group = TrajectoryGroup(rollouts, [[given], [GroupReward(0.0)]])
    played, lost = logged(tmp_path, [group], max_text_chars=10)
    assert played["group_logs"] == {"games": "XXXXXXXXXX [1 more characters]"}
    assert "group_logs" not in lost


@pytest.mark.parametrize("value", ["true", '"high"', "[1]", "1e301"])
def test_what_is_no_number_is_refused_by_its_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"a": 1}}\n{{"a": {value}}}\n')
    with pytest.raises(HistoryError, match="line 2 is damaged: 'a' must be a number or null"):
        read_metrics(tmp_path / "metrics.jsonl")
