"""Expressions and a pocket calculator: the tool, rewards, the dataset and a short run."""

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.recipes.calculator import warm_start
from es_cookbook.recipes.calculator.dataset import CalculatorDatasetBuilder
from es_cookbook.recipes.calculator.env import (
    CalculatorEnv,
    Problem,
    calculate,
    chat_of,
    generate_problems,
)
from es_cookbook.recipes.calculator.train_cli import BUNDLED_MODEL, CLIConfig, main
from es_cookbook.recipes.chat_warm_start import Config, chat_tokenizer
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.messages.script import Script
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Metrics, Trajectory
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.chat_templates import CHATML, LLAMA, tokenizer_with

pytestmark = pytest.mark.anyio

TOKENIZER = chat_tokenizer(warm_start.CHARACTERS, warm_start.CALL)
CHAT = Chat(TOKENIZER, ChatOptions(max_turns=4, tools_in="nowhere"), [calculate])
PROBLEM = Problem((12, 34, 5), "+*")


async def played(texts: Sequence[str]) -> Trajectory:
    return await run_rollout(CalculatorEnv(CHAT, PROBLEM, "compact"), Script(texts, TOKENIZER))


def ends(trajectory: Trajectory) -> Metrics:
    return trajectory.transitions[-1].metrics


async def test_the_product_first_is_right_and_left_to_right_is_not() -> None:
    right = await played(chat_of(PROBLEM, "right", "hermes"))
    assert right.transitions[0].action.text.count('"34*5"') == 1
    assert [str(TOKENIZER.decode(new_T)) for _, new_T in right.seen] == ["12+34*5=", "170", "182"]
    assert right.reward == 1.0
    left = await played(chat_of(PROBLEM, "left", "hermes"))
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


async def test_who_never_answers_runs_out_of_turns() -> None:
    trajectory = await played(["<tool_call>1</tool_call>"] * 9)
    assert (trajectory.reward, ends(trajectory)["turn_limit"]) == (0.0, 1.0)
    assert ends(trajectory)["correct"] == 0.0


def test_gold_answers_are_pythons() -> None:
    for fold in ("train", "development", "test"):
        for problem in islice(generate_problems(0, fold), 200):
            assert problem.answer == str(eval(problem.expression))


async def test_every_gold_chat_earns_everything() -> None:
    small = CalculatorDatasetBuilder(num_train=40, num_test=20)
    await (await small(TOKENIZER)).train.validate(512)
    for template in (CHATML, LLAMA):
        builder = CalculatorDatasetBuilder(num_train=40, num_test=20, prompt="words")
        await (await builder(tokenizer_with(template))).train.validate(4096)


def test_careless_demonstrations_are_more_frequent_with_a_large_first_number() -> None:
    rng = random.Random(0)

    def careless(a: int) -> float:
        problem = Problem((a, 34, 5), "+*")
        left = chat_of(problem, "left", "hermes")
        return sum(warm_start.texts(problem, rng) == left for _ in range(400)) / 400

    assert careless(15) < 0.35 < 0.65 < careless(95)


def test_the_config_round_trips_through_json() -> None:
    seen: list[CLIConfig] = []
    run_cli(seen.append, CLIConfig, ["dataset.prompt=words", "dataset.chat.tools_in=system"])
    assert config_from_json(config_to_json(seen[0])) == seen[0]


def test_a_run_of_two_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        *("num_generations=2", "optimizer.population_size=4", "dataset.problems_per_generation=2"),
        *("dataset.num_train=6", "dataset.num_test=3", "trackers=JsonlTrackerBuilder"),
        f"log_path={tmp_path / 'run'}",
    )
    run_cli(main, CLIConfig, options)
    assert capsys.readouterr().out.startswith("test/env/all/correct ")
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert {"test/env/all/tool_calls", "test/env/all/well_formed"} <= rows[-1].keys()
    assert rows[-1]["test/env/all/well_formed"] > 0.5


def test_the_warm_start_writes_a_model_that_talks(tmp_path: Path) -> None:
    warm_start.main(Config(output=str(tmp_path / "model"), chats=4, steps=2, batch_size=4))
    for model in (tmp_path / "model", BUNDLED_MODEL):
        tokenizer = AutoTokenizer.from_pretrained(model)
        assert tokenizer.chat_template == TOKENIZER.chat_template
        assert len(tokenizer) == len(TOKENIZER)


def test_bundled_files_fit_in_the_package() -> None:
    assert sum(path.stat().st_size for path in BUNDLED_MODEL.iterdir()) <= 4_000_000
