"""Training and held-out problems of local files and Hub sets, disjoint by the problem itself."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Literal, Protocol, TypeAlias, TypeVar

from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.rows import Row, load_rows

Split: TypeAlias = Literal["train", "test"]


class SplitProblem(Protocol):
    """A problem that knows where it belongs."""

    @property
    def key(self) -> Hashable:
        """What makes it the problem it is."""
        ...

    @property
    def split(self) -> Split:
        """Which split it belongs to, a pure function of the problem."""
        ...


P = TypeVar("P", bound=SplitProblem)
Named: TypeAlias = dict[str, P]
"""Problems by where they stand, for example "train.jsonl, line 3"."""


def load_splits(
    source: str,
    test_source: str | None,
    read: Callable[[Row], P],
    *,
    num_train: int,
    num_test: int,
) -> tuple[Named[P], Named[P]]:
    """Training and test problems: of two sources, or of one by each problem's own `split`.

    Args:
        source: as for `load_rows`; the user's `dataset.source`.
        test_source: the same for the test; None holds problems out of `source`.
        read: makes a problem of a row.
        num_train: most training problems.
        num_test: most test problems; without a `test_source`, 0 trains on all.

    Raises:
        DataError: A source or row that cannot be used, or a problem that is in both sources.
    """
    problems = _problems(load_rows(source, option="dataset.source"), read)
    if test_source is None:
        return _hold_out(problems, num_train, num_test)
    held_out = _problems(load_rows(test_source, option="dataset.test_source"), read)
    train, test = dict(islice(problems, num_train)), dict(islice(held_out, num_test))
    _refuse_shared(train, test)
    return train, test


def _problems(rows: Iterable[Row], read: Callable[[Row], P]) -> Iterator[tuple[str, P]]:
    return ((row.where, read(row)) for row in rows)


def _hold_out(
    problems: Iterable[tuple[str, P]], num_train: int, num_test: int
) -> tuple[Named[P], Named[P]]:
    """Reads on only until both have enough."""
    train: Named[P] = {}
    test: Named[P] = {}
    for where, problem in problems:
        is_train = problem.split == "train" or num_test == 0
        split, most = (train, num_train) if is_train else (test, num_test)
        if len(split) < most:
            split[where] = problem
        elif len(train) == num_train and len(test) == num_test:
            break
    return train, test


def _refuse_shared(train: Named[P], test: Named[P]) -> None:
    """Refuse a problem that stands in both splits."""
    test_names = {problem.key: name for name, problem in test.items()}
    for name, problem in train.items():
        if problem.key in test_names:
            raise DataError(
                f"{name}: this problem is also held out, in {test_names[problem.key]}; training "
                "and test must be disjoint"
            )
