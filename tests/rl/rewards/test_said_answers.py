"""Answers count in what is said: none that a model only thinks of earns anything."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from es_cookbook.plugins.math.reward import Math
from es_cookbook.plugins.objectives.length import Length
from es_cookbook.plugins.objectives.weighted_sum import WeightedSum
from es_cookbook.recipes.conciseness.reward import Conciseness
from es_cookbook.recipes.crossword.reward import Crossword
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.messages.thoughts import THOUGHTS
from es_cookbook.rl.rewards.base import REWARD_NAMES, Reward, reward_and_metrics
from es_cookbook.rl.rewards.matching import Choice, Exact, Number, Regex
from es_cookbook.rl.types import Action
from tests.chat_templates import CHATML, tokenizer_with
from tests.recipe_problems import write_rows

ROW = {"answer": "12", "choices": ["12", "deep"], "pattern": "^12$"}
REWARDS: Mapping[str, Reward] = {
    "exact": Exact(),
    "choice": Choice(),
    "number": Number(),
    "regex": Regex(),
    "math": Math(),
    "length": Length(strength=0.0),
    "conciseness": Conciseness(wrong=50.0),
    "sum": WeightedSum(rewards=("exact", "number"), weights=(0.5, 0.5)),
    "crossword": Crossword(form="exact"),
}
"""Of an answer; the rest look at the form alone, or ask others."""
IN_TAGS = ["12", r"\boxed{12}", "<answer>12</answer>"]


def test_every_reward_is_here() -> None:
    assert {*REWARDS, "format", "judge"} == {*REWARD_NAMES}


def earned(name: str, text: str) -> float:
    row = ROW
    if name == "crossword":
        row, text = {"answer": "twelve"}, text.replace("12", "twelve")
    if name == "conciseness":
        return reward_and_metrics(REWARDS[name](text, row))[1]["correct"]
    return reward_and_metrics(REWARDS[name](text, row))[0]


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("answer", IN_TAGS)
def test_an_answer_earns_nothing_where_it_is_thought_of(name: str, answer: str) -> None:
    if name == "math" and find_spec("math_verify") is None:
        pytest.skip("needs math-verify")
    if name == "crossword" and answer != IN_TAGS[2]:
        return
    assert earned(name, answer) == 1.0
    other = answer.replace("12", "77")
    for start, end in THOUGHTS.items():
        assert earned(name, f"{start}{other}{end}\n\n{answer}") == 1.0
        assert earned(name, f"{other}{end}{answer}") == 1.0
        for thought in (f"{start}{answer}{end}{other}", f"{answer}{end}{other}"):
            assert earned(name, thought) == 0.0
        for unfinished in (f"{start}{answer}", f"{other}{start}so {answer}"):
            assert earned(name, unfinished) == 0.0


@pytest.mark.parametrize(
    ("template", "prefill"), [(f"{CHATML}<think>\n", ""), (CHATML, "<think>\nI shall see: ")]
)
async def test_a_thought_that_the_prompt_has_opened_is_one_until_it_is_closed(
    tmp_path: Path, template: str, prefill: str
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "4 * 3?", "answer": "12"}])
    tokenizer = tokenizer_with(template)
    for name in ("number", "sum"):
        given = {"num_test": 0, "problems_per_generation": 1, "prefill": prefill}
        datasets = await Task(source=str(path), reward=REWARDS[name], **given)(tokenizer)
        await datasets.train.validate(4096)  # A row's answer is what is said.
        (problem,) = datasets.train.training_problems
        (env,) = (await problem.make_envs(1)).envs
        for text, reward in (
            (r"It may be \boxed{12}", 0.0),
            (r"\boxed{12}</think>", 0.0),
            (r"\boxed{77}</think>\boxed{12}", 1.0),
            (r"77 <think> 78 </think>12", 1.0),
        ):
            assert (await env.step(Action((), text, "stop"))).reward == reward
