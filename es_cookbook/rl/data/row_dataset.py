"""Data sets with one problem per row: loading, holding rows out, batches and checks.

A row is held out by what it is, never by how it is asked. Its key, all of its fields or those that
`split_by` names, is hashed to a place in [0, 1); a share of the places is held out, in the order of
the file, and where `num_test` asks for more, the places that follow. So the held-out rows are the
same for every seed and prompt, and a smaller `num_test` selects the first of them.

Rows that do not fit, because no problem can be made of them or their prompt is too long, are
refused or skipped. They are skipped after rows were held out, so no other row changes sides, and by
what they are, never by what an engine holds, so a run that goes on uses the same rows.
"""

import dataclasses
import hashlib
import heapq
import json
from abc import abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError, nearest
from es_cookbook.common.terminal import one_line, plural, say
from es_cookbook.rl.data.problem_dataset import ProblemDataset, check_count, tell_none_held_out
from es_cookbook.rl.data.rows import Row, SkippedRows, check_template, filled, with_whole_numbers
from es_cookbook.rl.data.sources import label_of, load_rows, load_splits
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of
from es_cookbook.rl.types import (
    ON_BAD_ROW_DOC,
    SOURCE_DOC,
    Datasets,
    OnBadRow,
    RLDatasetBuilder,
    Tokenizer,
)

_NUM_TEST = 200
"""Most held-out rows where `num_test` does not say how many."""


@chz.chz
class RowDatasetBuilder(RLDatasetBuilder):
    """One problem per row, for training and, disjoint from it, for the held-out test.

    Rows of equal keys are in one of the splits, and a training row that asks what a held-out one
    asks, word for word, is left out.
    """

    source: str = chz.field(doc=f"{SOURCE_DOC}; several with commas, a part as rows.jsonl[:1000]")
    test_source: str | None = chz.field(default=None, doc="for the test; None: held out of source")
    num_train: int = chz.field(default=10_000, doc="most training problems used")
    num_test: int | None = chz.field(
        default=None,
        doc=f"number of held-out problems, 0 for none; None: the share, {_NUM_TEST} at most",
    )
    test_fraction: float = chz.field(default=0.1, doc="share of the rows that is held out")
    fold: int = chz.field(default=0, doc="which such share of them: 0, 1, ...")
    split_by: str = chz.field(
        default="",
        doc="what rows of one split share: a field, several with commas between them, or text with "
        "fields in braces; empty: all fields",
    )
    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
    seed: int = chz.field(default=0, doc="seed of the order of the training problems")
    on_bad_row: OnBadRow = chz.field(default="refuse", doc=ON_BAD_ROW_DOC)
    max_prompt_tokens: int | None = chz.field(
        default=None, doc="longest prompt; None: any that leaves room for an answer"
    )
    on_long_prompt: Literal["refuse", "skip"] = chz.field(
        default="refuse", doc="refuse a prompt above max_prompt_tokens, or skip its row"
    )

    @chz.validate
    def _fitting(self) -> None:
        check_range(self, "max_prompt_tokens", at_least=1)
        if self.on_long_prompt != "refuse" and self.max_prompt_tokens is None:
            raise ConfigError(
                f"on_long_prompt={self.on_long_prompt} needs max_prompt_tokens: which rows a run "
                "uses must not depend on the engine's context"
            )
        check_range(self, "num_train", "problems_per_generation", at_least=1)
        check_range(self, "num_test", "fold", at_least=0)
        check_range(self, "test_fraction", above=0, at_most=0.5)
        check_template(self.split_by, "split_by")
        if (self.fold + 1) * self.test_fraction > 1 + 1e-9:
            raise ConfigError(
                f"fold={self.fold} is past the end: with test_fraction={self.test_fraction:g} "
                f"there are folds 0 to {int(1 / self.test_fraction + 1e-9) - 1}"
            )

    @property
    @override
    def label(self) -> str:
        return label_of(self.source)

    @abstractmethod
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        """Make the problem of a row, named `row.where`, from `row.text(...)` and the like.

        Raises:
            DataError: The row cannot be used.
        """

    def key(self, row: Row) -> str:
        """Return a text, equal for rows of one split, if `split_by` is empty: the whole row."""
        return _all_of(row)

    @property
    def prompt_fields(self) -> Sequence[str]:
        """Fields that the option `prompt` names; by default there is no such option."""
        return ()

    def check_fields(self, row: Row) -> None:
        """Refuse, before a model is loaded, a row with which `problem` cannot do anything.

        Raises:
            DataError: Names the row, and what is missing or wrong; by default nothing is.
        """
        del row

    @override
    def check(self) -> None:
        """Read the rows that are used, and refuse those that would be refused later."""
        train, test = self._splits()
        if not test and self.num_test != 0:
            advice = (
                f"dataset.test_fraction={self.test_fraction:g} is the share, dataset.num_test=10 "
                "holds that many out"
            )
            tell_none_held_out(self.source, self.test_source, advice)
        rows = [keyed.row for keyed in [*train, *test]]
        self._check_prompt(rows)
        for row in rows if self.on_bad_row == "refuse" else []:
            self.check_fields(row)
        check_count(len(train), self.problems_per_generation)

    def _check_prompt(self, rows: Sequence[Row]) -> None:
        """Refuse a prompt with a field that no row has: then it is the prompt that is wrong."""
        had = {name for row in rows for name, value in row.fields.items() if value is not None}
        for name in self.prompt_fields:
            if name not in had:
                who = f"all {len(rows):,} rows lack" if len(rows) > 1 else "the row lacks"
                raise DataError(
                    f"{self.source}: {who} {name!r}, which dataset.prompt names; "
                    f"{nearest(name, had)}"
                )

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Load the rows, hold some out, and make their problems."""
        train, test = self._splits()
        held_out = self.test_source or self.source
        shown = self.shown([keyed.row for keyed in train if keyed.error is None])
        test_P = await self._problems(test, held_out, "held-out row", tokenizer, shown)
        train_P = await self._problems(train, self.source, "training row", tokenizer, shown)
        builders = self._not_asked(train_P, test_P)
        dataset = ProblemDataset(builders, self.problems_per_generation, self.seed, test_P)
        return Datasets(dataset, test_P)

    def shown(self, train: Sequence[Row]) -> Sequence[Row]:
        """Return the training rows that prompts show as examples; none by default.

        Raises:
            DataError: There are too few.
        """
        return ()

    def _splits(self) -> "tuple[list[_Keyed], list[_Keyed]]":
        train, test = self._held_out()
        if not train:
            why = ": all are held out, or equal to rows that are" if test else ""
            raise DataError(f"{self.source}: there are no rows to train on{why}")
        return train, test

    def _held_out(self) -> "tuple[list[_Keyed], list[_Keyed]]":
        num_test = _NUM_TEST if self.num_test is None else self.num_test
        most = {"num_train": self.num_train, "num_test": num_test}
        train, test = load_splits(
            self.source, self.test_source, self._keyed, lambda each: each.is_held_out, **most
        )
        if len(test) == num_test or self.num_test is None:
            return list(train.values()), list(test.values())
        if self.test_source is not None:  # All its rows were read.
            count = plural(len(test), "row")
            raise DataError(f"dataset.num_test={num_test}: {self.test_source} has {count}")
        # The share first, in the order of the file, then the places that follow.
        keyed = map(self._keyed, load_rows(self.source))
        in_turn = heapq.nsmallest(
            num_test + 1, keyed, key=lambda each: 0.0 if each.is_held_out else each.place
        )
        if len(in_turn) <= num_test:
            raise DataError(
                f"dataset.num_test={num_test}: {self.source} has {plural(len(in_turn), 'row')}, "
                "and some must be left to train on"
            )
        held_out = in_turn[:num_test]
        keys = {each.key for each in held_out}
        others = (each for each in map(self._keyed, load_rows(self.source)) if each.key not in keys)
        return list(islice(others, self.num_train)), held_out

    def _keyed(self, row: Row) -> "_Keyed":
        error = None
        try:
            key = self._by_fields(row) if self.split_by else self.key(row)
        except DataError as found:
            if self.on_bad_row == "refuse":
                raise
            key, error = _all_of(row), found
        digest = hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest()
        place = (int.from_bytes(digest, "big") / 2**64 - self.fold * self.test_fraction) % 1.0
        return _Keyed(row, key, place, place < self.test_fraction, error)

    def _by_fields(self, row: Row) -> str:
        try:
            if "{" in self.split_by:
                return filled(self.split_by, row)
            return "\n".join(row.printed(name.strip()) for name in self.split_by.split(","))
        except DataError as error:
            raise DataError(f"{error} (dataset.split_by={one_line(self.split_by)})") from error

    async def _problems(
        self,
        rows: "Sequence[_Keyed]",
        source: str,
        what: str,
        tokenizer: Tokenizer,
        shown: Sequence[Row],
    ) -> list[ProblemGroupBuilder]:
        """Make the problems of rows that fit; print how many do not, and the first of those."""
        skipped, texts = SkippedRows(source, self.on_bad_row), AnswerTexts(tokenizer)
        fitted = [await self._fitted(keyed, skipped, texts, shown) for keyed in rows]
        found = [problem for problem in fitted if problem is not None]
        skipped.say(len(rows), what, len(found))
        return found

    async def _fitted(
        self, keyed: "_Keyed", skipped: SkippedRows, texts: AnswerTexts, shown: Sequence[Row]
    ) -> ProblemGroupBuilder | None:
        """Make a row's problem; None if it is skipped."""
        most, where = self.max_prompt_tokens, keyed.row.where
        try:
            problem = self._built(keyed, texts.tokenizer, shown)
            if self.on_bad_row == "skip":  # Otherwise it is refused with all others.
                await problem.check_said(texts, ())
            length = 0 if most is None else await _num_tokens(problem)
        except DataError as error:
            skipped.bad(where, error)
            return None
        if most is None or length <= most:
            return problem
        if self.on_long_prompt == "refuse":
            raise keyed.row.error(
                f"its prompt of {plural(length, 'token')} is above dataset.max_prompt_tokens="
                f"{most}; dataset.on_long_prompt=skip leaves such rows out"
            )
        skipped.add(where, f"with a prompt above {plural(most, 'token')} and skipped", str(length))
        return None

    def _built(
        self, keyed: "_Keyed", tokenizer: Tokenizer, shown: Sequence[Row]
    ) -> ProblemGroupBuilder:
        if keyed.error is not None:
            raise keyed.error
        others = [row for row in shown if row.where != keyed.row.where]
        row = dataclasses.replace(with_whole_numbers(keyed.row), shown=others)
        contents = (digest_of(_all_of(keyed.row)), digest_of(keyed.key))
        return dataclasses.replace(self.problem(row, tokenizer), contents=contents)

    def _not_asked(
        self, builders: list[ProblemGroupBuilder], test_P: Sequence[ProblemGroupBuilder]
    ) -> list[ProblemGroupBuilder]:
        """Return the training problems whose prompt no held-out problem has."""
        held_out = {digest for problem in test_P for digest in problem.digests}
        kept = [builder for builder in builders if held_out.isdisjoint(builder.digests)]
        if (num_left_out := len(builders) - len(kept)) > 0:
            said = (
                f"{self.source}: {num_left_out:,} of {plural(len(builders), 'training row')} have "
                "the prompt of a held-out row, token by token, and are left out; "
                "dataset.split_by=FIELD holds rows out together that have the same FIELD"
            )
            if not kept:
                raise DataError(said)
            say(said)
        return kept


async def _num_tokens(problem: ProblemGroupBuilder) -> int:
    length = await problem.prompt_length()
    if length is None:
        raise ConfigError(
            "dataset.max_prompt_tokens: the prompts of these problems are not known before a "
            "rollout; accepted: None"
        )
    return length


def _all_of(row: Row) -> str:
    return json.dumps(dict(row.fields), sort_keys=True, default=str)


@dataclasses.dataclass(frozen=True, slots=True)
class _Keyed:
    """A row, its key, and where it belongs.

    Attributes:
        place: in [0, 1), by the key, from the beginning of the share that is held out.
        error: why the row has no key.
    """

    row: Row
    key: str
    place: float
    is_held_out: bool
    error: DataError | None = None
