"""Expressions and a pocket calculator: the tool, rewards and the dataset."""

from collections.abc import Sequence
from itertools import islice

from es_cookbook.recipes.calculator import dataset
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Metrics, Trajectory
from tests.chat_templates import CHATML, LLAMA, tokenizer_with
from tools.bundled import calculator as warm_start
from tools.warm_start import chat_tokenizer

TOKENIZER = chat_tokenizer(warm_start.CHARACTERS, warm_start.CALL)
CHAT = Chat(TOKENIZER, ChatOptions(max_turns=4, tools_in="nowhere"), [dataset.calculate])
PROBLEM = dataset.Problem((12, 34, 5), "+*")


async def played(texts: Sequence[str]) -> Trajectory:
    return await run_rollout(
        dataset.CalculatorEnv(CHAT, PROBLEM, "compact"), Script(texts, TOKENIZER)
    )


def ends(trajectory: Trajectory) -> Metrics:
    return trajectory.transitions[-1].metrics


async def test_the_product_first_is_right_and_left_to_right_is_not() -> None:
    right = await played(dataset.chat_of(PROBLEM, "right", "hermes"))
    assert right.transitions[0].action.text.count('"34*5"') == 1
    assert [str(TOKENIZER.decode(new_T)) for _, new_T in right.seen] == ["12+34*5=", "170", "182"]
    assert right.reward == 1.0
    left = await played(dataset.chat_of(PROBLEM, "left", "hermes"))
    assert left.reward == 0.0
    assert (ends(left)["left_to_right"], ends(left)["well_formed"]) == (1.0, 1.0)
    assert (ends(right)["left_to_right"], ends(right)["tool_calls"]) == (0.0, 2.0)


async def test_the_calculator_refuses_more_than_one_operation_and_says_so() -> None:
    call = warm_start.CALL[0] + "12+34*5" + warm_start.CALL[1]
    trajectory = await played([call, "182"])
    told = str(TOKENIZER.decode(trajectory.seen[1][1]))
    assert told == "12*3"  # All that the small model can read of the sentence.
    assert (trajectory.reward, ends(trajectory)["tool_errors"]) == (1.0, 1.0)
    assert ends(trajectory)["well_formed"] == 0.0


def test_gold_answers_are_pythons() -> None:
    for fold in ("train", "development", "test"):
        for problem in islice(dataset.generate_problems(0, fold), 200):
            assert problem.answer == str(eval(problem.expression))


async def test_every_gold_chat_in_words_earns_everything() -> None:
    for template in (CHATML, LLAMA):
        builder = dataset.CalculatorDatasetBuilder(num_train=40, num_test=20, prompt="words")
        await (await builder(tokenizer_with(template))).train.validate(4096)
