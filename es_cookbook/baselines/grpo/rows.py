"""Rollouts as TRL's trainer takes them: a prompt, a completion, and which of it has a loss.

A chat of several turns is one completion, in which the model's own tokens have a loss and what the
Env says has none (`env_mask`). A lost rollout has no token with a loss, and its reward is None: TRL
leaves it out of its group's mean and standard deviation, and gives it the advantage 0. Losses that
are means over answers (`loss_type=grpo`, `sapo`) still count it among them, and so do `dr_grpo` and
`luspo`; sums over tokens (`dapo`, `bnpo`, `cispo`, `vespo`) do not.
"""

import math
from collections.abc import Sequence
from typing import Any

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.sequences import Example, sequences_of
from es_cookbook.rl.types import LostRollout, Trajectory, TrajectoryGroup

REWARD = "env_reward"
"""The key under which rewards reach the reward function."""


def rows_of(
    groups_P: Sequence[TrajectoryGroup],
    *,
    filler: int,
    mask_truncated: bool = False,
    with_logprobs: bool = True,
) -> dict[str, Any]:
    """What TRL's `rollout_func` returns, problem by problem, attempt by attempt.

    Args:
        groups_P: of one genome each, the model.
        filler: a token that stands where there is none, without a loss.
        mask_truncated: answers of which the last was cut have no loss.
        with_logprobs: the probabilities with which tokens were sampled are those that TRL computes,
            so it may compare them.

    Raises:
        ConfigError: A rollout is more than one sequence.
    """
    rows: dict[str, Any] = {
        key: [] for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs", REWARD)
    }
    for group in groups_P:
        for trajectory, reward in zip(group.trajectories_G_K[0], group.rewards_G_K[0], strict=True):
            prompt, completion, learned, logprobs = _row(trajectory, filler, mask_truncated)
            rows["prompt_ids"].append(prompt)
            rows["completion_ids"].append(completion)
            rows["env_mask"].append(learned)
            rows["logprobs"].append(logprobs)
            rows[REWARD].append(None if math.isnan(reward) else reward)
    if not with_logprobs:
        rows["logprobs"] = None
    return rows


def _row(
    trajectory: Trajectory | LostRollout, filler: int, mask_truncated: bool
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Prompt, completion, and of each of its tokens whether it has a loss, and its logprob."""
    example = _sequence(trajectory) if isinstance(trajectory, Trajectory) else None
    if not isinstance(trajectory, Trajectory) or example is None:
        return [filler], [filler], [0], [0.0]
    start = len(trajectory.transitions[0].observation.tokens_T)
    was_cut = trajectory.transitions[-1].action.stop_reason == "length"
    has_loss = not (mask_truncated and was_cut)
    return (
        list(example.tokens_T[:start]),
        list(example.tokens_T[start:]),
        [int(learned and has_loss) for learned in example.learned_T[start:]],
        list(example.sampled_T[start:]),
    )


def _sequence(trajectory: Trajectory) -> Example | None:
    """The one sequence of a rollout; None where it has no token that the policy sampled."""
    found = sequences_of(trajectory, 1.0)
    kinds = [kind for kind, _ in trajectory.seen]
    if kinds.count("prompt") > 1:
        raise ConfigError(
            "dataset: an Env of several turns did not go on from what was said before, so its "
            f"rollout is {kinds.count('prompt')} sequences, and TRL's trainer takes one: train "
            "with policy_gradient, or let every observation begin with the one before it and its "
            "action"
        )
    return found[0] if found else None
