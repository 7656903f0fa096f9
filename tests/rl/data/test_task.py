"""Rows, a template and a function are a task; what does not fit is refused in a sentence."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chz
import pytest

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.task import Reward, Task
from es_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.rewards.matching import Number
from es_cookbook.rl.types import Action, Datasets
from tests.chat_templates import CHATML, tokenizer_with
from tests.recipe_problems import write_rows
from tests.tiny_models import character_tokenizer

TOKENIZER = character_tokenizer()


def exact(text: str, row: Mapping[str, Any]) -> float:
    return float(text == row["answer"])


def sums(count: int) -> list[dict[str, object]]:
    return [
        {"question": f"{i}:1=", "answer": str(i + 1), "size": len(str(i))} for i in range(count)
    ]


async def built(path: str, reward: Reward = exact, **fields: Any) -> Datasets:
    settings: dict[str, Any] = {"source": path, "problems_per_generation": 1} | fields
    return await Task(reward=reward, **settings)(TOKENIZER)


def problems(datasets: Datasets) -> list[ProblemGroupBuilder]:
    assert isinstance(datasets.train, ProblemDataset)
    return list(datasets.train.builders)


def asked(builders: Sequence[Any]) -> list[str]:
    tokens = [builder.make_env().observation.tokens_T for builder in builders]
    return [str(TOKENIZER.decode(list(tokens_T))) for tokens_T in tokens]


async def test_rows_are_asked_scored_and_checked(tmp_path: Path) -> None:
    datasets = await built(write_rows(tmp_path / "rows.jsonl", sums(40)), prompt="0:{question}")
    train = problems(datasets)
    assert all(question.startswith("0:") for question in asked(train))
    await datasets.train.validate(64)
    env = pickle.loads(pickle.dumps(train[0])).make_env()
    assert isinstance(env, ProblemEnv)
    gold = train[0].gold
    assert gold is not None
    result = await env.step(Action((), gold, "stop"))
    assert result.done and result.reward == 1.0 and (await env.graded("0")).reward == 0.0
    with pytest.raises(DataError, match=r"its prompt of \d+ tokens leaves no room"):
        await datasets.train.validate(4)


async def test_the_shortest_of_a_list_is_the_gold_answer_of_shared_rewards(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"question": "1:1=", "answer": ["2.0", "2"]}])
    for reward, gold in ((Number(), "2"), (exact, None)):
        assert [each.gold for each in problems(await built(rows, reward, num_test=0))] == [gold]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "<think>And 4?"},
]


async def test_a_chat_is_asked_up_to_its_last_question(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    answered = [*CHAT, {"role": "assistant", "content": "7"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": answered}] * 5)
    bare = write_rows(tmp_path / "bare.jsonl", [{"messages": CHAT}])
    settings: dict[str, Any] = {"num_test": 0, "prompt": "{messages}", "system": "Not this."}
    settings["problems_per_generation"] = 1
    task = Task(source=path, reward=Number(), **settings)
    (first, *_) = problems(await task(tokenizer))
    assert first.gold == "7", "the answer at the end"
    unanswered = Task(source=bare, reward=exact, **settings)
    both = [*problems(await task(tokenizer)), *problems(await unanswered(tokenizer))]
    asked = {
        str(tokenizer.decode(list(builder.make_env().observation.tokens_T)))  # pyright: ignore
        for builder in both
    }
    assert asked == {
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\n<think>And 4?<|im_end|>\n"
        "<|im_start|>assistant\n"
    }
    (builder, *_) = problems(await chz.replace(task, stray_tags="strip")(tokenizer))
    assert "<think>" not in str(tokenizer.decode(list(builder.make_env().observation.tokens_T)))  # pyright: ignore
    with pytest.raises(ConfigError, match="needs chat=True and a model's chat template"):
        await task(TOKENIZER)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([*CHAT, CHAT[0]], "field 'messages' must end with a message of the user or of a tool"),
        ([CHAT[0]], "field 'messages' must end with a message of the user"),
    ],
)
async def test_what_is_no_chat_is_refused(tmp_path: Path, messages: object, said: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
    with pytest.raises(DataError, match=f"line 1: {said}"):
        await built(path, Number(), prompt="{messages}", num_test=0)


async def test_a_reward_may_wait_and_measure_and_rows_have_tags(tmp_path: Path) -> None:
    async def score(text: str, row: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        return float(text == row["answer"]), {"length": len(text)}

    datasets = await built(write_rows(tmp_path / "rows.jsonl", sums(12)), score, tag="size")
    await datasets.train.validate(64)
    (builder,) = datasets.train.get_batch(0)
    assert isinstance(builder, ProblemGroupBuilder) and builder.tags in (("1",), ("2",))
    env = builder.make_env()
    result = await env.step(Action((), "12", "stop"))
    assert result.metrics == {"length": 2.0}
    assert isinstance(env, ProblemEnv)
    with pytest.raises(EnvError, match="TaskEnv has no `grade`: await `graded`"):
        env.grade("12")


async def test_an_answer_that_does_not_earn_the_full_reward_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sums(3))
    sentence = (
        r"line 1: its own solution earns 10 of 1: '1' by reward '.*<lambda>'; if a perfect answer "
        r'reads otherwise, say how, as in dataset.gold="\\\\boxed\{\{\{answer\}\}\}", and if there '
        "is none, dataset.full_reward=None$"
    )
    with pytest.raises(DataError, match=sentence):
        await (await built(path, lambda *_: 10.0, num_test=0)).train.validate(64)
    await (await built(path, lambda *_: 10.0, full_reward=10.0)).train.validate(64)
    await (await built(path, lambda *_: 10.0, full_reward=None)).train.validate(64)


@pytest.mark.parametrize(
    "prompt", ["{", "{}", "{a.b}", "{a[0]}", "{a!r}", "{a:>9}", "{__class__.x}"]
)
def test_a_template_names_fields_and_nothing_else(prompt: str) -> None:
    with pytest.raises(ConfigError, match=r"write {{ for a brace"):
        Task(source="rows.jsonl", prompt=prompt, reward=exact)


async def test_rows_that_lack_what_is_asked_and_sets_of_none_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sums(3))
    with pytest.raises(DataError, match=r"line 1: field 'qestion' is missing; did you mean 'quest"):
        await built(path, prompt="{qestion}")
    with pytest.raises(
        DataError, match=r"line \d: field 'kind' is missing.*the row has: question, an"
    ):
        await built(path, tag="kind")
    with pytest.raises(DataError, match="there are no rows to train on"):
        await built(write_rows(tmp_path / "none.jsonl", []))
    with pytest.raises(DataError, match="train on: all are held out, or equal to rows that are"):
        await built(write_rows(tmp_path / "same.jsonl", [*sums(1)] * 8), num_test=2)
    with pytest.raises(
        ConfigError,
        match=r"dataset\.problems_per_generation must be from 1 to \d, the number of tr",
    ):
        await built(path, problems_per_generation=9)
    with pytest.raises(ConfigError, match=r"fold=4 is past the end: .* there are folds 0 to 3"):
        Task(source="a", reward=exact, test_fraction=0.25, fold=4)
    task = Task(source=str(tmp_path / "nowhere.jsonl"), reward=exact)
    with pytest.raises(DataError, match="there is no such file"):
        task.check()


def one_argument(text: str) -> float:
    return 1.0


def test_a_reward_that_cannot_be_called_as_one_is_refused_at_once() -> None:
    said = r"^reward: one_argument\(text.* reward\(text, row\): too"
    with pytest.raises(ConfigError, match=said):
        Task(source="rows.jsonl", reward=one_argument)
    Task(source="rows.jsonl", reward=lambda text, row, more=0: 1.0)


async def test_a_prompt_shows_training_rows_with_their_answers(tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = tokenizer_with(CHATML)

    def texts(builders: Sequence[Any]) -> list[str]:
        tokens = [builder.make_env().observation.tokens_T for builder in builders]
        return [str(tokenizer.decode(list(tokens_T))) for tokens_T in tokens]

    task = Task(
        source=path, reward=exact, problems_per_generation=1, prompt="Q: {question}\nA:", chat=False
    )
    bare, shown = await task(tokenizer), await chz.replace(task, examples=2)(tokenizer)
    questions, asked_after = texts(problems(bare)), texts(problems(shown))
    pairs = zip(questions, problems(bare), strict=True)
    first = [f"{question} {problem.gold}\n\n" for question, problem in pairs]
    assert first[0] == "Q: 0+1\nA: 1\n\n"
    assert texts(shown.test_P) == ["".join(first[:2]) + each for each in texts(bare.test_P)]
    # The order of the questions is the same, and none shows its own answer.
    for number, (text, question) in enumerate(zip(asked_after, questions, strict=True)):
        others = [each for at, each in enumerate(first[:3]) if at != number][:2]
        assert text == "".join(others) + question
    assert not any(question in text for question in texts(bare.test_P) for text in asked_after)
    # A line each: an answer ends with its line.
    assert {problem.usual_stop for problem in problems(shown)} == {("\n",)}
