"""Sources of rows: files, directories, and data sets of the Hugging Face Hub.

    rows.jsonl                 or .jsonl.gz, .csv, .csv.gz, .json (an array), .parquet, .arrow
    data/*.jsonl, more.csv     several; a pattern's files in the order of their names
    saved                      a directory of `Dataset.save_to_disk`, or saved:train of several
    folder:main:train          a directory in the layout of the Hub: configuration and split
    openai/gsm8k:main:train    a set of the Hub
    openai/gsm8k@main          a branch, tag or commit of it
    anything of these[:1000]   rows from the first number on, up to the second

A configuration may be left out if there is one, and a split if it is the one that is wanted. Rows
are read one after the other, as far as they are asked for. Directories and sets of the Hub are read
by what is registered in the group `sets`.
"""

import dataclasses
import glob
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar, cast

from es_cookbook.common.errors import DataError
from es_cookbook.common.registry import Registered
from es_cookbook.common.trust import load
from es_cookbook.rl.data.files import FILE_TYPES, file_rows
from es_cookbook.rl.data.rows import Row

SETS = Registered("sets")
"""Name -> an `OpenSet`; tried in the order of their names."""
_SLICE = re.compile(r"\[(\d*):(\d*)\]$")


@dataclasses.dataclass(frozen=True, slots=True)
class NamedSet:
    """A directory or a Hub data set, as a user names it.

    Attributes:
        name: a directory's path, or a name on the Hub.
        revision: revision of a Hub data set.
        configuration: "" if it is left out.
        split: the wanted one where the user names none.
        option: the user's name for the source.
    """

    name: str
    revision: str | None
    configuration: str
    split: str
    option: str

    @property
    def is_directory(self) -> bool:
        return Path(self.name).is_dir()


OpenSet: TypeAlias = Callable[[NamedSet], Iterator[Row] | None]
"""Finds a set; its rows are read from what it returns, which is None for sets of another kind."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """A part of a source: a path or pattern of files, or a set.

    Attributes:
        start: the first row; `stop` is the row after the last.
    """

    files: str
    named: NamedSet | None
    start: int
    stop: int | None


def label_of(source: str) -> str:
    """Return a short name for a source: that of its first file or set, without wildcards."""
    first = _sources(source)[0]
    if first.named is not None:
        return Path(first.named.name).name
    name = Path(re.split(r"[*?[]", first.files)[0].rstrip("-_./")).name
    for end in FILE_TYPES:
        name = name.removesuffix(end)
    return name or "rows"


def load_rows(source: str, *, option: str = "source", split: str = "train") -> Iterator[Row]:
    """Find a source, and return an iterator over its rows, which reads them, in order.

    Args:
        source: as the module's docstring has it.
        option: the user's name for the source.
        split: split of a set that has several, if the source names none.

    Raises:
        DataError: There is no such file, directory, configuration or split, or the Hub does not
            give the set and no cache has it; from the iterator: a row cannot be read.
    """
    found: list[Iterator[Row]] = []
    for each in _sources(source):
        if each.named is None:
            rows = chain.from_iterable(map(file_rows, _paths(each.files)))
        else:
            rows = _rows_of_set(each.named, option, split)
        found.append(islice(rows, each.start, each.stop))
    return chain.from_iterable(found)


def _rows_of_set(named: NamedSet, option: str, split: str) -> Iterator[Row]:
    named = dataclasses.replace(named, option=option, split=named.split or split)
    for name in SETS:
        if (rows := cast(OpenSet, load(SETS[name]))(named)) is not None:
            return rows
    raise DataError(f"{option}: nothing that is installed reads the set {named.name!r}")


def _sources(source: str) -> list[_Source]:
    texts = [source] if Path(source).exists() else [each.strip() for each in source.split(",")]
    return [_parsed(text) for text in texts]


def _parsed(text: str) -> _Source:
    name, start, stop = text, 0, None
    if not text or "://" in text:
        raise DataError(
            f"{text or 'an empty name'}: not a data file, a directory or a Hub data set; download "
            "what an address points to, and give the file"
        )
    if (cut := _SLICE.search(text)) and not Path(text).exists():
        name, start, stop = text[: cut.start()], int(cut[1] or 0), int(cut[2]) if cut[2] else None
    if name.endswith(FILE_TYPES) or glob.has_magic(name):
        return _Source(name, None, start, stop)
    name, *words = name.split(":")
    revision = ""
    if not Path(name).is_dir():
        name, _, revision = name.partition("@")
        is_path = Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path or not name or len(words) > 2:
            raise DataError(
                f"{text}: is neither a data file nor a directory; accepted are files whose names "
                f"end in {', '.join(FILE_TYPES)}, directories, and sets of the Hub, as in "
                "owner/name:configuration:split"
            )
    configuration, split = (*words, "", "")[:2]
    named = NamedSet(name, revision or None, configuration, split, "source")
    return _Source("", named, start, stop)


def _paths(files: str) -> Sequence[Path]:
    if Path(files).is_file():
        return [Path(files)]
    if not glob.has_magic(files):
        raise DataError(f"{files}: there is no such file")
    names = (name for name in glob.glob(files, recursive=True) if name.endswith(FILE_TYPES))
    if not (found := [path for path in map(Path, sorted(names)) if path.is_file()]):
        raise DataError(f"{files}: no data file has a name like that")
    return found


class _HasKey(Protocol):
    """A problem with a key."""

    @property
    def key(self) -> Hashable:
        """Equal for the same problem."""


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
    """Load training and test problems from two sources, or from one by `is_held_out`.

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
    train: Named[P] = {}
    test: Named[P] = {}
    if test_source is None:
        for where, problem in problems:
            held_out = num_test > 0 and is_held_out(problem)
            split, most = (test, num_test) if held_out else (train, num_train)
            if len(split) < most:
                split[where] = problem
            elif len(train) == num_train and len(test) == num_test:
                break  # Both have enough.
        return train, test
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
