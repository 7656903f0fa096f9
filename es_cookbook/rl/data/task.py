"""A task that is a prompt and a score: rows, a template, and a function. No class is needed.

    def score(text, row):
        return float(text.strip() == row["answer"])

    Task(source="rows.jsonl", prompt="{question}", reward=score)

The function gets the answer's text and the row, and returns a number, or a number and metrics to
report beside it; it may be `async`. It runs on the event loop, once per rollout: what takes longer
than microseconds awaits `es_cookbook.rl.grading.workers.in_worker`. In its place may stand one of
the shared rewards (`es_cookbook.rl.rewards`): `Task(..., reward=Number())`.

Where a row becomes a problem in another way, subclass `RowDatasetBuilder` and say how. The rest is
there: loading from a file or the Hub, holding rows out, batches in an order that follows from the
seed, and the checks before the first generation. Fields that a subclass adds are options beside its
own: `dataset.seed=8`.

A row is held out by what it is, never by how it is asked. Its key, all of its fields or those that
`split_by` names, is hashed to a place in [0, 1); a share of the places is held out, in the order of
the file, and where `num_test` asks for more, the places that follow. So the held-out rows are the
same for every seed and prompt, and fewer of them are the first of more.

Rows that do not fit, because no problem can be made of them or their prompt is too long, are
refused or skipped. They are skipped after rows were held out, so no other row changes sides, and by
what they are, never by what an engine holds, so a run that goes on uses the same rows.
"""

import dataclasses
import functools
import hashlib
import heapq
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from string import Formatter
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_literals, check_range
from es_cookbook.common.configs import Names, recorded_without
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.fields.chz_fields import formerly
from es_cookbook.common.terminal import plural, say
from es_cookbook.rl.data.lines import stop_of, with_stop
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.rows import (
    ON_BAD_ROW_DOC,
    TAGS,
    OnBadRow,
    Remarks,
    Row,
    chat_of,
    check_template,
    filled,
    with_choices,
    without_tags,
)
from es_cookbook.rl.data.sources import SOURCE_DOC, check_sources, label_of, load_rows
from es_cookbook.rl.data.splits import load_splits
from es_cookbook.rl.problem_env import (
    PREFILL_DOC,
    Grade,
    ProblemEnv,
    ProblemGroupBuilder,
    digest_of,
    render_prompt,
)
from es_cookbook.rl.rewards.base import (
    REWARD_NAMES,
    Reward,
    RewardFunction,
    check_arity,
    graded,
    name_of,
)
from es_cookbook.rl.rewards.format import prompt_end
from es_cookbook.rl.types import (
    Action,
    Datasets,
    Observation,
    RLDatasetBuilder,
    StepResult,
    Tokenizer,
)

REWARDS = Names(REWARD_NAMES, default=None, functions=True)
_NUM_TEST = 200
"""Most held-out rows where `num_test` does not say how many."""


@chz.chz
class RowDatasetBuilder(RLDatasetBuilder):
    """A problem a row, for training and, disjoint from it, for the held-out test.

    Rows of equal keys are in one of the splits, and a training row that asks what a held-out one
    asks, word for word, is left out.
    """

    source: str = chz.field(
        doc=f"{SOURCE_DOC}; several with commas, and a part with rows.jsonl[:1000]"
    )
    test_source: str | None = chz.field(
        default=None, doc="the same for the test; None holds rows of `source` out"
    )
    num_train: int = chz.field(default=10_000, doc="most training problems used")
    num_test: int | None = chz.field(
        default=None,
        doc=f"exactly so many held-out problems, 0 for none; None: the share, {_NUM_TEST} at most",
    )
    test_fraction: float = chz.field(default=0.1, doc="share of the rows that is held out")
    fold: int = chz.field(default=0, doc="which such share of them: 0, 1, ...")
    split_by: str | None = chz.field(
        default="",
        metadata=recorded_without(None),
        doc="what rows of one split share: a field, several with commas between them, or text with "
        "fields in braces; empty: all fields; None: as runs had it that do not record this option",
    )
    problems_per_generation: int = chz.field(
        default=32, doc="problems in a batch", metadata=formerly("batch")
    )
    seed: int = chz.field(default=0, doc="of the order of the training problems")
    on_bad_row: OnBadRow = chz.field(default="refuse", doc=ON_BAD_ROW_DOC)
    max_prompt_tokens: int | None = chz.field(
        default=None, doc="longest prompt; None: any that leaves room for an answer"
    )
    on_long_prompt: Literal["refuse", "skip", "truncate_left"] = chz.field(
        default="refuse",
        doc="of a prompt above max_prompt_tokens; truncate_left: cut the question's beginning",
    )

    @chz.validate
    def _fitting(self) -> None:
        check_literals(self)
        check_range(self, "max_prompt_tokens", at_least=1)
        if self.on_long_prompt != "refuse" and self.max_prompt_tokens is None:
            raise ConfigError(
                f"on_long_prompt={self.on_long_prompt} needs max_prompt_tokens: which rows a run "
                "uses must not depend on the engine's context"
            )

    @chz.validate
    def _counts(self) -> None:
        check_range(self, "num_train", "problems_per_generation", at_least=1)
        check_range(self, "num_test", "fold", at_least=0)
        check_range(self, "test_fraction", above=0, at_most=0.5)
        check_template(self.split_by or "", "split_by")
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
        """What a row asks. Use `row.where` as the problem's name, and `row.text(...)` and the like.

        Raises:
            DataError: The row cannot be used.
        """

    def key(self, row: Row) -> str:
        """Equal for rows that are to be in one split, where `split_by` does not say: all of it."""
        return _all_of(row)

    @override
    def check(self) -> None:
        check_sources(self.source, self.test_source)
        if self.num_test or self.split_by:  # What they ask for may not be there.
            self._splits()

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Load the rows, hold some out, and make their problems."""
        train, test = self._splits()
        if not train:
            raise DataError(f"{self.source}: there are no rows to train on")
        held_out = self.test_source or self.source
        test_P = await self._problems(test, held_out, "held-out row", tokenizer)
        train_P = await self._problems(train, self.source, "training row", tokenizer)
        builders = self._not_asked(train_P, test_P)
        if stop := self.usual_stop([*builders, *test_P], tokenizer):
            builders, test_P = with_stop(builders, stop), with_stop(test_P, stop)
        dataset = ProblemDataset(builders, self.problems_per_generation, self.seed, test_P)
        return Datasets(dataset, test_P)

    def usual_stop(
        self, problems_P: Sequence[ProblemGroupBuilder], tokenizer: Tokenizer
    ) -> tuple[str, ...]:
        """Texts that end an answer where `sampling.stop` is None; by default none."""
        del problems_P, tokenizer
        return ()

    def _splits(self) -> "tuple[list[_Keyed], list[_Keyed]]":
        num_test = _NUM_TEST if self.num_test is None else self.num_test
        most = {"num_train": self.num_train, "num_test": num_test}
        train, test = load_splits(
            self.source, self.test_source, self._keyed, lambda each: each.is_held_out, **most
        )
        if len(test) == num_test or self.num_test is None or self.split_by is None:
            return list(train.values()), list(test.values())
        if self.test_source is not None:  # Of which all rows were read.
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
        assert self.split_by is not None
        try:
            if "{" in self.split_by:
                return filled(self.split_by, row)
            return "\n".join(str(row.value(name.strip())) for name in self.split_by.split(","))
        except DataError as error:
            raise DataError(f"{error} (dataset.split_by={self.split_by})") from error

    async def _problems(
        self, rows: "Sequence[_Keyed]", source: str, what: str, tokenizer: Tokenizer
    ) -> list[ProblemGroupBuilder]:
        """Those of the rows that are used; says how many do not fit, and names the first."""
        cuts = self.on_long_prompt == "truncate_left"
        whole = chz.replace(self, on_long_prompt="refuse") if cuts else self
        remarks = Remarks(source, self.on_bad_row)
        fitted = [await self._fitted(keyed, whole, tokenizer, remarks) for keyed in rows]
        found = [problem for problem in fitted if problem is not None]
        remarks.say(len(rows), what, len(found))
        return found

    async def _fitted(
        self, keyed: "_Keyed", whole: "RowDatasetBuilder", tokenizer: Tokenizer, remarks: Remarks
    ) -> ProblemGroupBuilder | None:
        """A row's problem, None if it is skipped; `whole` is the same data with whole prompts."""
        most, row = self.max_prompt_tokens, keyed.row
        try:
            problem = whole._built(keyed, tokenizer)
            length = 0 if most is None else await _num_tokens(problem)
        except DataError as error:
            remarks.bad(row.where, error)
            return None
        if most is not None and length > most:
            if self.on_long_prompt == "skip":
                how = f"with a prompt above {plural(most, 'token')} and skipped"
                remarks.add(row.where, how, str(length))
                return None
            cuts = self.on_long_prompt == "truncate_left"
            if cuts:
                problem = self._built(keyed, tokenizer)
            if not cuts or await _num_tokens(problem) > most:
                cut = " and cannot be cut to it" if cuts else ""
                raise row.error(
                    f"its prompt of {plural(length, 'token')} is above dataset.max_prompt_tokens="
                    f"{most}{cut}; dataset.on_long_prompt=skip leaves such rows out, and "
                    "truncate_left cuts the questions of a task"
                )
            remarks.add(row.where, f"with a prompt cut to {plural(most, 'token')}", str(length))
        for remark in self._remarks(row):
            remarks.add(row.where, remark)
        return problem

    def _remarks(self, row: Row) -> Iterable[str]:
        """What is to be said of rows such as this one; by default nothing."""
        return ()

    def _built(self, keyed: "_Keyed", tokenizer: Tokenizer) -> ProblemGroupBuilder:
        if keyed.error is not None:
            raise keyed.error
        contents = (digest_of(_all_of(keyed.row)), digest_of(keyed.key))
        return dataclasses.replace(self.problem(keyed.row, tokenizer), contents=contents)

    def _not_asked(
        self, builders: list[ProblemGroupBuilder], test_P: Sequence[ProblemGroupBuilder]
    ) -> list[ProblemGroupBuilder]:
        """Those that ask something else than all held-out ones."""
        if self.split_by is None:
            return builders
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


@chz.chz
class ScoredRows(RowDatasetBuilder):
    """Rows that are asked by a template, and whose answers are scored by a function."""

    prompt: str = chz.field(
        default="{question}", doc="what the model is asked: text with fields of the row in braces"
    )
    reward: Reward | RewardFunction = chz.field(
        meta_factory=REWARDS,
        doc="scores an answer: a shared reward, or my_module:function or "
        "path/to/script.py:function, which gets the text and the row",
    )
    gold: str | None = chz.field(
        default=None,
        doc="a row's perfect answer, as a template like prompt; its `answer`, if it has one, if "
        "unset",
    )
    full_reward: float | None = chz.field(
        default=1.0,
        doc="what a row's perfect answer must earn, where it has one; None: it is not scored",
    )

    @chz.validate
    def _template(self) -> None:
        check_template(self.prompt)
        check_template(self.gold or "", "gold")
        check_arity(self.reward)

    @override
    def check(self) -> None:
        super().check()
        if isinstance(self.reward, Reward):
            self.reward.check()


@chz.chz
class Task(ScoredRows):
    """Rows that are asked by a template and scored by a function."""

    prompt: str = chz.field(
        default="{question}",
        doc="what the model is asked: text with fields of the row in braces; a list of texts is "
        "shown as choices by letter, and a list of messages alone, as in {messages}, is a chat",
    )
    system: str = chz.field(default="", doc="system message before the prompt; empty: none")
    chat: bool = chz.field(
        default=True, doc="put the prompt into the tokenizer's chat template, if it has one"
    )
    prefill: str = chz.field(default="", doc=PREFILL_DOC)
    stray_tags: Literal["keep", "strip"] = chz.field(
        default="keep",
        doc="of <think> and <answer> tags in the fields that the prompt shows; keep: say so",
    )
    tag: str | None = chz.field(
        default=None, doc="field of the row under whose values metrics are reported as well"
    )

    @override
    def key(self, row: Row) -> str:
        return filled(self.prompt, row) if self.split_by is None else super().key(row)

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        shown = self._shown(row)
        if (chat := chat_of(self.prompt, shown)) is None:
            before, question = (), filled(self.prompt, with_choices(shown))
        else:
            *before, last = chat.messages
            question = last["content"]
            row = Row(row.where, {**chat.answer, **row.fields})
        is_told = any(each["role"] == "system" for each in before)
        tokens_T = render_prompt(
            tokenizer,
            question,
            chat=self.chat,
            system="" if is_told else self.system,
            prefill=self.prefill,
            most=self.max_prompt_tokens if self.on_long_prompt == "truncate_left" else None,
            before=before,
        )
        check_row(self.reward, row)
        reward = self.reward
        if isinstance(reward, Reward):
            reward = reward.after(prompt_end(tokenizer, tokens_T))
        return ProblemGroupBuilder(
            self.env_maker(Observation(tokens_T), reward, row),
            row.where,
            gold=gold_of(row, self.gold, self.full_reward),
            problem_tags=(str(row.value(self.tag)),) if self.tag else (),
        )

    @override
    def usual_stop(
        self, problems_P: Sequence[ProblemGroupBuilder], tokenizer: Tokenizer
    ) -> tuple[str, ...]:
        """A newline, where plain prompts have examples of one line; turns of a chat end anyway."""
        if self.chat and tokenizer.chat_template is not None:
            return ()
        return stop_of(problems_P, self.prompt + self.prefill, tokenizer)

    def env_maker(
        self, observation: Observation, reward: RewardFunction, row: Row
    ) -> Callable[[], ProblemEnv]:
        """Makes an Env of a row; importable, so that the problem pickles."""
        return functools.partial(TaskEnv, observation, reward, row, self.full_reward)

    def _shown(self, row: Row) -> Row:
        """The row as the prompt shows it."""
        if self.stray_tags == "keep":
            return row
        tagless = {name: without_tags(row.fields[name]) for name in self._tagged(row)}
        return Row(row.where, {**row.fields, **tagless})

    def _tagged(self, row: Row) -> Iterator[str]:
        """The fields of a row with tags in what the prompt shows of them."""
        for _, name, _, _ in Formatter().parse(self.prompt):
            value = row.fields.get(name or "")
            if value is not None and TAGS.search(str(value)):
                yield str(name)

    @override
    def _remarks(self, row: Row) -> Iterable[str]:
        if any(self._tagged(row)):
            strips = self.stray_tags == "strip"
            done = "taken out" if strips else "kept unless dataset.stray_tags=strip"
            yield f"with <think> or <answer> tags in the question, {done}"


async def _num_tokens(problem: ProblemGroupBuilder) -> int:
    length = await problem.prompt_length()
    if length is None:
        raise ConfigError(
            "dataset.max_prompt_tokens: the prompts of these problems are not known before a "
            "rollout; accepted: None"
        )
    return length


def gold_of(row: Row, template: str | None, full_reward: float | None) -> str | None:
    """The perfect answer that has to earn `full_reward`; None where there is nothing to check."""
    answer = row.fields.get("answer") if template is None else filled(template, row)
    checked = full_reward is not None and isinstance(answer, str | int | float)
    return str(answer) if checked else None


def check_row(reward: object, row: Row) -> None:
    """Refuse a row that lacks what a shared reward needs; what others need nobody knows.

    Raises:
        DataError: Names the row, and what is missing or wrong.
    """
    if isinstance(reward, Reward):
        try:
            reward.check_row(row.fields)
        except DataError as error:
            raise row.error(str(error)) from error


class TaskEnv(ProblemEnv):
    """One row: its prompt, and what scores the answer.

    With a `weight` the score counts with it, and is reported as the metric `task_reward`.
    """

    def __init__(
        self,
        observation: Observation,
        reward: RewardFunction,
        row: Row,
        full_reward: float | None,
        weight: float | None = None,
    ) -> None:
        super().__init__(observation)
        self._reward, self._row, self._weight = reward, row, weight
        if full_reward is not None:
            self.full_reward = full_reward
        self.gold_hint = (
            f" by reward {name_of(reward)!r}; if a perfect answer reads otherwise, say how, as in "
            'dataset.gold="\\\\boxed{{{answer}}}", and if there is none, dataset.full_reward=None'
        )

    @override
    async def graded(self, text: str) -> Grade:
        return await graded(self._reward, text, self._row.fields, self._row.where)

    @override
    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        if self._weight is None:
            return result
        metrics = {**result.metrics, "task_reward": result.reward}
        return dataclasses.replace(result, reward=self._weight * result.reward, metrics=metrics)


def _all_of(row: Row) -> str:
    return json.dumps(dict(row.fields), sort_keys=True, default=str)


@dataclasses.dataclass(frozen=True, slots=True)
class _Keyed:
    """A row, its key, and where it belongs.

    Attributes:
        place: in [0, 1), by the key, from the beginning of the share that is held out.
        error: why the row has no key of its own.
    """

    row: Row
    key: str
    place: float
    is_held_out: bool
    error: DataError | None = None
