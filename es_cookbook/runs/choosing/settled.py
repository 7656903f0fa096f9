"""What follows from the centre's first answers: sizes, and numbers that are `auto`.

Most runs are given all of it, and import none of this.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

from es_cookbook.common.terminal import plural, say
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.optimizers.base import AUTO, Auto, number
from es_cookbook.population.centre_answers import CentreAnswers, centre_answers, measured_pace
from es_cookbook.population.step_sizes import LEAST_SECONDS, FoundSigma, find_sigma, options_of
from es_cookbook.rl.types import Datasets, EnvGroupBuilder, RLDataset
from es_cookbook.runs.choosing.sizes import shown, sized, told, with_options
from es_cookbook.runs.config import Config

_SHOWN = 16
"""Problems that the centre answers before anything else, if sizes are chosen."""
_SECONDS_LOOKED = 12.0


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """What the centre answered first, and to what."""

    problems_P: Sequence[EnvGroupBuilder]
    answers: CentreAnswers


async def find_sigma_for(
    config: Config, engine: Engine, dataset: RLDataset, looked: Looked | None = None
) -> FoundSigma:
    """The σ at which genomes lose a set amount of the centre's answers (`find_sigma`)."""
    sampler, batch_P = config.sampler(engine, sampling=config.sampling_at(0)), dataset.get_batch(0)
    size = 2 if config.num_pairs else config.optimizer.population_size
    num_rollouts = len(batch_P) * size * config.attempts
    if looked is None:
        return await find_sigma(sampler, batch_P, num_rollouts)
    return await find_sigma(sampler, looked.problems_P, num_rollouts, looked.answers)


async def sized_run(
    config: Config, engine: Engine, datasets: Datasets, seconds: float
) -> tuple[Config, Looked]:
    """The Config with sizes that fit into so many seconds, and the answers that told them."""
    looked = await _look(config, engine, datasets.train)
    look = looked.answers.look
    if look.pace is None:
        say("no answer was heard, so sizes stay as they are")
        return with_options(config, {"size": ()}), looked
    if config.optimizer.unsettled:
        seconds -= LEAST_SECONDS
    sizes = sized(config, look, (len(datasets.train), len(datasets.test_P)), seconds)
    config = with_options(config, {**sizes.chosen, "size": ()})
    say(told(config, sizes))
    return config, looked


async def _look(config: Config, engine: Engine, dataset: RLDataset) -> Looked:
    """The centre's first answers, shown."""
    sampler = config.sampler(engine, sampling=config.sampling_at(0))
    some_P = _some(dataset, 2 * _SHOWN)
    problems_P, new_P = some_P[:_SHOWN], some_P[_SHOWN:]
    say(f"the centre answers {plural(len(problems_P), 'problem')} first")
    answers = await centre_answers(sampler, problems_P, _SECONDS_LOOKED)
    if answers.prompts:
        pace = await measured_pace(sampler, answers, new_P)
        answers = dataclasses.replace(answers, look=dataclasses.replace(answers.look, pace=pace))
    for line in shown(answers.look):
        say(line)
    return Looked(problems_P, answers)


def _some(dataset: RLDataset, most: int) -> Sequence[EnvGroupBuilder]:
    """Problems of the first generations."""
    most = min(most, len(dataset))
    problems_P = list(dataset.get_batch(0))
    generation = 0
    while len(problems_P) < most and not dataset.depends_on_results:
        generation += 1
        problems_P += dataset.get_batch(generation)
    return problems_P[:most]


async def found(
    config: Config, engine: Engine, dataset: RLDataset, looked: Looked | None
) -> Mapping[str, float]:
    """Numbers for the options that are `auto`."""
    given = cast(Auto, getattr(config.optimizer, "sigma", AUTO))
    if given == AUTO:
        tried = await find_sigma_for(config, engine, dataset, looked)
        for line in tried.table().split("\n"):
            say(line)
        given = tried.sigma
    chosen = options_of(config.optimizer, number(given), config.num_generations)
    say(", ".join(f"optimizer.{name}={value:g}" for name, value in chosen.items()))
    return chosen
