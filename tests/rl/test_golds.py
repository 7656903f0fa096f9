"""Gold answers go the model's way: what it cannot say, or nobody sees, is refused before a run."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from typing_extensions import override

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.references import resolve
from es_cookbook.rl import golds
from es_cookbook.rl.data.problem_dataset import ChangedProblem
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.golds import check_attempted, validate
from es_cookbook.rl.messages.chat import Chat
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.message_env import MessageEnv, Reply
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.base import REWARD_NAMES
from es_cookbook.rl.rewards.format import Format, Tags
from es_cookbook.rl.rewards.length import Length
from es_cookbook.rl.rewards.matching import Exact
from es_cookbook.rl.rewards.weighted_sum import WeightedSum
from es_cookbook.rl.types import Datasets, EnvGroup, SamplingParams, Tokenizer
from tests.byte_tokenizers import byte_tokenizer
from tests.chat_templates import CHATML
from tests.recipe_problems import write_rows

pytestmark = pytest.mark.anyio
ANSWER, THINK = ("<answer>", "</answer>"), ("<think>", "</think>")
TAGGED = "<think>so</think><answer>{answer}</answer>"
ROW = {
    "question": "Which?",
    "answer": "7",
    "choices": ["6", "7"],
    "pattern": "^7$",
    "clue": "Two fours less one (5)",
}
GOLDS: Mapping[str, str] = {
    "exact": "7",
    "choice": "7",
    "number": "7",
    "regex": "7",
    "math": "7",
    "format": "7",
    "length": "7",
    "sum": "7",
    "crossword": "seven",
}
"""What each reward of a text finds between tags."""
WITHOUT_TAGS = {"judge", "conciseness"}


async def checked(
    rows: str, tokenizer: Tokenizer, stop: tuple[str, ...] | None = (), **fields: Any
) -> Datasets:
    settings = {"source": rows, "num_test": 0, "problems_per_generation": 1, "chat": False}
    datasets = await Task(**settings | fields)(tokenizer)
    await validate(datasets, tokenizer, 4096, SamplingParams(stop=stop))
    return datasets


@pytest.mark.parametrize("name", [each for each in REWARD_NAMES if each not in WITHOUT_TAGS])
async def test_tags_of_a_shared_reward_that_are_special_tokens_are_refused(
    name: str, tmp_path: Path
) -> None:
    """With the same tags as ordinary tokens, or as text, the same rows are right."""
    reward = resolve(REWARD_NAMES[name])()
    gold = TAGGED.format(answer=GOLDS[name])
    row = {**ROW, "answer": "seven"} if name == "crossword" else ROW
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    task = {"reward": reward, "gold": gold, "full_reward": reward_of(reward, gold, row)}
    for tokenizer in (byte_tokenizer(), byte_tokenizer(THINK, ordinary=ANSWER)):
        if name != "format" or tokenizer.get_added_vocab().keys().isdisjoint(THINK):
            await checked(rows, tokenizer, **task)
    with pytest.raises(ConfigError, match="<answer>, </answer> are special tokens of the model's"):
        await checked(rows, byte_tokenizer(ANSWER), **task)
    # Nor is it found out only where rows have a perfect answer.
    with pytest.raises(ConfigError, match=f"reward '{name}' looks for tags"):
        await checked(rows, byte_tokenizer(ANSWER), **{**task, "full_reward": None})


def reward_of(reward: Any, text: str, row: Mapping[str, object]) -> float:
    found = reward(text, row)
    return float(found[0] if isinstance(found, tuple) else found)


def test_of_all_shared_rewards_it_is_known_whether_they_look_for_tags() -> None:
    assert {*GOLDS, *WITHOUT_TAGS} == set(REWARD_NAMES)
    for name in WITHOUT_TAGS - {"judge"}:
        assert tags_of(name, TAGGED) == set()
    for name in GOLDS:
        assert set(ANSWER) <= tags_of(name, TAGGED)
        assert bool(tags_of(name, "What?")) == (name in ("format", "crossword"))


def tags_of(name: str, asked: str) -> set[str]:
    parts = resolve(REWARD_NAMES[name])().parts({})
    return {tag for _, part in parts for tag in part.tags(asked)}


@pytest.mark.parametrize("name", ["exact", "choice", "number", "regex", "math", "length", "sum"])
async def test_tags_that_nobody_asks_for_may_be_special_tokens(name: str, tmp_path: Path) -> None:
    """A reward that takes answers with and without tags then reads the text."""
    reward, tokenizer = resolve(REWARD_NAMES[name])(), byte_tokenizer(ANSWER)
    rows = write_rows(tmp_path / "rows.jsonl", [ROW])
    task = {"reward": reward, "full_reward": reward_of(reward, "7", ROW), "gold": "7"}
    await checked(rows, tokenizer, **task)
    for asking in (
        {"prompt": "{question} Say <answer>1</answer> or <answer>2</answer>."},
        {"system": "Answer in <answer> tags."},
        {"prefill": "<answer>"},
    ):
        with pytest.raises(ConfigError, match="<answer>, </answer> are special tokens"):
            await checked(rows, tokenizer, **task | asking)
    tagged = (
        {"answer": "<answer>7</answer>"} if name != "choice" else {"choices": ["7", "<answer>"]}
    )
    for row in ({"question": "In <answer> tags: which?"}, tagged):
        asking = write_rows(tmp_path / "asking.jsonl", [ROW, {**ROW, **row}])
        of_row = {**task, "gold": None, "prompt": "{question} {choices}"}
        with pytest.raises(DataError, match=r"asking.jsonl, line 2: reward .* looks for tags"):
            await checked(asking, tokenizer, **of_row)
        found = await checked(asking, tokenizer, **of_row, on_bad_row="skip")
        assert len(found.train.training_problems) == 1


async def test_the_option_that_does_without_tags_is_named_wherever_it_is(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [ROW])
    exact, format_too = Exact(extract="answer"), WeightedSum(rewards=("number", "format"))
    in_sum = WeightedSum(rewards=("number", "exact"), exact=exact)
    for reward, option in (
        (exact, "reward.extract=text: none"),
        (in_sum, "reward.exact.extract=text: none"),
        (Length(of=exact), "reward.of.extract=text: none"),
        (Length(of=in_sum), "reward.of.exact.extract=text: none"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"({option})")):
            await checked(rows, byte_tokenizer(ANSWER), reward=reward, full_reward=None)
    with pytest.raises(ConfigError, match=r"ask for other tags$"):
        await checked(rows, byte_tokenizer(ANSWER), reward=format_too, full_reward=None)
    # A row names its rewards itself.
    own = write_rows(tmp_path / "own.jsonl", [{**ROW, "reward": "exact"}])
    with pytest.raises(DataError, match=r"line 1: reward 'sum' .*reward.exact.extract=text"):
        reward = WeightedSum(rewards=("number",), exact=exact)
        await checked(own, byte_tokenizer(ANSWER), reward=reward, full_reward=None)


@pytest.mark.parametrize(
    ("normalizer", "tags", "made"),
    [
        (
            normalizers.Lowercase(),
            Tags(start="<Answer>", end="</Answer>"),
            "'<answer>' of '<Answer>'",
        ),
        (normalizers.Replace("[", ""), Tags(start="[A]", end="[/A]"), r"'A\]' of '\[A\]'"),
        (normalizers.NFKC(), Tags(start="\uff1ca>", end="</a>"), "'<a>' of '\uff1ca>'"),
    ],
)
async def test_tags_that_a_tokenizer_changes_are_refused(
    normalizer: Any, tags: Tags, made: str, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [ROW])
    task = {"reward": Format(answer=tags), "full_reward": None}
    await checked(rows, byte_tokenizer(), **task)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    with pytest.raises(ConfigError, match=f"looks for tags: the model's tokenizer makes {made}"):
        await checked(rows, tokenizer, **task)


async def test_of_answers_in_a_list_one_must_be_said_and_the_others_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*answers: list[str]) -> str:
        return write_rows(tmp_path / "rows.jsonl", [{**ROW, "answer": each} for each in answers])

    told: list[str] = []
    monkeypatch.setattr(golds, "say", told.append)
    tokenizer, exact = byte_tokenizer(("<b>", "<c>")), {"reward": Exact()}
    await checked(rows(["7", "seven"], ["8"]), tokenizer, **exact)
    await checked(rows(["<b>7", "7"]), tokenizer, **exact)  # What is left of one is the other.
    assert not told
    await checked(rows(["7"], ["<b>x", "7", "<c>y"], ["8", "<b>"]), tokenizer, **exact)
    assert told == [
        "the model cannot say 3 answers that 2 problems would accept, beside others that it can "
        f"(the first: {tmp_path}/rows.jsonl, line 2)"
    ]
    with pytest.raises(DataError, match="line 2: the model cannot say its own solution '<b>7': "):
        await checked(rows(["7"], ["<b>7", "<c>7"]), tokenizer, **exact)
    found = await checked(rows(["7"], ["<b>7", "<c>"]), tokenizer, **exact, on_bad_row="skip")
    assert len(found.train.training_problems) == 1
    # None earns the reward, said or not; what a function makes of a list, it knows alone.
    with pytest.raises(
        DataError, match="none of its own solutions earns 2; the best, '7', earns 1"
    ):
        await checked(rows(["7", "8"]), tokenizer, **exact, full_reward=2.0)
    await checked(rows(["<b>7", "<c>7"]), tokenizer, reward=the_same)
    await checked(rows(["<b>7", "<c>7"]), tokenizer, **exact, full_reward=None)


def between_results(text: str, row: Mapping[str, object]) -> float:
    return float(f"<result>{row['answer']}</result>" in text)


def the_same(text: str, row: Mapping[str, object]) -> float:
    return float(text == row["answer"])


async def test_a_tag_that_a_users_function_needs_is_refused_where_it_is_special(
    tmp_path: Path,
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [ROW])
    task = {"reward": between_results, "gold": "So <result>{answer}</result>"}
    await checked(rows, byte_tokenizer(ordinary=("<result>",)), **task)
    with pytest.raises(DataError) as caught:
        await checked(rows, byte_tokenizer(("<result>", "<other>")), **task)
    assert str(caught.value).startswith(
        f"{rows}, line 1: the model cannot say its own solution 'So <result>7</result>': <result> "
        "is a special token of the model's tokenizer, and left out of the text of answers; make it "
        "ordinary there"
    )
    assert str(caught.value).endswith("what is left, 'So 7</result>', earns 0 of 1")


async def test_letters_that_a_tokenizer_composes_are_refused_where_a_reward_cares(
    tmp_path: Path,
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{**ROW, "answer": "cafe\u0301"}])
    await checked(rows, byte_tokenizer(), reward=the_same)
    await checked(rows, byte_tokenizer(composes=True), reward=resolve(REWARD_NAMES["exact"])())
    with pytest.raises(DataError, match="does not keep all its characters; what is left, 'café'"):
        await checked(rows, byte_tokenizer(composes=True), reward=the_same)


async def test_rows_whose_answers_cannot_be_said_are_skipped_with_other_bad_ones(
    tmp_path: Path,
) -> None:
    sayable = [{**ROW, "question": f"{i}?", "answer": str(i)} for i in range(3)]
    rows = write_rows(tmp_path / "rows.jsonl", [*sayable, {**ROW, "answer": "cafe\u0301"}])
    how = {"reward": the_same, "on_bad_row": "skip"}
    assert len((await checked(rows, byte_tokenizer(), **how)).train) == 4
    assert len((await checked(rows, byte_tokenizer(composes=True), **how)).train) == 3


async def test_a_stop_text_in_a_perfect_answer_is_refused_where_the_reward_is_lost(
    tmp_path: Path,
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{**ROW, "answer": "3.14"}])
    await checked(rows, byte_tokenizer(), stop=(), reward=the_same)
    await checked(rows, byte_tokenizer(), stop=("\n", "5"), reward=the_same)
    said = r"sampling.stop ends it before its end \(\[\] ends .*\); what is left, '3', earns 0 of 1"
    with pytest.raises(DataError, match=said):
        await checked(rows, byte_tokenizer(), stop=(".",), reward=the_same)
    await checked(rows, byte_tokenizer(), stop=(".",), reward=the_same, full_reward=None)


async def test_held_out_problems_and_those_that_others_change_are_checked_as_well(
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer(("<result>",))
    rows = write_rows(tmp_path / "rows.jsonl", [ROW])
    good = await checked(rows, tokenizer, reward=the_same)
    bad = await Task(
        source=rows,
        num_test=0,
        problems_per_generation=1,
        chat=False,
        reward=between_results,
        gold="<result>{answer}</result>",
    )(tokenizer)
    (problem,) = bad.train.training_problems
    for held_out in (problem, Changed(problem)):
        with pytest.raises(DataError, match="cannot say its own solution"):
            await validate(Datasets(good.train, [held_out]), tokenizer, 64, SamplingParams())
        with pytest.raises(DataError, match="cannot say its own solution"):
            await check_attempted([held_out], tokenizer, 64, SamplingParams())


async def test_a_gold_answer_of_several_turns_is_said_in_tokens() -> None:
    def problem(word: str) -> ProblemGroupBuilder:
        return ProblemGroupBuilder(functools.partial(Echo, chat, word), word, gold=word)

    tokenizer = byte_tokenizer(("<result>",))
    tokenizer.chat_template = CHATML
    chat = Chat(tokenizer)
    await problem("<other>").check(4096)
    said = "^<result>: its own solution earns 0 of 1: '<result>': <result> is a special token of"
    with pytest.raises(DataError, match=said):
        await problem("<result>").check(4096)


class Changed(ChangedProblem):
    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return await self.problem.make_envs(num_envs)


class Echo(MessageEnv):
    """Wants a word said."""

    def __init__(self, chat: Chat, word: str) -> None:
        super().__init__(chat)
        self.word = word

    @override
    async def initial_messages(self) -> Sequence[Message]:
        return [Message("user", "Say it.")]

    @override
    async def reply(self, message: Message) -> Reply:
        return Reply(float(message.content == self.word), done=True)
