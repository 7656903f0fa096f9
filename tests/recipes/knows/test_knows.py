"""The recipe that asks twice: contexts apart, rewards of claims, genomes compared, and d′."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.knows.d_prime import Config, d_prime, main
from es_cookbook.recipes.knows.dataset import KnowsDatasetBuilder, grade_claim
from es_cookbook.recipes.knows.objective import Balanced
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.objectives import Outcomes
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.runs.directory.directory import METRICS
from tests.recipe_problems import build, short_run
from tools.small_model import build_model, build_tokenizer, save

TOKENIZER = build_tokenizer("".join(map(chr, range(33, 127))) + "ĠĊ")


class Claiming(Script):
    """Gives one answer, and would say yes with a probability of 0.6, and no of 0.2."""

    def __init__(self, text: str) -> None:
        super().__init__(text, TOKENIZER)
        self.asked: list[str] = []

    @override
    async def logprobs(self, prompt_T: Sequence[int], continuation_T: Sequence[int]) -> list[float]:
        self.asked.append(str(TOKENIZER.decode([*prompt_T])))
        is_yes = str(TOKENIZER.decode([*continuation_T])) == "Yes"
        return [math.log(0.6 if is_yes else 0.2), *[0.0] * (len(continuation_T) - 1)]


@pytest.mark.parametrize(("is_right", "reward"), [(True, math.log2(1.2)), (False, math.log2(0.4))])
async def test_a_claim_is_read_in_a_context_of_its_own(is_right: bool, reward: float) -> None:
    train, test_P = await build(KnowsDatasetBuilder(num_train=16, num_test=6), TOKENIZER)
    for problem in (*train.builders, *test_P):
        env = (await problem.make_envs(1)).envs[0]
        policy = Claiming(f"It is {env.gold}." if is_right else "0")  # pyright: ignore
        rollout = await run_rollout(env, policy)
        metrics = rollout.transitions[-1].metrics
        assert rollout.reward == pytest.approx(reward)
        assert (metrics["correct"], metrics["yes"], metrics["well_formed"]) == (is_right, 1.0, 1.0)
        assert metrics[f"yes_if_{'right' if is_right else 'wrong'}"] == 1.0
        direct = str(TOKENIZER.decode([*policy.seen[0].tokens_T]))
        (meta,) = set(policy.asked)
        assert problem.name in direct and problem.name in meta
        assert direct not in meta.partition(problem.name)[0] and "It is" not in meta


def scored(right_P: Sequence[int], claims_P: Sequence[float]) -> float:
    """The score of a genome with these answers and these probabilities of yes."""
    pairs = zip(right_P, claims_P, strict=True)
    rewards_P = [grade_claim(bool(r), math.log(c), math.log(1 - c))[0] for r, c in pairs]

    def of_one_genome(values_P: Sequence[float]) -> NDArray[np.float64]:
        return np.array(values_P, dtype=np.float64)[:, None, None]

    rewards, correct = of_one_genome(rewards_P), of_one_genome(right_P)
    scores_P_G = Balanced()(Outcomes(rewards, np.ones_like(rewards), {"correct": correct}))
    return float(scores_P_G.mean())


@pytest.mark.parametrize("right_P", [(1, 0, 0, 0, 0, 0, 0, 0), (1, 1, 1, 0), (1, 0)])
def test_constant_claims_earn_nothing_whatever_the_share_of_right_answers(
    right_P: Sequence[int],
) -> None:
    n = len(right_P)
    assert scored(right_P, [0.5] * n) == 0
    for claim in (0.9, 0.99, 0.999):
        always_yes, always_no = scored(right_P, [claim] * n), scored(right_P, [1 - claim] * n)
        assert always_yes == pytest.approx(always_no)
        assert always_yes < 0
    knows = [0.9 if right else 0.1 for right in right_P]
    assert scored(right_P, knows) == pytest.approx(1 + math.log2(0.9))
    assert scored(right_P, [1 - claim for claim in knows]) == pytest.approx(1 + math.log2(0.1))


def test_lost_rollouts_do_not_count_and_answers_all_alike_give_no_score() -> None:
    nan = math.nan
    rewards_P_G = np.array([[1.0, 1.0], [0.5, 0.5], [-1.0, nan], [nan, nan]])
    correct_P_G = np.array([[1.0, 1.0], [1.0, 1.0], [0.0, nan], [nan, nan]])
    given = rewards_P_G[..., None], np.ones((4, 2, 1)), {"correct": correct_P_G[..., None]}
    first_P, second_P = Balanced()(Outcomes(*given)).T
    assert np.nanmean(first_P) == pytest.approx((0.75 - 1.0) / 2)
    assert np.isnan(second_P).all()


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
    generation, kind, right, agrees, yes, told = lines[-1].split()
    assert (generation, kind, right, told) == ("2", "sums", "0.0%", "-")
    assert float(agrees[:-1]) + float(yes[:-1]) == 100, "all claims are yes or no"
    metrics = tmp_path / "run" / METRICS
    metrics.write_text(re.sub(r'"[^"]*/sums/[^"]*": [^,]*, ', "", metrics.read_text()))
    run_cli(main, Config, [f"log_path={tmp_path / 'run'}"])
    kinds = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert set(kinds) == {"all", "facts"}, "no held-out question was a sum"
