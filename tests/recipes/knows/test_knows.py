"""The recipe that asks twice: contexts apart, rewards where both agree, and d′."""

import math
from pathlib import Path

import pytest

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.knows.d_prime import Config, d_prime, main
from es_cookbook.recipes.knows.dataset import KnowsDatasetBuilder
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.rollouts import run_rollout
from tests.recipe_problems import build, short_run
from tools.small_model import build_model, build_tokenizer, save

TOKENIZER = build_tokenizer("".join(map(chr, range(33, 127))) + "ĠĊ")


@pytest.mark.parametrize(
    ("is_right", "reply", "reward", "yes"),
    [
        (True, "Yes, I can.", 1.0, 1.0),
        (True, "no", 0.0, 0.0),
        (True, "I can", 0.0, 0.0),
        (False, "No.", 0.25, 0.0),
        (False, "yes", 0.0, 1.0),
        (False, "Not sure, no", 0.0, 0.0),
    ],
)
async def test_a_rollout_is_paid_where_claim_and_answer_agree(
    is_right: bool, reply: str, reward: float, yes: float
) -> None:
    dataset = KnowsDatasetBuilder(admitted=0.25, num_train=16, num_test=6)
    train, _ = await build(dataset, TOKENIZER)  # which grades gold answers
    for problem in train.builders:
        gold = str(problem.gold[0]) if problem.gold else ""
        script = Script([f"It is {gold}." if is_right else "0", reply], TOKENIZER)
        rollout = await run_rollout((await problem.make_envs(1)).envs[0], script)
        metrics = rollout.transitions[-1].metrics
        assert rollout.reward == reward
        assert (metrics["correct"], metrics["yes"]) == (is_right, yes)
        assert metrics[f"yes_if_{'right' if is_right else 'wrong'}"] == yes
        direct, meta = (str(TOKENIZER.decode([*seen.tokens_T])) for seen in script.seen)
        assert problem.name in direct and problem.name in meta
        assert direct not in meta.partition(problem.name)[0] and "It is" not in meta


def test_a_second_prompt_without_the_question_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"meta must have \{\}"):
        KnowsDatasetBuilder(meta="Do you know?")


def test_d_prime_is_what_tables_of_the_normal_distribution_say() -> None:
    assert d_prime(5, 10, 10, 20)[0] == 0  # Half and half.
    found, error = d_prime(8, 10, 2, 10)  # z(8.5 / 11) = 0.7480 on both sides.
    assert found == pytest.approx(1.496, abs=1e-3)
    # 0.7727 · 0.2273 / 11 over the squared density 0.3016 at 0.748, twice.
    assert error == pytest.approx(0.5926, abs=1e-3)
    extreme = d_prime(10, 10, 0, 10)[0]
    assert math.isfinite(extreme) and extreme == pytest.approx(2 * 1.6906, abs=1e-3)


def test_a_run_of_two_generations_and_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(build_model(TOKENIZER, 0, width=32, depth=2), TOKENIZER, tmp_path / "model")
    given = "optimizer.sigma=0.1", "optimizer.learning_rate=0.1"
    rows = short_run("knows", tmp_path / "run", f"model_name={tmp_path / 'model'}", *given)
    assert {f"test/env/sums/{name}" for name in ("agrees", "yes_if_wrong")} <= rows[-1].keys()
    run_cli(main, Config, [f"log_path={tmp_path / 'run'}"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3 * sum("test/env/all/yes" in row for row in rows)
    assert lines[-1].split() == ["2", "sums", "0.0%", "0.0%", "0.0%", "-"]
