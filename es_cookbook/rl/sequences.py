"""Token sequences to learn from: of rollouts, and of rows for supervised training.

Tokens are those that were seen and sampled. Nothing is decoded and encoded again: the model would
be taught other tokens than it said.
"""

import dataclasses
from collections.abc import Sequence

from es_cookbook.rl.types import Trajectory


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One sequence.

    Attributes:
        tokens_T: as they were seen and sampled.
        learned_T: which of them have a loss; the first never has one, whatever is said here.
        weight: how much likelier they should become; below 0, less likely.
        sampled_T: log-probabilities with which those that have a loss were sampled, 0 elsewhere;
            () where they do not matter.
        count: how many alike it stands for.
        is_read: whether what has a loss was given to the model to read, and not sampled.
    """

    tokens_T: tuple[int, ...]
    learned_T: tuple[bool, ...]
    weight: float = 1.0
    sampled_T: tuple[float, ...] = ()
    count: int = 1
    is_read: bool = False


def sequences_of(trajectory: Trajectory, weight: float) -> list[Example]:
    """A rollout: one sequence of all turns, and another wherever a prompt does not go on from it.

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
    """What an Env had the model read for its reward: the mean over a text's tokens has the weight.

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
