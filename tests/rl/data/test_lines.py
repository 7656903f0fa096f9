"""Where answers to plain prompts end: with their line, where examples and gold answers say so."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.engines.base import SampleRequest
from es_cookbook.rl.data.lines import shows_one_line
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.problem_env import told_stop
from es_cookbook.rl.types import Datasets, EnvGroupBuilder, Observation, SamplingParams
from tests.chat_templates import CHATML, tokenizer_with
from tests.recipe_problems import write_rows

pytestmark = pytest.mark.anyio
EXAMPLES = "Q: one and one\nA: two\n\nQ: one and two\nA: three\n\nQ: {question}\nA:"
ROWS = [{"question": f"one and {word}", "answer": word} for word in "abcdefghijklmnopqrstuvwxyz"]


def exact(text: str, row: Mapping[str, Any]) -> float:
    return float(text == row["answer"])


async def built(
    path: Path, rows: object = ROWS, template: str | None = None, **given: Any
) -> Datasets:
    """A task's problems, of a tokenizer with this chat template or none."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = template
    settings: dict[str, Any] = {"prompt": EXAMPLES, "reward": exact, "problems_per_generation": 4}
    source = write_rows(path / "rows.jsonl", rows)
    return await Task(source=source, **(settings | given))(tokenizer)


async def seen(problem: EnvGroupBuilder) -> Observation:
    (env,) = (await problem.make_envs(1)).envs
    return await env.initial_observation()


async def stops(datasets: Datasets, stop: tuple[str, ...] | None) -> set[tuple[str, ...]]:
    """Where answers to training and held-out problems end, with this `sampling.stop`."""
    params = SamplingParams(stop=stop)
    problems_P = [*datasets.train.get_batch(0), *datasets.test_P]
    return {SampleRequest("centre", await seen(each), params).stop for each in problems_P}


async def test_examples_of_one_line_end_answers_with_their_line(tmp_path: Path) -> None:
    datasets = await built(tmp_path)
    assert await stops(datasets, None) == {("\n",)}
    assert await stops(datasets, ()) == {()}, "a Config that does not ask for it"
    assert await stops(datasets, ("#",)) == {("#",)}
    said = told_stop(SamplingParams(stop=None), datasets.train.get_batch(0))
    assert re.match("answers end at the first newline, .*; sampling.stop=", said)
    assert not told_stop(SamplingParams(stop=("#",)), datasets.train.get_batch(0))


@pytest.mark.parametrize(
    "given",
    [
        {"template": CHATML},
        {"prompt": "Q: {question}\nA:"},
        {"full_reward": None},
        {"gold": "{answer}\n{answer}", "full_reward": 0.0},
        {"prompt": EXAMPLES.replace("A: two", "A: I think\nit is two")},
    ],
)
async def test_nothing_ends_answers_that_may_have_several_lines(
    tmp_path: Path, given: Mapping[str, Any]
) -> None:
    datasets = await built(tmp_path, **given)
    assert await stops(datasets, None) == {()}
    assert not told_stop(SamplingParams(stop=None), datasets.train.get_batch(0))


async def test_a_chat_model_asked_without_its_template_has_no_other_end(tmp_path: Path) -> None:
    datasets = await built(tmp_path, template=CHATML)
    assert await stops(datasets, None) == {()}
    plain = await built(tmp_path, template=CHATML, chat=False)
    assert await stops(plain, None) == {("\n",)}


@pytest.mark.parametrize(
    ("prompt", "cue"),
    [
        ("sea -> mer\nsky -> ciel\ndog ->", " -> "),
        ("2 + 3 = 5\n4 + 4 =", " = "),
        ("Add.\n\nEnglish: sea\nFrench: mer\n\nEnglish: dog\nFrench:", "French:"),
        ("Q: 1\nA: 2\nQ: 3\nA:", ""),
    ],
)
def test_examples_are_found_by_what_the_question_ends_in(prompt: str, cue: str) -> None:
    assert shows_one_line(prompt, cue)


@pytest.mark.parametrize(
    ("prompt", "cue"),
    [
        ("Q: 1+1\nA:", "A:"),
        ("Q: 1+1\nA: First 1.\nThen 2.\n\nQ: 2+2\nA:", "A:"),
        ("Q: 1+1\nA: First 1.\n\nThen 2.\n\nQ: 2+2\nA:", "A:"),
        ("one and one is two\ntwo and two is", " is"),
        ("Say what it is.\nA dog\n", ""),
        ("", ""),
    ],
)
def test_what_is_not_certain_counts_for_nothing(prompt: str, cue: str) -> None:
    assert not shows_one_line(prompt, cue)
