"""What one rollout promises, what it refuses from an Env, and what many rollouts add up to."""

import math
from typing import Any

import numpy as np
import pytest

from es_cookbook import Env, Observation, SamplingParams, StepResult
from es_cookbook.common.errors import EnvError
from es_cookbook.rl import rollouts
from es_cookbook.rl.rollouts import (
    answer_lengths,
    checked_group_rewards,
    count_tokens,
    env_metrics,
    lost_rollouts,
    mean_rewards,
    run_rollout,
    runs_on,
)
from es_cookbook.rl.types import (
    Action,
    GroupReward,
    LostRollout,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tests.fakes import FakePolicy, trajectory

PROMPT = Observation((1,))
LOST = LostRollout("ValueError: no", "")


class Echo(FakePolicy):
    """Answers with the number of prompt tokens."""

    async def sample(
        self,
        observation: Observation,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> Action:
        return Action((1, 2), str(len(observation.tokens_T)), "stop")


class Countdown(Env):
    """Three turns, a token more each; reward 1 a turn."""

    async def initial_observation(self) -> Observation:
        self.answers: list[str] = []
        return Observation((7,))

    async def step(self, action: Action) -> StepResult:
        self.answers.append(action.text)
        if len(self.answers) == 3:
            return StepResult(1.0, True, metrics={"turns": 3})
        return StepResult(1.0, False, Observation((7,) * (len(self.answers) + 1)))


class Scripted(Env):
    """Gives whatever it is told to, right or wrong."""

    def __init__(self, step: Any, first: Any = PROMPT) -> None:
        self.first = first
        self.result = step

    async def initial_observation(self) -> Observation:
        return self.first

    async def step(self, action: Action) -> StepResult:
        return self.result


async def test_a_rollout_goes_on_turn_by_turn_until_done() -> None:
    env = Countdown()
    policy = Echo()
    trajectory = await run_rollout(env, policy)
    assert env.answers == ["1", "2", "3"]
    assert env.policy is policy
    assert trajectory.reward == 3.0
    assert trajectory.num_tokens == 6
    assert [t.observation.tokens_T for t in trajectory.transitions] == [(7,), (7, 7), (7, 7, 7)]


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (
            Scripted(None, first="hello"),
            "initial_observation must give an Observation, found str 'hello'",
        ),
        (Scripted(None, first=Observation(())), "at least one int, found an empty tuple"),
        (Scripted(1.0), "step must give a StepResult, found float 1.0"),
        (Scripted(StepResult(math.nan, True)), "finite number as reward, found float nan"),
        (Scripted(StepResult(1.7e308, True)), r"found float 1.7e\+308, above 1e\+100"),
        (Scripted(StepResult(1.0, True, Observation((1,)))), "done=True with a next_observation"),
        (Scripted(StepResult(1.0, False)), "found NoneType None; a step that is not done"),
        (Scripted(StepResult(1.0, True, metrics={"a": math.nan})), "found float nan for 'a'"),
        (Scripted(StepResult(1.0, True, logs={"a": 1})), "found int 1 for 'a'"),  # pyright: ignore
    ],
)
async def test_what_breaks_the_contract_is_named_with_its_env(env: Env, found: str) -> None:
    with pytest.raises(EnvError, match=rf"^Scripted\..*{found}"):
        await run_rollout(env, Echo())


class Mute(Scripted):
    """Samples nothing."""

    async def act(self, observation: Observation) -> Action:
        return self.result if observation is PROMPT else Action((), "", "stop")


async def test_an_env_may_choose_how_its_policy_acts() -> None:
    trajectory = await run_rollout(Mute(StepResult(1.0, True), Observation((1,))), Echo())
    assert (trajectory.num_tokens, trajectory.reward) == (0, 1.0)
    with pytest.raises(EnvError, match=r"^Mute\.act must give an Action, found StepResult"):
        await run_rollout(Mute(StepResult(1.0, True)), Echo())


async def test_an_env_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "MAX_STEPS", 5)
    with pytest.raises(EnvError, match="Scripted was not done after 5 steps"):
        await run_rollout(Scripted(StepResult(0.0, False, Observation((1,)))), Echo())


def test_rewards_are_means_over_attempts_that_were_not_lost() -> None:
    group = TrajectoryGroup(
        [[trajectory(1.0), LOST], [trajectory(0.0), trajectory(3.0)], [LOST, LOST]]
    )
    np.testing.assert_array_equal(mean_rewards([group, group]), [[1.0, 1.5, np.nan]] * 2)
    assert len(lost_rollouts([group])) == 3
    assert count_tokens([group]) == 6


def test_metrics_are_means_by_tag_over_rollouts_that_report_them() -> None:
    one = TrajectoryGroup(
        [[trajectory(0, {"correct": 1})], [trajectory(0, {"correct": 0})]], tags=("easy",)
    )
    two = TrajectoryGroup(
        [[trajectory(0, {"correct": 1, "a": 2}, {"a": 4})], [LOST]],
        [[GroupReward(0.0, {"won": 1.0})], [GroupReward(0.0)]],
        tags=("hard", "all"),
    )
    assert env_metrics([one, two]) == {
        "env/all/a": 3,
        "env/all/correct": pytest.approx(2 / 3),
        "env/all/won": 1,
        "env/easy/correct": 0.5,
        "env/hard/a": 3,
        "env/hard/correct": 1,
        "env/hard/won": 1,
    }


def test_a_mean_over_fewer_answers_says_over_how_many() -> None:
    """A share of 29 of 32 answers once stood beside one of 32, and looked better."""
    answers = [[trajectory(0, {"correct": 1, "used": 1})] for _ in range(29)]
    group = TrajectoryGroup([*answers, *[[trajectory(0, {"used": 0})]] * 3], tags=("easy",))
    other = TrajectoryGroup([[trajectory(0, {"won": 1})], [LOST]], tags=("hard",))
    assert env_metrics([group, other]) == {
        "env/all/correct": 1,
        "env/all/used": 29 / 32,
        "env/all/won": 1,
        "env/easy/correct": 1,
        "env/easy/used": 29 / 32,
        "env/hard/won": 1,
        "reported/env/all/correct": 29,
        "reported/env/easy/correct": 29,
    }


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ([GroupReward(1.0)], "must give None or 2 GroupRewards, one a trajectory, found 1"),
        ([GroupReward(1.0), 2.0], "found float 2.0"),
        ([GroupReward(math.inf), GroupReward(0.0)], "finite number as reward, found float inf"),
        ([GroupReward(1.0, {"a": math.nan}), GroupReward(0.0)], "found float nan for 'a'"),
    ],
)
def test_wrong_group_rewards_are_named(found: object, what: str) -> None:
    with pytest.raises(EnvError, match=f"^Duel.compute_group_rewards .*{what}"):
        checked_group_rewards("Duel", found, [trajectory(0.0), LOST])


def test_group_rewards_of_lost_rollouts_do_not_matter() -> None:
    found = [GroupReward(1.0), GroupReward(math.nan, {"a": math.nan})]
    assert checked_group_rewards("Duel", found, [trajectory(0.0), LOST]) == [
        GroupReward(1.0),
        GroupReward(0.0),
    ]
    assert checked_group_rewards("Duel", None, [LOST]) is None


def said(length: int, reason: Any = "stop", limit: int | None = None) -> Transition:
    action = Action(tuple(range(length)), "", reason)
    return Transition(Observation((1,), max_tokens=limit), action, 0.0, {}, {})


def test_lengths_are_of_answers_and_those_that_were_cut_are_counted() -> None:
    of_two_turns = Trajectory((said(8, "length"), said(3)))
    others = [Trajectory((said(4),)) for _ in range(16)]
    # Cut where its Env wants it; scored without an answer.
    others += [Trajectory((said(6, "length", limit=6),)), Trajectory((said(0),))]
    group = TrajectoryGroup([[of_two_turns, LOST], others])
    assert answer_lengths([group]) == {
        "rollouts/truncated": 1 / 19,
        "rollouts/mean_tokens": (8 + 3 + 16 * 4 + 6) / 19,
        "rollouts/p95_tokens": 8,
        "rollouts/ran_on": 0.0,
    }
    assert answer_lengths([TrajectoryGroup([[LOST]])]) == {}


@pytest.mark.parametrize(
    ("text", "gold", "does"),
    [
        (" 53\n\nQ: 7 + 9\nA: 16", "63", True),
        ("To find the sum we add the tens first:\n50 + 3", "63", False),
        (" 63\n", "63", False),
        ("def f():\n    return", "def f():\n    return 1", False),
        (" 53\n\nQ: 7 + 9", None, False),
    ],
)
def test_an_answer_ran_on_if_text_follows_a_first_line_that_answers(
    text: str, gold: str | None, does: bool
) -> None:
    assert runs_on(text, gold) is does
