"""Training and held-out problems: of two sources, or of one by what the problems are."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Protocol, TypeAlias, TypeVar

from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.sources import load_rows


class _HasKey(Protocol):
    """A problem that knows what makes it the problem it is."""

    @property
    def key(self) -> Hashable:
        """Equal for problems that are the same."""
        ...


P = TypeVar("P", bound=_HasKey)
Named: TypeAlias = dict[str, P]
"""Problems by where they stand, for example "train.jsonl, line 3"."""


def load_splits(
    source: str,
    test_source: str | None,
    read: Callable[[Row], P | None],
    is_held_out: Callable[[P], bool],
    *,
    num_train: int,
    num_test: int,
) -> tuple[Named[P], Named[P]]:
    """Training and test problems: of two sources, or of one by `is_held_out`.

    Args:
        source: as for `load_rows`; the user's `dataset.source`.
        test_source: the same for the test; None holds problems out of `source`.
        read: makes a problem of a row, or None to skip it.
        is_held_out: whether one of `source` is, a pure function of the problem.
        num_train: most training problems.
        num_test: most test problems; without a `test_source`, 0 trains on all.

    Raises:
        DataError: A source or row that cannot be used, or a problem that is in both sources.
    """

    def named(source: str, option: str, split: str) -> Iterator[tuple[str, P]]:
        for row in load_rows(source, option=option, split=split):
            if (problem := read(row)) is not None:
                yield row.where, problem

    problems = named(source, "dataset.source", "train")
    if test_source is None:
        return _hold_out(
            problems, lambda each: num_test > 0 and is_held_out(each), num_train, num_test
        )
    train = dict(islice(problems, num_train))
    test = dict(islice(named(test_source, "dataset.test_source", "test"), num_test))
    names = {problem.key: name for name, problem in test.items()}
    for name, problem in train.items():
        if problem.key in names:
            raise DataError(
                f"{name}: this problem is also held out, in {names[problem.key]}; training and "
                "test must be disjoint"
            )
    return train, test


def _hold_out(
    problems: Iterable[tuple[str, P]],
    is_held_out: Callable[[P], bool],
    num_train: int,
    num_test: int,
) -> tuple[Named[P], Named[P]]:
    """Reads on only until both have enough."""
    train: Named[P] = {}
    test: Named[P] = {}
    for where, problem in problems:
        split, most = (test, num_test) if is_held_out(problem) else (train, num_train)
        if len(split) < most:
            split[where] = problem
        elif len(train) == num_train and len(test) == num_test:
            break
    return train, test
