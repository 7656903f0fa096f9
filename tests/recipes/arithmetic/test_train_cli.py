"""The command line of the recipe, a run of two generations, and the bundled model."""

import random
from itertools import islice

import pytest
from transformers import AutoModelForCausalLM

from es_cookbook.baselines.small_model import build_tokenizer
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.arithmetic import warm_start
from es_cookbook.recipes.arithmetic.dataset import ArithmeticDatasetBuilder
from es_cookbook.recipes.arithmetic.problems import Problem, generate_problems
from es_cookbook.recipes.arithmetic.train_cli import RECIPE, CLIConfig
from es_cookbook.recipes.warm_start import measured
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder


def parsed(*options: str) -> CLIConfig:
    seen: list[CLIConfig] = []
    run_cli(seen.append, CLIConfig, options)
    return seen[0]


def names(builders: object) -> set[str]:
    assert isinstance(builders, (list, tuple))
    assert all(isinstance(builder, ProblemGroupBuilder) for builder in builders)
    return {builder.name for builder in builders}


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", ["compact", "words"])
async def test_every_gold_answer_earns_everything(prompt: str) -> None:
    builder = ArithmeticDatasetBuilder(num_train=60, num_test=30, prompt=prompt)  # pyright: ignore[reportArgumentType]
    built = await builder(build_tokenizer(warm_start.CHARACTERS))
    await built.train.validate(64)
    assert isinstance(built.train, ProblemDataset)
    assert (len(built.train), len(built.test_P)) == (60, 30)


@pytest.mark.anyio
async def test_held_out_problems_are_the_same_for_every_seed_and_of_their_own_fold() -> None:
    tokenizer = build_tokenizer(warm_start.CHARACTERS)
    given = {"num_train": 32, "num_test": 30}
    one, other, development = [
        names((await ArithmeticDatasetBuilder(**given, **fields)(tokenizer)).test_P)
        for fields in ({"seed": 1}, {"seed": 2}, {"fold": 1})
    ]
    assert one == other
    assert not one & development


@pytest.mark.anyio
async def test_too_few_problems_for_a_batch_are_refused() -> None:
    builder = ArithmeticDatasetBuilder(num_digits=1, problems_per_generation=80)
    with pytest.raises(
        ConfigError, match=r"must be from 1 to \d+, the number of training problems"
    ):
        await builder(build_tokenizer(warm_start.CHARACTERS))


@pytest.mark.anyio
async def test_a_tokenizer_that_knows_no_character_is_refused() -> None:
    with pytest.raises(DataError, match=r"generated problem \d+\+\d+=: .*no tokens"):
        await ArithmeticDatasetBuilder(num_train=40)(build_tokenizer("xyz"))


@pytest.mark.parametrize("option", ["num_terms=1", "num_digits=0", "num_digits=31", "num_train=0"])
def test_fields_that_cannot_work_are_named(option: str) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(ConfigError, match=name):
        ArithmeticDatasetBuilder(**{name: int(value)})  # pyright: ignore[reportArgumentType]


def test_careless_demonstrations_forget_more_often_in_large_sums() -> None:
    rng = random.Random(0)

    def share(*terms: int, careless: float = 0.5) -> float:
        forgot = [warm_start.forgets_to_carry(Problem(terms), careless, rng) for _ in range(600)]
        return sum(forgot) / len(forgot)

    assert share(110, 120) < 0.4 < 0.6 < share(980, 970)
    assert (share(980, 970, careless=0), share(110, 120, careless=1)) == (0, 1)
    every = list(islice(generate_problems(0, "train"), 2000))
    forgot = [warm_start.forgets_to_carry(problem, 0.5, rng) for problem in every]
    assert sum(forgot) / 2000 == pytest.approx(0.5, abs=0.04)


def test_the_bundled_model_answers_in_good_form_and_half_of_it_is_right() -> None:
    """The point of the warm start; the README's numbers come from the command it names."""
    tokenizer = build_tokenizer(warm_start.CHARACTERS)
    model = AutoModelForCausalLM.from_pretrained(RECIPE.model)
    found = measured(RECIPE, model, tokenizer, samples=2, num_test=100)
    assert found["well_formed"] >= 0.98
    assert 0.3 < found["correct"] < 0.6
    assert found["forgot_carry"] > 0.3
    assert found["sampled_correct"] < found["pass_at_2"] <= 2 * found["sampled_correct"]
