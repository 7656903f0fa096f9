"""Generated problems: folds, streams of distinct problems, data sets, and files of rows.

The fold of a problem is a hash of the problem, so that runs with any seed hold out the same
problems. `development` is a second held-out fold, for choosing settings without the test.
"""

import dataclasses
import functools
import hashlib
import random
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.data.problem_dataset import ProblemDataset, check_count, tell_none_held_out
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of
from es_cookbook.rl.types import (
    ON_BAD_ROW_DOC,
    SOURCE_DOC,
    Datasets,
    OnBadRow,
    RLDataset,
    RLDatasetBuilder,
    Tokenizer,
)

if TYPE_CHECKING:
    from es_cookbook.rl.data.rows import Row, SkippedRows

Fold: TypeAlias = Literal["train", "development", "test"]

FOLDS = 10
"""Number of folds; 0 is the test, 1 the development set."""
FRUITLESS = 100_000
"""Draws in a row without a new problem, after which the stream ends."""

_Problem = TypeVar("_Problem")


def fold_of(recipe: str, *numbers: int) -> Fold:
    """Return the fold of the recipe's problem with these numbers."""
    place = derive_seed(0, f"{recipe}/split", *numbers) % FOLDS
    return "test" if place == 0 else "development" if place == 1 else "train"


def fold_of_text(text: str) -> int:
    """Return the fold of a text, from 0 to `FOLDS` - 1; white space does not matter."""
    folded = " ".join(text.split()).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(folded, digest_size=8).digest(), "big") % FOLDS


def distinct(
    draw: Callable[[], _Problem | None],
    is_wanted: Callable[[_Problem], bool] = lambda problem: True,
    key: Callable[[_Problem], Hashable] = lambda problem: problem,
    fruitless: int = FRUITLESS,
) -> Iterator[_Problem]:
    """Yield distinct wanted problems from `draw`, until it returns nothing new.

    Args:
        draw: returns the next problem, or None for one that cannot be used.
        is_wanted: whether a problem is of the right fold.
        key: identity of a problem.
        fruitless: draws in a row without a new problem that end the stream.
    """
    seen: set[Hashable] = set()
    left = fruitless
    while left:
        problem = draw()
        left -= 1
        if problem is None or (known := key(problem)) in seen:
            continue
        seen.add(known)
        left = fruitless
        if is_wanted(problem):
            yield problem


class _InFold(Protocol):
    @property
    def fold(self) -> Fold: ...


_Drawn = TypeVar("_Drawn", bound=_InFold)


def problems_of(
    recipe: str, seed: int, fold: Fold, draw: Callable[[random.Random], _Drawn]
) -> Iterator[_Drawn]:
    """Yield distinct problems of a fold by a seed; those of different folds are disjoint."""
    rng = random.Random(derive_seed(seed, f"{recipe}/{fold}"))
    return distinct(lambda: draw(rng), lambda problem: problem.fold == fold)


def training_problem(draw: Callable[[random.Random], _Drawn], rng: random.Random) -> _Drawn:
    """Return the next problem of the training fold."""
    while (problem := draw(rng)).fold != "train":
        pass
    return problem


@chz.chz
class FoldedDatasetBuilder(RLDatasetBuilder):
    """Problems for training and, disjoint from them, for the held-out test.

    Attributes:
        last_fold: the largest `fold`, if there is one.
    """

    last_fold: ClassVar[int | None] = 1
    num_train: int = chz.field(default=4000, doc="most training problems used")
    num_test: int = chz.field(default=500, doc="most held-out problems used; 0 for none")
    fold: int = chz.field(
        default=0,
        doc="which problems are held out: 0, those of the test; 1, others, to choose settings on",
    )
    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
    seed: int = chz.field(default=0, doc="seed of generated training problems and of their order")

    @chz.validate
    def _counts(self) -> None:
        check_range(self, "num_train", "problems_per_generation", at_least=1)
        check_range(self, "num_test", at_least=0)
        check_range(self, "fold", at_least=0, at_most=self.last_fold)

    @property
    def origin(self) -> str:
        """Source of its problems, in words."""
        return "the generator"

    @abstractmethod
    def splits(
        self, tokenizer: Tokenizer
    ) -> tuple[list[ProblemGroupBuilder], list[ProblemGroupBuilder]]:
        """Return training and held-out problems; the latter are the same for every seed."""

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate or load, and render the prompts."""
        train, test_P = (list(map(_known_by_name, each)) for each in self.splits(tokenizer))
        if not train:
            raise DataError(f"{self.origin}: there are no training problems")
        return Datasets(self.dataset(train, test_P), test_P)

    def dataset(
        self, train: Sequence[ProblemGroupBuilder], test_P: Sequence[ProblemGroupBuilder]
    ) -> RLDataset:
        """Check problems and make a dataset with batches of them."""
        return ProblemDataset(train, self.problems_per_generation, self.seed, test_P)


def _known_by_name(builder: ProblemGroupBuilder) -> ProblemGroupBuilder:
    if builder.contents:
        return builder
    return dataclasses.replace(builder, contents=(digest_of(builder.name),))


@chz.chz
class GeneratedDatasetBuilder(FoldedDatasetBuilder):
    """Generated problems."""

    @abstractmethod
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        """Yield the distinct problems of a fold, in an order that follows from the seed.

        A problem without `contents` is identified by its name.
        """

    @override
    def splits(
        self, tokenizer: Tokenizer
    ) -> tuple[list[ProblemGroupBuilder], list[ProblemGroupBuilder]]:
        train = self.generated(self.seed, "train", tokenizer)
        test = self.generated(0, "development" if self.fold else "test", tokenizer)
        return list(islice(train, self.num_train)), list(islice(test, self.num_test))


class _FoldedProblem(Protocol):
    """A problem that knows its fold, a pure function of its key."""

    @property
    def key(self) -> Hashable: ...
    @property
    def fold(self) -> int: ...


P = TypeVar("P", bound=_FoldedProblem)


@chz.chz
class SourcedDatasetBuilder(GeneratedDatasetBuilder, Generic[P]):
    """Problems of rows, or generated ones, for which nothing that reads rows is imported."""

    last_fold: ClassVar[int | None] = FOLDS - 1
    source: str | None = chz.field(default=None, doc=f"{SOURCE_DOC}; None generates problems")
    test_source: str | None = chz.field(
        default=None, doc="the same for the test; None holds a tenth of `source` out"
    )
    on_bad_row: OnBadRow = chz.field(default="refuse", doc=ON_BAD_ROW_DOC)

    @chz.validate
    def _sources(self) -> None:
        if self.test_source is not None and self.source is None:
            raise ConfigError(
                "test_source needs source=... beside it: generated problems hold out their own"
            )

    @property
    @override
    def origin(self) -> str:
        return self.source or super().origin

    @override
    def check(self) -> None:
        if self.source is not None:
            from es_cookbook.rl.data.rows import SkippedRows

            train, test = self._read(SkippedRows(self.source, self.on_bad_row), None)
            if not train:
                raise DataError(f"{self.origin}: there are no training problems")
            if not test and self.num_test:
                advice = "dataset.test_source=... gives others, dataset.fold=1 another share"
                tell_none_held_out(self.source, self.test_source, advice)
            check_count(len(train), self.problems_per_generation)

    def folds(self, fold: Fold) -> list[int]:
        """Return the folds of generated problems: the one that is held out, or all others."""
        return [each for each in range(FOLDS) if (each != self.fold) == (fold == "train")]

    @abstractmethod
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, P]]:
        """Yield distinct problems with their names; a fold other than "train" means `fold`."""

    @abstractmethod
    def read(self, row: "Row", tokenizer: "Tokenizer | None") -> P:
        """Make the problem of a row.

        Without a tokenizer it is only checked, before a model is loaded.

        Raises:
            DataError: It cannot be used.
        """

    @abstractmethod
    def builder(self, name: str, problem: P, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        """Return the builder that makes a problem's Envs."""

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        for name, problem in self.generate(seed, fold):
            yield self.builder(name, problem, tokenizer)

    @override
    def splits(
        self, tokenizer: Tokenizer
    ) -> tuple[list[ProblemGroupBuilder], list[ProblemGroupBuilder]]:
        if self.source is None:
            return super().splits(tokenizer)
        from es_cookbook.rl.data.rows import SkippedRows

        skipped = SkippedRows(self.source, self.on_bad_row)
        splits = self._read(skipped, tokenizer)

        def built(problems: Mapping[str, P]) -> list[ProblemGroupBuilder]:
            made = (
                skipped.unless_bad(name, functools.partial(self.builder, name, problem, tokenizer))
                for name, problem in problems.items()
            )
            return [each for each in made if each is not None]

        train, test = map(built, splits)
        skipped.say(len(train) + len(test) + skipped.num_bad, "row", len(train))
        return train, test

    def _read(
        self, skipped: "SkippedRows", tokenizer: "Tokenizer | None"
    ) -> tuple[dict[str, P], dict[str, P]]:
        from es_cookbook.rl.data.sources import load_splits

        assert self.source is not None, "asked of builders that have one"
        return load_splits(
            self.source,
            self.test_source,
            lambda row: skipped.unless_bad(row.where, lambda: self.read(row, tokenizer)),
            lambda problem: problem.fold == self.fold,
            num_train=self.num_train,
            num_test=self.num_test,
        )
