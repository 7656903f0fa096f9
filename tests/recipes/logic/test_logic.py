"""Problems of a generator as a dataset: splits, prompts, grades, and batches by level."""

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.logic.dataset import LogicDatasetBuilder, LogicEnv
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action
from tests.recipe_problems import Builders
from tests.recipe_problems import build as built
from tools.small_model import build_tokenizer

pytest.importorskip("reasoning_gym")

ASCII = "".join(map(chr, range(33, 127))) + "ĠĊ"


async def build(**fields: object) -> tuple[ProblemDataset, Builders]:
    defaults = {"num_train": 40, "num_test": 10, "problems_per_generation": 4}
    dataset = LogicDatasetBuilder(**{**defaults, **fields})  # pyright: ignore
    return await built(dataset, build_tokenizer(ASCII), 2000)


def env(builder: ProblemGroupBuilder) -> LogicEnv:
    made = builder.make_env()
    assert isinstance(made, LogicEnv)
    return made


def questions(builders: list[ProblemGroupBuilder]) -> set[str]:
    return {env(builder).problem.question for builder in builders}


async def test_no_question_is_on_both_sides_where_there_are_few() -> None:
    options = ("min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1")  # 200 questions
    train, test = await build(options=options, num_train=140, num_test=20)
    later_train, later = await build(options=options, num_train=140, num_test=20, fold=1)
    trained = questions(list(train.builders))
    assert (len(trained), len(questions(test)), len(questions(later))) == (140, 20, 20)
    assert trained.isdisjoint(questions(test))
    assert questions(later).isdisjoint(questions(test) | questions(list(later_train.builders)))
    assert questions(list(later_train.builders)).isdisjoint(questions(test))
    with pytest.raises(DataError, match="chain_sum has only 200 different problems with these op"):
        await build(options=options, num_train=181, num_test=20)


async def test_compact_prompts_ask_alone_and_words_ask_for_tags() -> None:
    tokenizer = build_tokenizer(ASCII)
    train, _ = await build()
    own = env(train.builders[0])
    text = tokenizer.decode(list((await own.initial_observation()).tokens_T))
    assert text == own.problem.question.removeprefix(
        "State the final answer to the following arithmetic problem: "
    )
    assert (await own.step(Action((), own.problem.gold, "stop"))).reward == 1

    train, _ = await build(prompt="words", task="gcd")
    own = env(train.builders[0])
    text = tokenizer.decode(list((await own.initial_observation()).tokens_T))
    assert text.startswith("Find the Greatest Common Divisor (GCD) of these numbers: ")
    assert text.endswith("in <answer> </answer> tags.")
    for answer, reward, well_formed in (
        (f"<think>?</think><answer>{own.problem.gold}</answer>", 1, 1),
        (own.problem.gold, 0, 0),
        ("<answer>1001</answer>", 0, 1),
        ("<answer>one</answer>", 0, 0),
    ):
        step = await own.step(Action((), answer, "stop"))
        assert (step.reward, step.metrics["well_formed"]) == (reward, well_formed), answer


async def test_in_a_chat_the_last_number_counts_where_a_number_is_asked_for() -> None:
    train, _ = await build(prompt="chat", options=("min_terms=2", "max_terms=2"))
    own = env(next(each for each in train.builders if each.gold == "0"))
    for answer, reward, well_formed in (
        ("0", 1, 1),
        (" 0\n", 1, 1),
        ("4 - 4 = 0.", 1, 0),
        ("0, or 3", 0, 0),
        ("", 0, 0),
        ("none", 0, 0),
    ):
        step = await own.step(Action((), answer, "stop"))
        assert (step.reward, step.metrics["well_formed"]) == (reward, well_formed), answer
    train, _ = await build(prompt="chat", task="spell_backward")
    own = env(train.builders[0])
    assert own.problem.gold is not None
    for answer, reward in ((own.problem.gold, 1), (f"It is {own.problem.gold}", 0)):
        assert (await own.step(Action((), answer, "stop"))).reward == reward


async def test_a_part_of_the_score_is_paid_unless_only_right_answers_are() -> None:
    for reward, paid in (("score", 0.5), ("correct", 0.0)):
        train, _ = await build(task="spell_backward", reward=reward)
        own = env(train.builders[0])
        gold = own.problem.gold
        half = gold[: len(gold) // 2].ljust(len(gold), "?")
        step = await own.step(Action((), half, "stop"))
        assert step.reward == pytest.approx(paid, abs=0.2 if paid else 0)
        assert (step.metrics["correct"], step.metrics["score"] > 0) == (0, True)
