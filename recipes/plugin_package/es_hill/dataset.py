"""Problems that need no file: what is twice a number?"""

import dataclasses
from collections.abc import Sequence

import chz
from transformers import PreTrainedTokenizerBase

from es_cookbook import (
    EnvGroupBuilder,
    Grade,
    Observation,
    ProblemEnv,
    RLDataset,
    RLDatasetBuilder,
)
from es_cookbook.rl.types import Datasets, EnvGroup


class DoubleEnv(ProblemEnv):
    """One attempt at one number: a point for the right digits at the right places."""

    def __init__(self, observation: Observation, answer: str) -> None:
        super().__init__(observation)
        self.answer = answer

    def grade(self, text: str) -> Grade:
        found = sum(a == b for a, b in zip(text.strip(), self.answer, strict=False))
        return Grade(found / len(self.answer), metrics={"correct": float(text == self.answer)})


@dataclasses.dataclass(frozen=True)
class Double(EnvGroupBuilder):
    tokens_T: tuple[int, ...]
    answer: str

    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup(
            [DoubleEnv(Observation(self.tokens_T), self.answer) for _ in range(num_envs)]
        )


@dataclasses.dataclass(frozen=True)
class DoubleDataset(RLDataset):
    problems: Sequence[Double]

    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        start = 8 * generation
        return [self.problems[i % len(self)] for i in range(start, start + 8)]

    def __len__(self) -> int:
        return len(self.problems)

    async def validate(self, context_length: int) -> None:
        """Check nothing: every answer is made with its question."""


@chz.chz
class Doubles(RLDatasetBuilder):
    """What is twice a number from 1 to `largest`? Every fourth is held out."""

    largest: int = chz.field(default=200, doc="the largest number")

    @property
    def label(self) -> str:
        return "doubles"

    async def __call__(self, tokenizer: PreTrainedTokenizerBase) -> Datasets:
        problems = [
            Double(tuple(tokenizer.encode(f"{number}+{number}=")), str(2 * number))
            for number in range(1, self.largest + 1)
        ]
        kept = [problem for i, problem in enumerate(problems) if i % 4]
        return Datasets(DoubleDataset(kept), test_P=problems[::4])
