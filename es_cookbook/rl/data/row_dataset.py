"""A data set over rows: subclass it, say how a row becomes a problem, and the rest is here.

Loading from a file or the Hub, holding rows out, batches in an order that follows from the seed,
and the checks before the first generation. Fields that a subclass adds are options beside these:
`dataset.batch=8`.
"""

import dataclasses
import hashlib
import json
from abc import abstractmethod

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.rows import Row, check_sources
from es_cookbook.rl.data.splits import Split, load_splits
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Datasets, RLDatasetBuilder, Tokenizer


@chz.chz
class RowDatasetBuilder(RLDatasetBuilder):
    """A problem a row, for training and, disjoint from it, for the held-out test.

    A row is held out by what it asks (`key`), so a question that stands there twice is in one of
    the splits, and every seed has the same test.
    """

    source: str = chz.field(doc=".jsonl or .parquet file, or Hub set")
    test_source: str | None = chz.field(
        default=None, doc="the same for the test; None holds rows of `source` out"
    )
    num_train: int = chz.field(default=10_000, doc="most training problems used")
    num_test: int = chz.field(default=200, doc="most held-out problems used; 0 for none")
    test_fraction: float = chz.field(default=0.1, doc="share of the rows that may be held out")
    fold: int = chz.field(default=0, doc="which such share of them: 0, 1, ...")
    batch: int = chz.field(default=32, doc="problems in a generation")
    seed: int = chz.field(default=0, doc="of the order of the training problems")

    @chz.validate
    def _counts(self) -> None:
        check_range(self, "num_train", "batch", at_least=1)
        check_range(self, "num_test", "fold", at_least=0)
        check_range(self, "test_fraction", above=0, at_most=0.5)
        if (self.fold + 1) * self.test_fraction > 1 + 1e-9:
            raise ConfigError(
                f"fold={self.fold} is past the end: with test_fraction={self.test_fraction:g} "
                f"there are folds 0 to {int(1 / self.test_fraction + 1e-9) - 1}"
            )

    @abstractmethod
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        """What a row asks. Use `row.where` as the problem's name, and `row.text(...)` and the like.

        Raises:
            DataError: The row cannot be used.
        """

    def key(self, row: Row) -> str:
        """Equal for rows that ask the same, which then are in the same split; all of it here."""
        return json.dumps(dict(row.fields), sort_keys=True, default=str)

    @override
    def check(self) -> None:
        check_sources(self.source, self.test_source)

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Load the rows, hold some out, and make their problems."""
        most = {"num_train": self.num_train, "num_test": self.num_test}
        train, test = load_splits(self.source, self.test_source, self._asked, **most)
        if not train:
            raise DataError(f"{self.source}: there are no rows to train on")
        builders = [self.problem(asked.row, tokenizer) for asked in train.values()]
        test_P = [self.problem(asked.row, tokenizer) for asked in test.values()]
        dataset = ProblemDataset(builders, self.batch, self.seed, test_P, "dataset.batch")
        return Datasets(dataset, test_P)

    def _asked(self, row: Row) -> "_Asked":
        key = self.key(row)
        digest = hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest()
        place = int.from_bytes(digest, "big") / 2**64 - self.fold * self.test_fraction
        return _Asked(row, key, "test" if 0 <= place < self.test_fraction else "train")


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """A row, what it asks, and where it belongs."""

    row: Row
    key: str
    split: Split
