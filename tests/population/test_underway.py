"""What is seen of rollouts before all of them have ended."""

import io
import math
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from rich.console import Console

from es_cookbook.population.sampler import Rollouts, Underway
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.live import LiveTracker
from tests.fakes import trajectory


def running(path: Path, underway: Underway, start: int = 0) -> RunInfo:
    return RunInfo(path, "{}", 0, 50, start, underway=underway)


def test_the_time_left_follows_from_the_rollouts_that_have_ended() -> None:
    now = Rollouts(0, 100)
    now.began -= 60
    for done in range(50):
        assert math.isnan(now.seconds_left) == (done < 5)
        now.ended(trajectory(1.0), has_reward=True)
    assert now.seconds_left == pytest.approx(60, rel=0.01)


def looked_at(path: Path, seconds: float, *, done: int, later: bool = False) -> list[str]:
    """Lines of a generation of 10 answers that has gone on for so long."""
    underway, out = Underway(), io.StringIO()
    with redirect_stdout(out):
        tracker = LiveTracker(running(path, underway))
        if later:
            tracker.log(0, {})
            tracker.recorded(1)
        now = underway.rollouts = Rollouts(1 if later else 0, 10)
        now.began -= seconds
        for _ in range(done):
            now.ended(trajectory(0.25), has_reward=True)
        tracker.look()
        tracker.look()
        now.is_over = True
        now.began -= 9 * seconds
        tracker.look()
        tracker.close()
    return out.getvalue().splitlines()[later:]


def test_off_a_terminal_a_long_generation_is_told_of_and_not_again_at_once(tmp_path: Path) -> None:
    assert looked_at(tmp_path, 9, done=4) == []
    assert looked_at(tmp_path, 12, done=4) == [
        "generation 1/50: 4 of 10 answers after 12 s, reward 0.250, about 18 s left"
    ]
    assert looked_at(tmp_path, 12, done=4, later=True) == []
    assert looked_at(tmp_path, 90, done=0, later=True) == [
        "generation 2/50: none of 10 answers after 1.5 min"
    ]


def test_a_screen_shows_the_rollouts_in_progress(tmp_path: Path) -> None:
    sent, underway = io.StringIO(), Underway()
    console = Console(file=sent, force_terminal=True, width=140, height=40, highlight=False)
    tracker = LiveTracker(running(tmp_path, underway), console)
    now = underway.rollouts = Rollouts(0, 10)
    now.began -= 60
    for _ in range(5):
        now.ended(trajectory(0.25), has_reward=True)
    tracker.close()
    shown = " ".join(sent.getvalue().split())
    assert "0/50 generations · 0:00 elapsed, -:-- left · generation 1/50: 5 of 10 answers" in shown
    assert "after 1.0 min, reward 0.250, about 1.0 min left" in shown
