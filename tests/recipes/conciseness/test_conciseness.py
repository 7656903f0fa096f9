"""The recipe conciseness: its questions, its command line, KL that is only reported, and a run."""

import functools
import random
import re
from itertools import islice
from pathlib import Path

import chz
import pytest
from transformers import AutoModelForCausalLM

from es_cookbook.recipes.conciseness.reward import Conciseness
from es_cookbook.recipes.conciseness.train_cli import CLIConfig
from tests.recipe_problems import APART, check_second_row_is_named, parsed, short_run
from tools.bundled import conciseness as warm_start
from tools.rows.questions import generate_questions
from tools.small_model import EOS, build_tokenizer
from tools.warm_start import measured

pytestmark = pytest.mark.anyio


def test_kl_is_reported_and_a_weight_penalises_it() -> None:
    config = parsed(CLIConfig, "dataset.reward=conciseness", "dataset.reward.wrong=20")
    assert config.dataset.reward == Conciseness(wrong=20)
    assert config.kl is not None and config.kl.weight == 0
    penalised = parsed(CLIConfig, "kl.weight=0.5").kl
    assert penalised is not None
    assert (penalised.weight, penalised.problems_per_generation) == (0.5, 4)


def test_answers_follow_from_the_question() -> None:
    for made in islice(generate_questions(3), 60):
        words = re.findall("[a-z0-9]+", made.question)
        if made.kind == "backwards":
            assert made.answer == words[2][::-1]
        elif made.kind == "more":
            assert int(made.answer) == max(int(words[3]), int(words[5]))
        else:
            assert int(made.answer) == int(words[3]) + 1
        assert Conciseness()(made.sentence, {"answer": made.answer})[1]["correct"] == 1


def test_demonstrations_are_right_mostly_long_and_fit_the_budget() -> None:
    tokenizer = build_tokenizer(warm_start.CHARACTERS)
    rng = random.Random(0)
    metrics: list[float] = []
    for made in islice(generate_questions(0), 900):
        text = warm_start.demonstrate(made, rng)
        reward = Conciseness()(text, {"answer": made.answer})
        metrics.append(reward[1]["concise"])
        assert reward[1]["correct"] == 1
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text + EOS)) <= CLIConfig().sampling.max_tokens
    assert 0.15 < sum(metrics) / len(metrics) < 0.35


def test_a_run_of_two_generations_reports_length_and_kl(tmp_path: Path) -> None:
    options = *APART, "dataset.tag=kind", "kl.problems_per_generation=2"
    first, *_, last = short_run("conciseness", tmp_path / "run", *options)
    for name in ("correct", "concise", "length", "excess"):
        assert {f"env/all/{name}", f"test/env/all/{name}"} <= first.keys()
    assert any(key.startswith("test/env/after/") for key in first)
    assert first["env/kl/kl"] > 1e-3 > abs(first["test/env/kl/kl"]), "the centre is the base"
    assert last["test/env/kl/kl"] > 1e-4, "and has moved"


def test_the_bundled_model_knows_the_answers_and_talks_around_them() -> None:
    tokenizer = build_tokenizer(warm_start.CHARACTERS)
    model = AutoModelForCausalLM.from_pretrained(CLIConfig().model_name)
    means = measured(CLIConfig(), model, tokenizer, num_test=60)
    assert means["correct"] > 0.7
    assert means["concise"] < 0.5
    assert means["excess"] > 5


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "a?"}, "field 'answer' is missing; the row has: question"),
        ({"answer": "a"}, "field 'question' is missing; the row has: answer"),
        ({"question": "a?", "answer": ""}, "field 'answer' must be a text, a number or a list"),
    ],
)
async def test_a_bad_row_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, object], sentence: str
) -> None:
    good = {"question": "b?", "answer": ["yes", "certainly"]}
    dataset = functools.partial(chz.replace, CLIConfig().dataset)
    given = dataset, build_tokenizer(warm_start.CHARACTERS), tmp_path / "qa.jsonl"
    await check_second_row_is_named(*given, [good, row], sentence)
