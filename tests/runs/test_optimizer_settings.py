"""A recipe's settings reach whichever optimizer is chosen, in every command, or it is said."""

import contextlib
import functools
import itertools
import math
from typing import Any, cast

import chz
import numpy as np
import pytest
import torch

from es_cookbook import ES, Config, FullRank, SamplingParams
from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_config
from es_cookbook.cli.train import TrainConfig
from es_cookbook.common.cli import mistakes_exit
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.options import OptionError, built
from es_cookbook.common.trust import resolve
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.fitness import FITNESS_NAMES, Fitness
from es_cookbook.evolution.optimizers.base import AUTO, OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, ParameterInfo
from es_cookbook.plugins.objectives.length import LengthPenalty
from es_cookbook.plugins.objectives.weighted import Gdpo, RewardSchedule
from es_cookbook.population.step_sizes import DRIFT, options_of
from es_cookbook.recipes.knows.objective import Balanced
from es_cookbook.rl.objectives import OBJECTIVE_NAMES, MaxOfK, Mean, Objective, Outcomes, PassAtK
from tests.families import sampled
from tests.optimizers import NEEDED
from tests.tiny_run import BASE, tiny

COMMANDS = ("train", *RECIPES)
OPTIMIZERS = {
    name: cast(type[OptimizerBuilder], resolve(of)) for name, of in OPTIMIZER_NAMES.items()
}
ROWS = {"dataset.source": "rows.jsonl", "dataset.prompt": "{q}", "dataset.reward": "exact"}
STEPS = ("sigma", "learning_rate", "max_speed", "population_size")


@functools.cache
def config_class(command: str) -> type[Config]:
    return TrainConfig if command == "train" else recipe_config(command)


def config_of(command: str, **options: str) -> Config:
    needed = {"model_name": str(BASE), "log_path": "run", **(ROWS if command == "train" else {})}
    with mistakes_exit():
        return built(config_class(command), {**needed, **options})


def steps_of(optimizer: OptimizerBuilder) -> dict[str, object]:
    return {name: getattr(optimizer, name) for name in STEPS if name in chz.chz_fields(optimizer)}


@pytest.mark.parametrize(("command", "name"), sampled(itertools.product(COMMANDS, OPTIMIZERS), 30))
def test_what_a_command_sets_of_es_is_carried_over_or_found(command: str, name: str) -> None:
    es = steps_of(config_of(command).optimizer)
    space = {"search_space": NEEDED[name]} if name in NEEDED else {}
    found = config_of(command, optimizer=name, **space).optimizer
    names = chz.chz_fields(config_class(command))["optimizer"].meta_factory
    carried = OPTIMIZERS[name].carried(es)
    own = names.settings_of(object, name)  # Without what is carried over.
    for step, value in steps_of(found).items():
        if step in carried:
            assert value in (own.get(step), carried[step]), step
    assert AUTO not in es.values() or name in NEEDED or AUTO in steps_of(found).values()


BITS = {"embedding": None, "linear": None, "scales": 4, "codes": 4}
OF_MODEL = [
    ParameterInfo(f"{n}.{kind}", (8, 8), kind, bits) for n in (0, 1) for kind, bits in BITS.items()
]
ODD: tuple[dict[str, str], ...] = (
    *({}, {"search_space.partitions": "2"}, {"max_staleness": "1"}),
    *({"search_space.sigma_patterns": "*", "search_space.sigma_factors": "0.5"},),
    *({"optimizer.sharpness": "0.1", "num_generations": "3"}, {"optimizer.population_size": "1"}),
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_config_accepts_can_be_built_when_the_model_is_loaded(name: str) -> None:
    for space, odd in itertools.product(SEARCH_SPACE_NAMES, ODD):
        options = {"optimizer": name, "search_space": space, **odd}
        try:
            config = built(config_class("countdown"), options)
            over = config.search_space(OF_MODEL)
        except (ConfigError, OptionError):
            continue
        config.new_optimizer(over, dict.fromkeys(config.optimizer.unsettled, 0.1))


FITNESS = {name: cast(type[Fitness], resolve(of)) for name, of in FITNESS_NAMES.items()}
FOUND = {name: of for name, of in OPTIMIZERS.items() if "learning_rate" in of.finds}
SPACE = FullRank()([ParameterInfo("a.weight", (64, 48), "linear")])


OBJECTIVES: dict[str, Objective] = {
    "mean": Mean(),
    "pass_at_k": PassAtK(k=2),
    "max_of_k": MaxOfK(k=2),
    "length_penalty": LengthPenalty(limit=20),
    "gdpo": Gdpo(weights=(1.0, 0.5)),
    "reward_schedule": RewardSchedule(over=20),
    "balanced": Balanced(),
}
NESTED = [
    LengthPenalty(inner=inner, limit=limit)
    for inner in (Mean(), MaxOfK(k=2), Gdpo(rewards=("reward",)))
    for limit in (None, 20)
]
ROUNDS = 40


def drift(name: str, fitness: str, objective: str, genomes: int) -> float:
    """How far luck moves the centre, as a multiple of what is promised.

    An attempt is right or wrong by luck, of problems that differ much in difficulty.
    """
    rng, sigma, attempts = np.random.default_rng(7), 0.01, 4
    builder = FOUND[name](sigma=AUTO, learning_rate=AUTO, population_size=genomes)
    if "max_speed" in chz.chz_fields(builder):
        builder = chz.replace(builder, max_speed=AUTO)
    found = options_of(builder, sigma, ROUNDS)
    space = resolve(SEARCH_SPACE_NAMES[NEEDED.get(name, "low_rank")])()
    config = tiny("run", optimizer=builder, fitness=FITNESS[fitness](), search_space=space)
    config = chz.replace(config, num_generations=ROUNDS)
    optimizer = config.new_optimizer(SPACE, found)
    assert optimizer.divides_fitness == (fitness != "zscore")
    centre = Centre({"a.weight": torch.zeros(64, 48)}, SPACE, num_threads=1)
    for generation in range(ROUNDS):
        genomes_G = optimizer.ask(generation)
        difficulty_P = rng.beta(0.5, 1.0, 16)
        shape = 16, genomes, attempts if objective in ("pass_at_k", "max_of_k") else 1
        right, formed = ((difficulty_P > rng.random(shape).T).T.astype(float) for _ in range(2))
        tokens = rng.integers(1, 100, shape).astype(float)
        metrics = {"correct": right, "format": formed}
        rewards = formed if objective == "balanced" else right  # Of right answers, all would be 1.
        outcomes = Outcomes(rewards, tokens, metrics, generation)
        scores_P_G = OBJECTIVES[objective](outcomes)
        step = optimizer.tell(generation, genomes_G, None, config.fitness(scores_P_G))
        centre.apply(step)
    return math.sqrt(float(centre.weights["a.weight"].square().mean())) / (DRIFT * sigma)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("name", "fitness", "objective", "genomes"),
    sampled(itertools.product(FOUND, FITNESS, OBJECTIVE_NAMES, (16, 40)), 60),
)
def test_the_centre_drifts_as_far_as_auto_promises(
    name: str, fitness: str, objective: str, genomes: int
) -> None:
    assert 0.8 <= drift(name, fitness, objective, genomes) <= 1.25


@pytest.mark.parametrize("objective", [*(OBJECTIVES[name] for name in OBJECTIVE_NAMES), *NESTED])
def test_an_objective_that_compares_genomes_says_so_and_takes_no_batch_per_pair(
    objective: Objective,
) -> None:
    rng, shape = np.random.default_rng(3), (6, 8, 4)
    rewards, formed = rng.integers(0, 2, (2, *shape)).astype(float)
    metrics = {"correct": rewards, "format": formed}
    outcomes = Outcomes(rewards, rng.integers(1, 100, shape).astype(float), metrics)

    def first(outcomes: Outcomes) -> list[float]:
        return objective(outcomes)[:, 0].tolist()

    def halved(array: Any) -> Any:
        return np.concatenate([array[:, :2], array[:, :2]], axis=1)

    others = Outcomes(
        halved(rewards),
        halved(outcomes.tokens_P_G_K),
        {name: halved(each) for name, each in metrics.items()},
    )
    assert (first(outcomes) != first(others)) == objective.compares_genomes
    options: dict[str, Any] = {"objective": objective, "attempts": 4, "batch_per_pair": True}
    options["sampling"] = SamplingParams(temperature=1.0)
    refused = pytest.raises(ConfigError, match="compares all genomes at a problem")
    with refused if objective.compares_genomes else contextlib.nullcontext():
        tiny("run", optimizer=ES(population_size=8), **options)
