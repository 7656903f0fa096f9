"""Countdown as an Env: the prompt, the grade and its metrics.

`correct` and `format` stay apart, and `well_formed` and `correct_well_formed` let a gain be told
apart: with w the share of well-formed answers and a the share of those that are right, correct ≈ w
· a, so Δcorrect ≈ Δw · a_before (form) + w_after · Δa (answers that were well-formed anyway
becoming right).
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from es_cookbook.rl.problem_env import Grade, ProblemEnv
from es_cookbook.rl.rewards.arithmetic import CountdownReward, grade_countdown
from es_cookbook.rl.types import Observation

PromptStyle: TypeAlias = Literal["compact", "paper"]

_PAPER = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic "
    "arithmetic operations (+, -, *, /) and each number can only be used once. Show your work in "
    "<think> </think> tags. And return the final answer in <answer> </answer> tags, for example "
    "<answer> (1 + 2) / 3 </answer>."
)


def question(numbers: Sequence[int], target: int, style: PromptStyle) -> str:
    r"""The problem in words ("paper", from the literature) or in a shorthand ("compact").

    The shorthand is the bundled model's. It sorts the numbers, largest first: their order means
    nothing, and a small model need not learn that.

    >>> question([4, 27, 19], 50, "compact")
    '27,19,4=50\n'
    """
    if style == "compact":
        return f"{','.join(map(str, sorted(numbers, reverse=True)))}={target}\n"
    return _PAPER.format(numbers=f"[{' '.join(map(str, numbers))}]", target=target)


class CountdownEnv(ProblemEnv):
    """One attempt at one Countdown problem."""

    def __init__(
        self,
        observation: Observation,
        numbers: tuple[int, ...],
        target: int,
        reward: CountdownReward,
        prompt_ends_in_think: bool = False,
    ) -> None:
        super().__init__(observation)
        self.numbers = numbers
        self.target = target
        self.reward = reward
        self.prompt_ends_in_think = prompt_ends_in_think
        self.full_reward = reward.full

    def grade(self, text: str) -> Grade:
        """Reward and metrics: `correct`, `format`, `well_formed`, `correct_well_formed`."""
        problem = self.numbers, self.target, self.reward
        return grade_countdown(text, *problem, prompt_ends_in_think=self.prompt_ends_in_think)
