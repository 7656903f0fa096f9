"""One rollout, turn by turn until the Env is done; and aggregates over many rollouts.

An Env is the user's code, so everything that it returns is checked here, once, before it can
reach an engine or a mean: a wrong type, a NaN reward or an observation without tokens is an
`EnvError` that names the Env and what was found. The caller decides what follows from a failure (in
`es_cookbook.population.sampler` only that rollout is lost).

Left out: partial credit for a rollout that failed. It is NaN, never 0: a failure is not evidence
about the genome.

Answers that were cut either lacked room or have no end. A chat model ends its turn; a base model
goes on after its answer, with a question or the same line again, until `sampling.max_tokens` cuts
it. More tokens do not help then, and a stop text does. `rollouts/ran_on` tells which it is. It is a
sign, not a proof: a model that thinks in lines as short as the gold answer runs on too.

Token sequences to learn from, of rollouts and of rows for supervised training, are `Example`s.
Tokens are those that were seen and sampled: nothing is decoded and encoded again, or the model
would be taught other tokens than it said.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import cast

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import EnvError
from es_cookbook.rl.timeouts import turn_begins
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    Metrics,
    Observation,
    Policy,
    StepResult,
    Trajectory,
    TrajectoryGroup,
    Transition,
)

MAX_STEPS = 10_000
"""Steps after which an Env is considered endless."""
REPORTED = "reported/"
"""Prefix of a metric's key for the number of answers in its mean, if not all."""
_DECIMALS = 4
"""Decimals of the results that are recorded per problem."""
_LONGER = 2
"""A first line may be this many times as long as the gold answer, plus `_BESIDE` characters."""
_BESIDE = 12


async def run_rollout(env: Env, policy: Policy) -> Trajectory:
    """Let the policy attempt the Env's problem.

    Sets `env.policy` first, so that the Env can query the model itself.

    Raises:
        EnvError: The Env broke the contract of `es_cookbook.rl.types.Env`.
    """
    if not isinstance(cast(object, env), Env):
        raise EnvError(f"make_envs must give Envs, found {shown(env)}")
    name, env.policy = type(env).__qualname__, policy
    turn_begins()
    first = await env.initial_observation()
    observation = _checked_observation(f"{name}.initial_observation", first)
    transitions: list[Transition] = []
    while len(transitions) < MAX_STEPS:
        action = cast(object, await env.act(observation))
        if not isinstance(action, Action):
            raise EnvError(f"{name}.act must give an Action, found {shown(action)}")
        turn_begins()
        result = _checked_result(f"{name}.step", await env.step(action))
        reward, metrics, logs = float(result.reward), result.metrics, result.logs
        transitions.append(Transition(observation, action, reward, metrics, logs, result.reading))
        if result.done:
            return Trajectory(tuple(transitions))
        observation = _checked_observation(f"{name}.step", result.next_observation)
    raise EnvError(f"{name} was not done after {MAX_STEPS} steps; every rollout must end")


def _checked_observation(who: str, found: object) -> Observation:
    if not isinstance(found, Observation):
        hint = "; a step that is not done needs a next_observation" if found is None else ""
        raise EnvError(f"{who} must give an Observation, found {shown(found)}{hint}")
    tokens_T = cast(tuple[object, ...] | None, found.tokens_T)
    # One set over the types, not a check a token: prompts are long and there are thousands of them.
    if not isinstance(tokens_T, tuple) or set(map(type, tokens_T)) != {int}:
        what = "an empty tuple" if tokens_T == () else shown(cast(object, tokens_T))
        raise EnvError(
            f"{who} must give an Observation whose tokens_T is a tuple of at least one int, found "
            f"{what}"
        )
    return found


def _checked_result(who: str, found: object) -> StepResult:
    if not isinstance(found, StepResult):
        raise EnvError(f"{who} must give a StepResult, found {shown(found)}")
    if found.done and found.next_observation is not None:
        raise EnvError(f"{who} gave done=True with a next_observation; it must be None at the end")
    check_measured(who, found.reward, found.metrics, found.logs)
    return found


def check_measured(who: str, reward: object, metrics: object, logs: object) -> None:
    """Refuse a reward or metrics that are not finite numbers, and logs that are not texts.

    Raises:
        EnvError: Names `who` returned it, what was expected and what was found.
    """
    if not is_measured(reward):
        raise EnvError(f"{who} must give a finite number as reward, found {shown(reward)}")
    check_metrics(f"{who} must give", metrics)
    _check_values(f"{who} must give", "texts", "logs", logs, lambda log: isinstance(log, str))


def check_metrics(who_must: str, metrics: object) -> None:
    """Refuse metrics that are not finite numbers by name; `who_must` begins the sentence.

    Raises:
        EnvError: Says what was found.
    """
    _check_values(who_must, "finite numbers", "metrics", metrics, is_measured)


def _check_values(
    who_must: str, values: str, kind: str, found: object, fits: Callable[[object], bool]
) -> None:
    if not isinstance(found, Mapping):
        raise EnvError(f"{who_must} {kind} as a mapping, found {shown(found)}")
    for key, value in cast("Mapping[object, object]", found).items():
        if not isinstance(key, str) or not fits(value):
            raise EnvError(f"{who_must} {values} as {kind}, found {shown(value)} for {key!r}")


def checked_group_rewards(
    who: str, found: object, trajectories: Sequence[Trajectory | LostRollout]
) -> Sequence[GroupReward | LostRollout] | None:
    """Check what `compute_group_rewards` of the class `who` returned.

    Returns:
        The group rewards, 0 for rollouts that were lost before; None if there are none.

    Raises:
        EnvError: Neither None nor a finite `GroupReward` or a `LostRollout` for each trajectory.
    """
    if found is None:
        return None
    given = list(cast(Iterable[object], found)) if isinstance(found, Sequence) else [found]
    wrong = [each for each in given if not isinstance(each, GroupReward | LostRollout)]
    if wrong or len(given) != len(trajectories):
        raise EnvError(
            f"{who}.compute_group_rewards must give None or {len(trajectories)} GroupRewards, "
            f"one a trajectory, found {shown(wrong[0]) if wrong else len(given)}"
        )
    checked = [
        GroupReward(0.0) if isinstance(trajectory, LostRollout) else each
        for each, trajectory in zip(
            cast(list[GroupReward | LostRollout], given), trajectories, strict=True
        )
    ]
    for each in checked:
        if isinstance(each, GroupReward):
            check_measured(f"{who}.compute_group_rewards", each.reward, each.metrics, each.logs)
    return checked


def mean_rewards(groups_P: Sequence[TrajectoryGroup]) -> NDArray[np.float64]:
    """Return `rewards_P_G`, a genome's mean over attempts that were not lost; NaN without any."""
    return mean_over_attempts(np.array([group.rewards_G_K for group in groups_P], dtype=np.float64))


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, correctly rounded; NaN without any."""
    present = [value for value in values if math.isfinite(value)]
    return math.fsum(present) / len(present) if present else math.nan


def reward_and_solved(group: TrajectoryGroup, metric: str) -> tuple[float, float]:
    """Return a group's mean reward, and the mean of a metric, or of the reward without it.

    To `_DECIMALS` decimals, so that a number is the same just measured and read from a history.
    """
    rewards = [reward for rewards_K in group.rewards_G_K for reward in rewards_K]
    solved = [
        rollout_metrics(group, g, k).get(metric, reward)
        for g, rewards_K in enumerate(group.rewards_G_K)
        for k, reward in enumerate(rewards_K)
        if not math.isnan(reward)
    ]
    return round(mean_of(rewards), _DECIMALS), round(mean_of(solved), _DECIMALS)


def mean_over_attempts(rewards_P_G_K: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average over the last axis without NaN; NaN if nothing is left."""
    present_P_G_K = ~np.isnan(rewards_P_G_K)
    count_P_G = present_P_G_K.sum(axis=2)
    total_P_G = np.where(present_P_G_K, rewards_P_G_K, 0.0).sum(axis=2)
    return np.where(count_P_G > 0, total_P_G / np.maximum(count_P_G, 1), np.nan)


def env_metrics(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Average the metrics: `env/all/<metric>` and, by tag, `env/<tag>/<metric>`.

    They come from the Envs and from group rewards. A metric's value for one rollout is its mean
    over the steps that report it; its mean is over the rollouts that report it. Where some rollouts
    at problems of the same tags do not, `reported/env/...` says how many did: a mean of 29 of 32
    answers does not compare with another's of 32.
    """
    of_tags: dict[tuple[str, ...], list[Metrics]] = {}
    for group in groups_P:
        reports = [rollout_metrics(group, g, k) for (g, k), _ in group.finished]
        of_tags.setdefault(tuple(group.tags), []).extend(reports)
    values: dict[str, list[float]] = {}
    due: dict[str, int] = {}
    for tags, reports in of_tags.items():
        for metric, found in _by_metric(reports).items():
            for tag in dict.fromkeys(("all", *tags)):
                key = f"env/{tag}/{metric}"
                values.setdefault(key, []).extend(found)
                due[key] = due.get(key, 0) + len(reports)
    means = {key: math.fsum(values[key]) / len(values[key]) for key in sorted(values)}
    few = {key: len(values[key]) for key in means if len(values[key]) < due[key]}
    return means | {f"{REPORTED}{key}": float(count) for key, count in few.items()}


def rollout_metrics(group: TrajectoryGroup, g: int, k: int) -> Metrics:
    """Return the metrics of a finished rollout: its own and those of its group reward."""
    trajectory = group.trajectories_G_K[g][k]
    own = _mean_over_steps(trajectory) if isinstance(trajectory, Trajectory) else {}
    if group.group_rewards_G_K is None:
        return own
    return {**own, **group.group_rewards_G_K[g][k].metrics}


def _mean_over_steps(trajectory: Trajectory) -> Metrics:
    if len(trajectory.transitions) == 1:
        return trajectory.transitions[0].metrics
    values = _by_metric(transition.metrics for transition in trajectory.transitions)
    return {metric: math.fsum(values_T) / len(values_T) for metric, values_T in values.items()}


def _by_metric(reports: Iterable[Metrics]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for metrics in reports:
        for metric, value in metrics.items():
            values.setdefault(metric, []).append(value)
    return values


def count_tokens(groups_P: Sequence[TrajectoryGroup]) -> int:
    """Count the tokens sampled in the rollouts that finished."""
    return sum(t.num_tokens for group in groups_P for _, t in group.finished)


def count_answers(groups_P: Sequence[TrajectoryGroup]) -> int:
    """Count the actions in the rollouts that finished."""
    return sum(len(t.transitions) for group in groups_P for _, t in group.finished)


def answer_lengths(
    groups_P: Sequence[TrajectoryGroup], problems_P: Sequence[EnvGroupBuilder] = ()
) -> dict[str, float]:
    """Measure the lengths of answers, and the share that was cut; empty without answers.

    `rollouts/truncated` is the share of answers that reached `sampling.max_tokens`, or the end of
    the context; `rollouts/mean_tokens` and `rollouts/p95_tokens` are the mean length in sampled
    tokens and the length that 95 % do not exceed. An answer is one action: a rollout of several
    turns has several. An answer that ends at a limit of its Env's own is not cut. `endings` says
    what cut answers look like, beside the gold answers of `problems_P` where they are
    given.
    """
    golds_P = [gold_of(problem) for problem in problems_P] or [None] * len(groups_P)
    steps = [
        (step, gold)
        for group, gold in zip(groups_P, golds_P, strict=True)
        for _, trajectory in group.finished
        for step in trajectory.transitions
        if step.action.tokens_T
    ]
    if not steps:
        return {}
    lengths = sorted(len(step.action.tokens_T) for step, _ in steps)
    cut = [(step.action.text, gold) for step, gold in steps if _is_cut(step)]
    found = {
        "rollouts/truncated": len(cut) / len(steps),
        "rollouts/mean_tokens": sum(lengths) / len(steps),
        "rollouts/p95_tokens": lengths[math.ceil(0.95 * len(steps)) - 1],
    }
    if cut:
        found["rollouts/ran_on"] = sum(runs_on(text, gold) for text, gold in cut) / len(steps)
    return found


def _is_cut(step: Transition) -> bool:
    own_limit = step.observation.max_tokens
    is_at_own = own_limit is not None and len(step.action.tokens_T) >= own_limit
    return step.action.stop_reason == "length" and not is_at_own


def runs_on(text: str, gold: str | None) -> bool:
    r"""Return whether an answer has more lines behind a first one that is already an answer.

    >>> runs_on(" 42\nQ: 3 + 4?\nA: 7", "41"), runs_on("First add the tens: 30\nthen", "41")
    (True, False)
    >>> runs_on("It is the river Nile.\nIt is long.", "Nile"), runs_on("a\nb", "a\nb")
    (True, False)
    """
    first, _, rest = text.partition("\n")
    first, gold = first.strip(), (gold or "").strip()
    if not (first and rest.strip() and gold) or "\n" in gold:
        return False
    is_short = len(first) <= _LONGER * len(gold) + _BESIDE
    return is_short or gold.casefold() in first.casefold()


def gold_of(problem: EnvGroupBuilder) -> str | None:
    """Return a problem's gold answer, if it has one of one turn."""
    gold = getattr(problem, "gold", None)
    return gold if isinstance(gold, str) else None


def lost_rollouts(groups_P: Sequence[TrajectoryGroup]) -> list[LostRollout]:
    """Return the rollouts that were lost, problem by problem, genome by genome."""
    attempts = (ks for group in groups_P for ks in group.trajectories_G_K)
    return [t for ks in attempts for t in ks if isinstance(t, LostRollout)]


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One training sequence.

    Attributes:
        tokens_T: tokens as they were seen and sampled.
        learned_T: whether each has a loss; ignored for the first, which never has one.
        weight: weight of their log-likelihood; below 0 they become less likely.
        sampled_T: log-probabilities with which those that have a loss were sampled, 0 elsewhere;
            () where they do not matter.
        count: number of equal examples that it stands for.
        is_read: whether tokens with a loss were given to the model to read, and not sampled.
    """

    tokens_T: tuple[int, ...]
    learned_T: tuple[bool, ...]
    weight: float = 1.0
    sampled_T: tuple[float, ...] = ()
    count: int = 1
    is_read: bool = False


def sequences_of(trajectory: Trajectory, weight: float) -> list[Example]:
    """Return a rollout as sequences; a prompt that does not continue the last begins another.

    The model's own tokens have a loss, where their log-probabilities are known. Those that an Env
    had sampled in another way (`Env.act`) have none.
    """
    found: list[Example] = []
    tokens: list[int] = []
    learned: list[bool] = []
    sampled: list[float] = []

    def close() -> None:
        if any(learned):
            found.append(Example(tuple(tokens), tuple(learned), weight, tuple(sampled)))
        for of in (tokens, learned, sampled):
            of.clear()

    def add(tokens_T: Sequence[int], logprobs_T: Sequence[float] | None) -> None:
        tokens.extend(tokens_T)
        learned.extend([logprobs_T is not None] * len(tokens_T))
        sampled.extend(logprobs_T or [0.0] * len(tokens_T))

    for transition, (kind, new_T) in zip(trajectory.transitions, trajectory.seen, strict=True):
        if kind == "prompt":
            close()
        add(new_T, None)
        add(transition.action.tokens_T, transition.action.logprobs_T)
    close()
    return found


def readings_of(trajectory: Trajectory, weight: float) -> list[Example]:
    """Return the texts that an Env had the model read for its reward, as examples.

    The weight is on a text's mean token.

    The gradient of the sequences is that of `weight` times the mean log-probability.
    """
    found = (each.reading for each in trajectory.transitions)
    return [
        Example(
            read.prompt_T + read.continuation_T,
            (False,) * len(read.prompt_T) + (True,) * len(read.continuation_T),
            weight / len(read.continuation_T),
            (0.0,) * len(read.prompt_T) + read.logprobs_T,
            is_read=True,
        )
        for read in found
        if read is not None
    ]


_LARGEST = 1e100
_REAL = (float, int, Real)
"""The usual types first: asking an abstract class takes ten times as long."""


def is_measured(value: object) -> bool:
    """Return whether a value can be a reward or a metric.

    It must be a number whose sums of squares are finite.
    """
    return isinstance(value, _REAL) and _size(value) <= _LARGEST


def shown(found: object, longest: int = 80) -> str:
    """Describe a value that is not such a number, with its type."""
    text = repr(found)
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    is_large = isinstance(found, _REAL) and text[-3:] not in ("inf", "nan")
    above = f", above {_LARGEST:g}" if is_large and not is_measured(found) else ""
    return f"{type(found).__name__} {text}{above}"


def _size(number: object) -> float:
    try:
        return abs(float(cast(float, number)))
    except OverflowError:  # An integer.
        return math.inf
