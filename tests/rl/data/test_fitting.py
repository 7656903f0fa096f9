"""Rows of which no problem can be made, prompts that are too long, tags, and prefilled answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.plugins.objectives.length import Length
from es_cookbook.plugins.objectives.weighted_sum import WeightedSum
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.rewards.format import Format
from es_cookbook.rl.types import Datasets
from tests.chat_templates import CHATML, tokenizer_with
from tests.recipe_problems import write_rows
from tests.rl.data.test_row_dataset import lines

TOKENIZER = tokenizer_with(CHATML)
END = "<|im_end|>\n<|im_start|>assistant\n"


def score(text: str, row: Mapping[str, Any]) -> float:
    return float(text == row["answer"])


def rows(count: int) -> list[dict[str, object]]:
    return [{"question": f"what is {i} and 1?", "answer": str(i + 1)} for i in range(count)]


def task(path: str, **fields: Any) -> Task:
    given: dict[str, Any] = {"reward": score, "problems_per_generation": 1} | fields
    return Task(source=path, **given)


def asked(datasets: Datasets) -> list[str]:
    """The training prompts."""
    assert isinstance(datasets.train, ProblemDataset)
    envs = [builder.make_env() for builder in datasets.train.builders]
    return [str(TOKENIZER.decode(list(env.observation.tokens_T))) for env in envs]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("es_cookbook.rl.data.rows.say", found.append)
    return found


# --- rows of which no problem can be made --------------------------------------------------------


@pytest.mark.parametrize("num_test", [None, 9])
async def test_bad_rows_are_skipped_and_told_and_no_other_row_changes_sides(
    tmp_path: Path, said: list[str], num_test: int | None
) -> None:
    good = rows(40)
    whole = write_rows(tmp_path / "whole.jsonl", good)
    spoilt = list(good)
    # Bad by what is not part of the key, so that their own places stay as well.
    before = lines(await task(whole, split_by="answer", num_test=num_test)(TOKENIZER))
    bad = {before[0][0], before[0][3], before[0][7], before[0][9], before[1][1]}
    for line in bad:
        spoilt[line - 1] = {"answer": spoilt[line - 1]["answer"]}
    path = write_rows(tmp_path / "rows.jsonl", spoilt)
    with pytest.raises(DataError, match=r"line \d+: field 'question' is missing"):
        await task(path, split_by="answer", num_test=num_test)(TOKENIZER)
    assert not said
    skipping = task(path, split_by="answer", num_test=num_test, on_bad_row="skip")
    for _ in range(2):  # The same again, as a run that goes on has it.
        after = lines(await skipping(TOKENIZER))
        assert after == tuple([n for n in part if n not in bad] for part in before)
    first = ", ".join(
        f"line {n}: field 'question' is missing" for n in sorted(bad - {before[1][1]})[:3]
    )
    assert said[:2] == [
        f"{path}: of {len(before[1])} held-out rows, 1 unusable and skipped "
        f"(line {before[1][1]}: field 'question' is missing)",
        f"{path}: of {len(before[0])} training rows, 4 unusable and skipped ({first}, …)",
    ]


# --- prompts that are too long -------------------------------------------------------------------


@pytest.fixture
def long(tmp_path: Path) -> str:
    """Ten rows, of which the third asks much."""
    found = rows(10)
    found[2]["question"] = "".join(f"and {i} " for i in range(99)) + "is 7?"
    return write_rows(tmp_path / "rows.jsonl", found)


async def test_long_prompts_are_refused_or_skipped(long: str, said: list[str]) -> None:
    with pytest.raises(
        DataError,
        match=r"line 3: its prompt of \d+ tokens is above dataset.max_prompt_tokens=60; "
        r"dataset.on_long_prompt=skip leaves such rows out",
    ):
        # Not a bad row: that it is long has an option of its own.
        await task(long, num_test=0, max_prompt_tokens=60, on_bad_row="skip")(TOKENIZER)
    given = {"num_test": 0, "max_prompt_tokens": 60, "on_long_prompt": "skip"}
    train, _ = lines(await task(long, **given)(TOKENIZER))
    assert train == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    (sentence,) = said
    assert sentence.startswith(
        f"{long}: of 10 training rows, 1 with a prompt above 60 tokens and skipped (line 3: "
    )
    with pytest.raises(DataError, match="none is left"):
        await task(long, **given | {"max_prompt_tokens": 3})(TOKENIZER)


# --- tags and prefilled answers ------------------------------------------------------------------


async def test_stray_tags_of_rows_are_kept_or_stripped_and_those_of_the_template_stay(
    tmp_path: Path,
) -> None:
    found = rows(4)
    found[1]["question"] = "<th<think>ink>why?</think> <answer>7</answer>"
    found[1]["answer"] = "<answer>"
    given = {"num_test": 0, "full_reward": None, "chat": False}
    given["prompt"] = "{question} Use <think>."
    path = write_rows(tmp_path / "a.jsonl", found)
    kept = asked(await task(path, **given)(TOKENIZER))
    assert kept[1] == f"{found[1]['question']} Use <think>."
    datasets = await task(path, **given, stray_tags="strip")(TOKENIZER)
    assert asked(datasets) == [kept[0], " why? 7 Use <think>.", *kept[2:]]


async def graded(datasets: Datasets, text: str) -> float:
    assert isinstance(datasets.train, ProblemDataset)
    return (await datasets.train.builders[0].make_env().graded(text)).reward


async def test_answers_begin_with_the_prefill_and_rewards_see_that(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows(2))
    given = {"num_test": 0, "full_reward": None, "prefill": "<think>\n"}
    answer = "so</think><answer>1</answer>"
    rewards = (Format(), WeightedSum(rewards=("format",)), Length(of=Format(), strength=0.0))
    for reward in rewards:
        datasets = await task(path, **given, reward=reward)(TOKENIZER)
        assert asked(datasets)[0].endswith(f"{END}<think>\n")
        assert await graded(datasets, answer) == 1.0
        without = await task(path, num_test=0, full_reward=None, reward=reward)(TOKENIZER)
        assert await graded(without, answer) == 0.75
    # What is said goes before what is seen, also by a run from before it was seen.
    told = await task(path, **given, reward=Format(prompt_ends_in_think=False))(TOKENIZER)
    assert await graded(told, answer) == 0.75
    plain = asked(await task(path, **given, chat=False)(TOKENIZER))
    assert plain[0] == "what is 0 and 1?<think>\n"


async def test_a_template_that_ends_in_the_prefill_itself_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(f"{CHATML}<think>\n")
    path = write_rows(tmp_path / "rows.jsonl", rows(2))
    with pytest.raises(ConfigError, match=r"prefill='<think>': the model's chat template already"):
        await task(path, prefill="<think>", on_bad_row="skip")(tokenizer)
