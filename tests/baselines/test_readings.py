"""Rewards that are the model's own log-probability of a text: their gradient goes through both."""

import math
from pathlib import Path

import pytest
import torch

from es_cookbook.baselines.learner import Learner
from es_cookbook.baselines.policy_gradient import PPO, Expert, Group, Method, to_examples
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.rl.rollouts import Example, readings_of
from es_cookbook.rl.types import (
    Action,
    Observation,
    Reading,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tests.tiny_run import write_tiny_model

PROMPT, ANSWER = (4, 5), (7, 8, 9)


def thought(token: int, reward: float, correct: float = 1.0) -> Trajectory:
    """One token about a prompt, and an answer of three behind it."""
    read = Reading((6, token), ANSWER, (-1.0, -2.0, -3.0))
    observation, action = Observation(PROMPT), Action((token,), "", "stop", (-0.5,))
    metrics = {"correct": correct}
    return Trajectory((Transition(observation, action, reward, metrics, {}, read),))


def test_what_was_read_is_learned_with_the_weight_of_its_mean() -> None:
    (example,) = readings_of(thought(3, 1.0), 6.0)
    assert example == Example(
        (6, 3, *ANSWER),
        (False, False, True, True, True),
        2.0,
        (0.0, 0.0, -1.0, -2.0, -3.0),
        is_read=True,
    )
    plain = Trajectory((Transition(Observation(PROMPT), Action((3,), "", "stop"), 1.0, {}, {}),))
    assert readings_of(plain, 1.0) == []


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        (Group(), {3: 1 / 3, 4: 1 / 3}),
        (Group(reading=0.0), {}),
        (PPO(reading=0.3), {3: 0.1, 4: 0.1}),
        (Expert(), {3: 1 / 3}),
        (Expert(keep="best"), {3: 1 / 3}),
    ],
)
def test_methods_say_what_is_read(method: Method, weights: dict[int, float]) -> None:
    group = TrajectoryGroup([[thought(3, 1.0), thought(4, 0.0, correct=0.0)]])
    examples, _ = to_examples(method, [group])
    found = {each.tokens_T[1]: each.weight for each in examples if each.is_read}
    assert found == pytest.approx(weights)
    assert any(not each.is_read for each in examples), "and what was sampled"


def test_a_group_of_equal_rewards_still_learns_to_read() -> None:
    group = TrajectoryGroup([[thought(3, 1.0), thought(3, 1.0)]])
    (example,), share = to_examples(Group(), [group])
    assert (example.is_read, example.count, share) == (True, 2, 0.5)


def test_both_parts_are_the_gradient_of_the_expected_reward(tmp_path: Path) -> None:
    """Against autograd: reward times log-probability of the thought, and the reward itself."""
    path = write_tiny_model(tmp_path / "model")
    model = load_causal_lm(str(path), "float32", torch.device("cpu"))
    learner = Learner(model, dict(model.named_parameters()), tokens_per_pass=1000)
    thoughts = (3, 4, 4, 10)

    def logprobs(prompt: tuple[int, ...], text: tuple[int, ...]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([prompt + text])).logits[0].float()
        told = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        return told.gather(1, torch.tensor(text)[:, None])[:, 0]

    rewards = [logprobs((6, token), ANSWER).mean() for token in thoughts]
    baseline = math.fsum(reward.item() for reward in rewards) / len(rewards)
    wanted = torch.stack(
        [
            (reward.detach() - baseline) * logprobs(PROMPT, (token,)).sum() + reward
            for token, reward in zip(thoughts, rewards, strict=True)
        ]
    ).mean()
    gradients = torch.autograd.grad(wanted, list(learner.weights.values()))
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))

    trajectories = [thought(t, r.item()) for t, r in zip(thoughts, rewards, strict=True)]
    method = Group(normalise=False)
    examples, share = to_examples(method, [TrajectoryGroup([trajectories])])
    _, found = learner.step(examples, method.objective, 1e-3, share)
    assert found == pytest.approx(norm, rel=1e-4)
    without, share = to_examples(
        Group(normalise=False, reading=0.0), [TrajectoryGroup([trajectories])]
    )
    assert learner.step(without, method.objective, 1e-3, share)[1] < 0.9 * norm
