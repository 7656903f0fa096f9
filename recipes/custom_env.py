"""Write your own Env in fifty lines: guess a digit, with hints.

    python recipes/custom_env.py
    python recipes/custom_env.py num_generations=20 optimizer.sigma=0.01

The policy guesses a secret digit. After a wrong guess it reads "+" (higher) or "-" (lower) and
guesses again, at most four times. The bundled Countdown model has never seen this game. In 40
generations, the share of digits that it finds doubles from 0.22 to 0.44.
"""

import dataclasses
import functools
from collections.abc import Sequence

import chz
from transformers import PreTrainedTokenizerBase

from es_cookbook import (
    ES,
    Env,
    EnvGroupBuilder,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    SamplingParams,
    StepResult,
    run,
)
from es_cookbook.common.cli import run_cli
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.rl.types import Action, Datasets, EnvGroup
from es_cookbook.runs.config import Config as TrainConfig


class GuessEnv(Env):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, secret: int) -> None:
        self.tokenizer, self.secret = tokenizer, secret
        self.text, self.guesses = "1,9\n", 0

    async def initial_observation(self) -> Observation:
        return Observation(tuple(self.tokenizer.encode(self.text)))

    async def step(self, action: Action) -> StepResult:
        guess = next((int(character) for character in action.text if character.isdigit()), 0)
        self.guesses += 1
        found = guess == self.secret
        if found or self.guesses == 4:
            reward = 1.25 - 0.25 * self.guesses if found else 0.0
            return StepResult(reward, done=True, metrics={"found": float(found)})
        self.text += f"{guess}\n{'+' if guess < self.secret else '-'}\n"
        return StepResult(0.0, done=False, next_observation=await self.initial_observation())


@dataclasses.dataclass(frozen=True)
class GuessProblem(EnvGroupBuilder):
    tokenizer: PreTrainedTokenizerBase
    secret: int

    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup([GuessEnv(self.tokenizer, self.secret) for _ in range(num_envs)])


@dataclasses.dataclass(frozen=True)
class GuessDataset(RLDataset):
    problems: Sequence[GuessProblem]

    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        return self.problems

    def __len__(self) -> int:
        return len(self.problems)

    async def validate(self, context_length: int) -> None:
        """Check nothing: any digit can be guessed at once."""


@chz.chz
class GuessDatasetBuilder(RLDatasetBuilder):
    async def __call__(self, tokenizer: PreTrainedTokenizerBase) -> Datasets:
        problems = [GuessProblem(tokenizer, secret) for secret in range(1, 10)]
        return Datasets(GuessDataset(problems), test_P=problems)


_OPTIMIZER = functools.partial(ES, population_size=64, sigma=0.06, learning_rate=0.06)
_SAMPLING = functools.partial(SamplingParams, max_tokens=4)


@chz.chz
class Config(TrainConfig):
    """Train a model to guess a digit from hints."""

    model_name: str = chz.field(
        default=str(BUNDLED_MODEL), doc="directory, GGUF file, Hub name, run"
    )
    dataset: RLDatasetBuilder = chz.field(default_factory=GuessDatasetBuilder, doc="the digits")
    log_path: str = chz.field(default="runs/custom-env", doc="run directory")
    optimizer: OptimizerBuilder = chz.field(
        default_factory=_OPTIMIZER, blueprint_unspecified=_OPTIMIZER, doc="how the centre moves"
    )
    sampling: SamplingParams = chz.field(
        default_factory=_SAMPLING, blueprint_unspecified=_SAMPLING, doc="how tokens are drawn"
    )
    num_generations: int = chz.field(default=40, doc="generations of the whole run")


if __name__ == "__main__":
    run_cli(run, Config)
