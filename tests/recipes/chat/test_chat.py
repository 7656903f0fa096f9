"""The tasks of a chat model: what is asked, held out and graded."""

from itertools import islice

import pytest

from es_cookbook.recipes.chat.dataset import ChatDatasetBuilder
from es_cookbook.recipes.chat.problems import KINDS, Problem, Task, generate_problems, grade
from tests.recipe_problems import build
from tools.small_model import build_tokenizer

TASKS: tuple[Task, ...] = (
    *("sums", "differences", "chain_sum"),
    *("constraints", "conciseness", "extraction"),
)
KEYS = {"name_count_price", "name_city_item", "item_name_price", "city_name"}
ASCII = "".join(map(chr, range(33, 127))) + "ĠĊ"


@pytest.mark.parametrize("task", TASKS)
async def test_gold_answers_earn_everything_and_no_test_problem_is_trained_on(task: Task) -> None:
    if task == "chain_sum":
        pytest.importorskip("reasoning_gym")
    dataset = ChatDatasetBuilder(task=task, num_train=300, num_test=60)
    train, test_P = await build(dataset, build_tokenizer(ASCII))  # which grades gold answers
    asked = {builder.name for builder in train.builders}
    held_out = {builder.name for builder in test_P}
    assert len(asked) >= 250 and len(held_out) >= 35 and asked.isdisjoint(held_out)
    tags = {tag for builder in test_P for tag in builder.tags}
    assert tags == (KEYS if task == "extraction" else set())
    other = [p.question for p in islice(generate_problems(task, 1, "development", 1), 20)]
    assert held_out.isdisjoint(other) and asked.isdisjoint(other)
    for problem in islice(generate_problems(task, 0, "test", 0), 50):
        found = grade(task, f" {problem.gold}\n", problem)
        assert found.reward == KINDS[task].full_reward
        assert found.metrics["correct"] == found.metrics["well_formed"] == 1
        nothing = grade(task, "", problem)
        assert nothing.reward < KINDS[task].full_reward and nothing.metrics["correct"] == 0


@pytest.mark.parametrize(
    ("task", "wanted", "text", "correct", "well_formed"),
    [
        ("sums", (), "70", 1, 1),
        ("sums", (), "52 + 18 = 71", 0, 1),
        ("sums", (), "52 + 19 = 70", 1, 0),
        ("sums", (), "70 or 71", 0, 0),
        ("conciseness", (), "70.", 1, 1),
        ("conciseness", (), "It is 70", 0, 0),
        ("conciseness", (), "71", 0, 1),
        ("extraction", (("city", "Oslo"),), '```json\n{"city": "Oslo"}\n```', 1, 1),
        ("extraction", (("city", "Oslo"),), '{"city": "Oslo", "more": 1}', 0, 0),
        ("extraction", (("city", "Oslo"),), '{"city": ["Oslo"]}', 0, 1),
        ("extraction", (("city", "Oslo"),), "[" * 3000, 0, 0),
    ],
)
def test_what_is_right_is_told_from_its_form(
    task: Task, wanted: tuple[tuple[str, str], ...], text: str, correct: int, well_formed: int
) -> None:
    gold = "52 + 18 = 70." if task == "sums" else "70"
    metrics = grade(task, text, Problem("?", gold, wanted)).metrics
    assert (metrics["correct"], metrics["well_formed"]) == (correct, well_formed)


@pytest.mark.parametrize(
    ("name", "value", "holds", "fails"),
    [
        ("about", "sea", "The Sea is old.", "The season is old."),
        ("sentences", "2", "It is. Is it?", "It costs 3.50 now."),
        ("words", "3", "It's a sea!", "It is a sea!"),
        ("commas", "", "no, none".replace(",", ""), "no, none"),
        ("lower", "", "all of it", "All of it"),
        ("first", "once", '"Once" upon', "At once"),
        ("last", "home", "We go home.", "home we go"),
        ("without", "water", "watery", "Water!"),
        ("keys", "size, title", '{"title": 1, "size": 2}', '{"title": 1}'),
    ],
)
def test_a_constraint_holds_or_not(name: str, value: str, holds: str, fails: str) -> None:
    wanted = (name, value)
    problem = Problem("?", "", (wanted,) if name == "about" else (("about", "x"), wanted))
    for text, expected in ((holds, 1), (fails, 0)):
        metrics = grade("constraints", text, problem).metrics
        assert metrics[name] == expected
        assert metrics["well_formed"] == (1 if name == "about" else expected)


def test_rewards_are_shares_or_minus_the_excess() -> None:
    two = Problem("?", "", (("about", "sea"), ("commas", "")))
    assert [grade("constraints", text, two).reward for text in ("a sea", "a, sea", "a, b")] == [
        1.0,
        0.5,
        0.0,
    ]
    assert grade("conciseness", "It is 70", Problem("?", "70")).reward == -6
    sums = [grade("sums", text, Problem("?", "70")).reward for text in ("70", "71", "170", "So")]
    assert sums == [1.0, 0.25, pytest.approx(1 / 3), 0.0]
    fields = Problem("?", "", (("a", "1"), ("b", "2")))
    assert grade("extraction", '{"a": 1, "b": 3}', fields).reward == 3 / 4
    assert grade("extraction", "a: 1", fields).reward == 0
