"""No recipe holds out what it trains on, and their splits are what they were."""

import functools
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import chz
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_config
from es_cookbook.plugins.mixtures.mixture import Mixture
from es_cookbook.population.results import problem_names
from es_cookbook.recipes.tic_tac_toe.dataset import TicTacToeDatasetBuilder
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.messages.chat import ChatOptions
from es_cookbook.rl.problem_env import TrainedOn
from es_cookbook.rl.types import Datasets, EnvGroupBuilder, RLDatasetBuilder
from tools.small_model import build_tokenizer

SIZES = [{"num_train": 40, "num_test": 5}, {"num_train": 200, "num_test": 40}]
FEW = {"num_train": 12, "num_test": 3}
LETTERS = "".join(map(chr, range(33, 127))) + "ĠĊ"
SLOW = {"code", "rush_hour"}
"""Their problems take a while to make, or their solutions to run."""


@functools.cache
def tokenizer_of(recipe: str) -> PreTrainedTokenizerBase:
    model = recipe_config(recipe)().model_name
    is_here = Path(model).is_dir()
    return AutoTokenizer.from_pretrained(model) if is_here else build_tokenizer(LETTERS)


def of_size(dataset: RLDatasetBuilder, seed: int, size: Mapping[str, int]) -> RLDatasetBuilder:
    """With these fields, where it has them; a mixture's parts as well."""
    given: dict[str, Any] = {"seed": seed, **size}
    if isinstance(dataset, Mixture):
        parts = {name: getattr(dataset, name) for name in chz.chz_fields(dataset)}
        given |= {
            name: of_size(part, seed, size)
            for name, part in parts.items()
            if isinstance(part, RLDatasetBuilder)
        }
    known = chz.chz_fields(dataset)
    given["problems_per_generation"] = 4
    return chz.replace(dataset, **{k: v for k, v in given.items() if k in known})


def asked_otherwise(dataset: RLDatasetBuilder) -> RLDatasetBuilder:
    """With another wording, where it has several."""
    if isinstance(dataset, Task):
        return chz.replace(dataset, prompt="1{question}", full_reward=None)
    field = chz.chz_fields(dataset).get("prompt")
    if field is None or isinstance(dataset, TicTacToeDatasetBuilder):
        return dataset  # Its bundled model cannot tell openings in words apart.
    others = [name for name in get_args(field.x_type) if name != dataset.prompt]  # pyright: ignore
    fields: dict[str, Any] = {"prompt": others[0]}
    if isinstance(chat := getattr(dataset, "chat", None), ChatOptions):
        fields["chat"] = chz.replace(chat, tools_in="system")
    return chz.replace(dataset, **fields)


def overlap(datasets: Datasets) -> int | None:
    known = TrainedOn.of(problem.digests for problem in datasets.train.training_problems)
    assert known is not None and len(datasets.test_P)
    return known.overlap(problem.digests for problem in datasets.test_P)


def digests(problems_P: Sequence[EnvGroupBuilder]) -> list[tuple[int, ...]]:
    return [problem.digests for problem in problems_P]


@pytest.mark.daily
@pytest.mark.parametrize("recipe", RECIPES)
async def test_no_held_out_problem_is_trained_on_whatever_seed_and_number(recipe: str) -> None:
    dataset, tokenizer = recipe_config(recipe)().dataset, tokenizer_of(recipe)
    for size in [FEW] if recipe in SLOW else SIZES:
        first, second, again = [await of_size(dataset, n, size)(tokenizer) for n in (0, 1, 1)]
        assert overlap(first) == overlap(second) == 0
        assert digests(first.test_P) == digests(second.test_P), "the same for every seed"
        batches = [digests(of.train.get_batch(3)) for of in (first, second, again)]
        assert batches[0] != batches[1] == batches[2]
    if recipe not in SLOW:
        await first.train.validate(512)  # Gold answers earn everything.
        assert pickle.loads(pickle.dumps(first.test_P[0])).digests == first.test_P[0].digests
    # Trained on with one seed and prompt, and measured with others.
    trained = await of_size(dataset, 1, FEW)(tokenizer)
    measured = await asked_otherwise(of_size(dataset, 0, {**FEW, "num_test": 4}))(tokenizer)
    assert overlap(Datasets(trained.train, measured.test_P)) == 0
    same = await asked_otherwise(of_size(dataset, 1, FEW))(tokenizer)
    assert (
        overlap(Datasets(trained.train, same.train.training_problems))
        == len(same.train.training_problems)
        >= 12
    )
    if recipe not in SLOW:
        await same.train.validate(4096)


@pytest.mark.parametrize("recipe", ["countdown", "crossword", "math", "rush_hour"])
async def test_gold_answers_earn_everything_where_the_prompt_opens_the_thought(recipe: str) -> None:
    style = {"countdown": "paper", "math": "tags"}.get(recipe, "words")
    tokenizer = build_tokenizer(LETTERS)
    tokenizer.chat_template = "{{ messages[0].content }}<think>"
    dataset = of_size(recipe_config(recipe)().dataset, 0, FEW)
    train = (await chz.replace(dataset, prompt=style)(tokenizer)).train  # pyright: ignore
    await train.validate(4096)
    assert not any(str(getattr(p, "gold", "")).startswith("<think>") for p in train.get_batch(0))


BEFORE = {
    "alignment": "9a9bd1e24fcab183",
    "conciseness": "9a9bd1e24fcab183",
    "crossword": "d28ba7ea6fdfc946",
    "pairwise": "e45129c10568f977",
}
"""Of the rows that each trains on, holds out, and has in its fourth batch, when these were split by
their prompts."""


@pytest.mark.daily
@pytest.mark.parametrize("recipe", BEFORE)
async def test_recipes_of_rows_hold_out_what_they_did_now_whatever_the_prompt(recipe: str) -> None:
    dataset, tokenizer = recipe_config(recipe)().dataset, tokenizer_of(recipe)
    datasets = await dataset(tokenizer)
    await datasets.train.validate(512)  # All that is bundled.
    assert isinstance(datasets.train, ProblemDataset)
    parts = [datasets.train.builders, datasets.test_P, datasets.train.get_batch(3)]
    lines = [[name.rpartition(" ")[2] for name in problem_names(part)] for part in parts]
    text = " ".join([*lines[0], "|", *lines[1], "|", *lines[2]])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == BEFORE[recipe]
    if recipe != "crossword":
        other = await asked_otherwise(dataset)(tokenizer)
        assert problem_names(other.test_P) == problem_names(datasets.test_P)


GENERATED = {
    "arithmetic": "62269250e28255c5",
    "calculator": "cda4b24a0d5f4b43",
    "chat": "2fabad22c6f586d4",
    "knows": "0771ff7d93f2d52d",
    "code": "e1aec9494c42df5e",
    "countdown": "0769c4d55200d7eb",
    "guess_number": "5a436b7a50241d16",
    "logic": "dfe625e6e60a6b12",
    "markovian": "6cbeb3db9d472053",
    "math": "e753d69e02deb1a1",
    "mixture": "0b2aa5756b7e8bba",
    "rush_hour": "b31a044e8c62860f",
    "search": "498dec4b740a7b5e",
    "tic_tac_toe": "3fc3ea847e3b39fa",
}
"""Digests of the first problems of each recipe that generates them, as recorded runs have them."""


@pytest.mark.parametrize("recipe", GENERATED)
async def test_generated_problems_are_those_of_recorded_runs(recipe: str) -> None:
    if recipe == "logic":
        pytest.importorskip("reasoning_gym")
    datasets = await of_size(recipe_config(recipe)().dataset, 0, FEW)(tokenizer_of(recipe))
    text = repr(digests([*datasets.train.training_problems, *datasets.test_P]))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GENERATED[recipe]
