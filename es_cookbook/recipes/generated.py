"""Data sets of generated problems: folds, streams of distinct problems, and batches of them.

Which fold a problem belongs to is a hash of the problem: whoever generates problems, with whatever
seed, agrees on which ones no one trains on. `development` is a second held-out fold: settings are
chosen on it, so that the test chooses nothing.
"""

import dataclasses
import random
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Literal, TypeAlias, TypeVar

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of
from es_cookbook.rl.types import Datasets, RLDatasetBuilder, Tokenizer

Fold: TypeAlias = Literal["train", "development", "test"]

HELD_OUT_ONE_IN = 10
"""One problem in this many is in the test, and as many are in the development set."""
FRUITLESS = 10_000
"""Draws in a row that bring nothing new, after which there is taken to be no further problem."""

_Problem = TypeVar("_Problem", bound=Hashable)


def fold_of(recipe: str, *numbers: int) -> Fold:
    """The fold of a recipe's problem that these numbers stand for."""
    place = derive_seed(0, f"{recipe}/split", *numbers) % HELD_OUT_ONE_IN
    return "test" if place == 0 else "development" if place == 1 else "train"


def distinct(
    draw: Callable[[], _Problem], fold_of: Callable[[_Problem], Fold], fold: Fold
) -> Iterator[_Problem]:
    """The problems of one fold that `draw` brings, each once; ends where it brings nothing new."""
    seen: set[_Problem] = set()
    fruitless = 0
    while fruitless < FRUITLESS:
        problem = draw()
        fruitless += 1
        if problem in seen:
            continue
        seen.add(problem)
        fruitless = 0
        if fold_of(problem) == fold:
            yield problem


def with_a_wrong_character(answer: str, rng: random.Random) -> str:
    """The answer with one letter or digit, at any place, replaced by another."""
    place = rng.randrange(len(answer))
    alphabet = "0123456789" if answer[place].isdigit() else "abdefgilmnoprstu"
    other = rng.choice([each for each in alphabet if each != answer[place]])
    return answer[:place] + other + answer[place + 1 :]


@chz.chz
class GeneratedDatasetBuilder(RLDatasetBuilder):
    """Generated problems for training and, disjoint from them, for the held-out test."""

    num_train: int = chz.field(default=4000, doc="most training problems used")
    num_test: int = chz.field(default=1000, doc="most held-out problems used; 0 for none")
    held_out: Literal["test", "development"] = chz.field(
        default="test", doc="which held-out problems; settings are chosen on development"
    )
    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
    seed: int = chz.field(default=0, doc="of the training problems generated and of their order")

    @chz.validate
    def _counts(self) -> None:
        check_range(self, "num_train", "problems_per_generation", at_least=1)
        check_range(self, "num_test", at_least=0)

    @abstractmethod
    def builders(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        """The distinct problems of a fold, in an order that follows from the seed.

        A problem's name says what it is, however it is asked.
        """

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate, and render the prompts."""

        def made(seed: int, fold: Fold, most: int) -> list[ProblemGroupBuilder]:
            builders = islice(self.builders(seed, fold, tokenizer), most)
            return [
                dataclasses.replace(each, contents=(digest_of(each.name),)) for each in builders
            ]

        train = made(self.seed, "train", self.num_train)
        test_P = made(0, self.held_out, self.num_test)  # The same for every seed: runs compare.
        dataset = ProblemDataset(train, self.problems_per_generation, self.seed, test_P)
        return Datasets(dataset, test_P)
