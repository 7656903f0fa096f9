"""Choices before the first generation: sizes that fit a run's time, and `auto` step sizes.

The first answers of the centre show how long answers get and how fast they come (`AnswerSample`):

    seconds of a rollout  =  tokens of its prompt · s  +  tokens of its answer · s'

The rollouts that fit are divided. Many generations of few rollouts learn more from the same total
than few generations of many, up to a point: on the chat model's tasks 15 to 30 generations were the
best division of 1,920 rollouts (docs/lab_notes.md). So the number of generations grows like the
root of the number of rollouts, and a generation has about twice as many genomes as problems, a
power of two. An answer gets room for the centre's own answers and for the gold answers. If answers
go on after a first line that is an answer, and all gold answers have one line, they end there.

Left out: answers that get shorter or longer while the model learns, so a run may take less time
than planned, or more.

Most runs are given everything, and do not import this module.
"""

import contextlib
import dataclasses
import json
import math
import operator
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import chz
import numpy as np

from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import one_line, plural, say
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.optimizers.base import AUTO, Auto, number
from es_cookbook.population.centre_answers import (
    Answer,
    AnswerSample,
    CentreAnswers,
    Pace,
    centre_answers,
    measured_pace,
)
from es_cookbook.population.step_sizes import SECONDS, FoundSigma, find_sigma, options_of
from es_cookbook.rl.rollouts import runs_on
from es_cookbook.rl.types import Datasets, RLDataset
from es_cookbook.runs.config import MINUTES, Config
from es_cookbook.runs.directory.directory import Recorded
from es_cookbook.runs.tracking.jsonl import duration_in_words

_Config = TypeVar("_Config")

_PROBLEM = "dataset.problems_per_generation"
_CHOSEN: Mapping[str, object] = {"size": (), "minutes": MINUTES}
"""Options of a run whose sizes are chosen: from now on it is like one that was given them."""
_SHOWN = 16
"""Problems that the centre attempts before anything else, if sizes are chosen."""
_SECONDS_LOOKED = 12.0
_OF_EVALUATIONS = 0.15
"""Share of the time for the evaluations before and after the run; as much for those between."""
_MOST_BETWEEN = 4
"""Evaluations between the first and the last."""
_LEAST_TEST = 40
_SPARE = 0.1
"""Share of the time between rollouts."""
_GENERATIONS = 12, 100
_LEAST_GENERATIONS = 6
_GENOMES = 16, 64
_PROBLEMS = 4, 64
_ROOM, _MORE_TOKENS = 1.5, 8
"""Room of an answer: this factor on its length, and more tokens."""
_OF_GENOME = 1.15
"""Time of a genome's answer over that of the centre's: 1.0 to 1.5 were measured, most if lengths
differ much, since the last ones are few at once (docs/lab_notes.md)."""
_LONGEST_SHOWN = 60
"""Characters of an answer."""


async def sized_run(
    config: Config, engine: Engine, datasets: Datasets, seconds: float
) -> tuple[Config, CentreAnswers]:
    """Return the Config with sizes that fit into `seconds`, and the answers they are based on."""
    first = await _first_answers(config, engine, datasets.train)
    sample = first.sample
    if sample.pace is None:
        say("the centre gave no answer, so sizes stay as they are")
        return with_options(config, _CHOSEN), first
    if config.optimizer.unsettled:
        seconds -= SECONDS
    sizes = sized(config, sample, (len(datasets.train), len(datasets.test_P)), seconds)
    config = with_options(config, sizes.chosen)
    say(told(config, sizes))
    return with_options(config, _CHOSEN), first


async def found(
    config: Config, engine: Engine, dataset: RLDataset, first: CentreAnswers | None
) -> Mapping[str, float]:
    """Return values for the options that are `auto`."""
    given = cast(Auto, getattr(config.optimizer, "sigma", AUTO))
    if given == AUTO:
        tried = await find_sigma_for(config, engine, dataset, first)
        for line in tried.table().split("\n"):
            say(line)
        given = tried.sigma
    chosen = options_of(config.optimizer, number(given), config.num_generations)
    say(", ".join(f"optimizer.{name}={value:g}" for name, value in chosen.items()))
    return chosen


async def find_sigma_for(
    config: Config, engine: Engine, dataset: RLDataset, first: CentreAnswers | None = None
) -> FoundSigma:
    """Find the sigma at which genomes lose a set amount of the centre's answers (`find_sigma`)."""
    sampler, batch_P = config.sampler(engine, sampling=config.sampling_at(0)), dataset.get_batch(0)
    return await find_sigma(sampler, batch_P if first is None else first.problems_P, first)


async def _first_answers(config: Config, engine: Engine, dataset: RLDataset) -> CentreAnswers:
    """Sample and print the centre's first answers."""
    sampler = config.sampler(engine, sampling=config.sampling_at(0))
    problems_P, generation = list(dataset.get_batch(0)), 0
    while len(problems_P) < min(2 * _SHOWN, len(dataset)) and not dataset.depends_on_results:
        generation += 1
        problems_P += dataset.get_batch(generation)
    problems_P, new_P = problems_P[:_SHOWN], problems_P[_SHOWN : 2 * _SHOWN]
    say(f"the centre answers {plural(len(problems_P), 'problem')} first")
    answers = await centre_answers(sampler, problems_P, _SECONDS_LOOKED)
    if answers.prompts:
        pace = await measured_pace(sampler, answers, new_P)
        answers = dataclasses.replace(
            answers, sample=dataclasses.replace(answers.sample, pace=pace)
        )
    for line in shown(answers.sample):
        say(line)
    return answers


def shown(sample: AnswerSample) -> Iterator[str]:
    """Yield lines that show three of the centre's answers, the mean reward and the speed."""
    for answer in sorted(sample.answers, key=lambda answer: math.isnan(answer.reward))[:3]:
        reward = "cut by the clock" if math.isnan(answer.reward) else f"earns {answer.reward:g}"
        text = one_line(answer.text.strip()) or "(nothing)"
        short = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
        gold = f" (gold {one_line(answer.gold):.30})" if answer.gold else ""
        yield f"  {reward}: {short}{gold}"
    if rewards := sample.rewards:
        yield f"  reward of {plural(len(rewards), 'answer')}: {np.mean(rewards):.3g}"
    if sample.pace is not None:
        yield f"  {1 / sample.pace.sampled:,.0f} tokens a second, of many answers at once"


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """The chosen sizes, and the time that they take.

    Attributes:
        chosen: values of the options that were free, by path.
        seconds: time from now to the end of the run.
        length: tokens of an answer, on average.
    """

    chosen: Mapping[str, object]
    seconds: float
    length: float


def sized(config: Config, sample: AnswerSample, counts: tuple[int, int], seconds: float) -> Sizes:
    """Choose the options in `config.size`, and estimate how long a run of these sizes takes.

    Args:
        config: config of the run.
        sample: the centre's answers, with a pace.
        counts: number of training problems, and of held-out ones.
        seconds: time for generations and evaluations.
    """
    free = frozenset(path for path in config.size if has(config, path))
    chosen: dict[str, object] = {}
    if "sampling.stop" in free and config.sampling.stop is None and goes_on(sample.answers):
        chosen["sampling.stop"] = ("\n",)
        config = with_options(config, chosen)
    stop, most = config.sampling.stop or (), config.sampling.max_tokens
    lengths = [_length(answer, stop) for answer in sample.answers]
    if "sampling.max_tokens" in free and (room := _room(sample, lengths, most)):
        chosen["sampling.max_tokens"] = most = room
        config = with_options(config, chosen)
    length = float(np.mean([min(length, most) for length in lengths]))
    answered = _seconds_of(sample, length)
    num_train, num_test = counts
    if "dataset.num_test" in free and num_test:
        most = max(_LEAST_TEST, int(_OF_EVALUATIONS / 2 * seconds / answered))
        if most < num_test:
            num_test = chosen["dataset.num_test"] = most
    evaluation, evaluations = num_test * answered, 2
    if "eval_every" in free and evaluation:
        between = max(0, int(_OF_EVALUATIONS * seconds / evaluation))  # The time may be over.
        evaluations += min(_MOST_BETWEEN, between)
    left = (1 - _SPARE) * seconds - evaluations * evaluation
    rollouts = int(left / _seconds_of_genome(config, sample, length))
    chosen |= _shape(config, free, max(0, rollouts), num_train)
    config = with_options(config, chosen)
    if "eval_every" in free:
        chosen["eval_every"] = math.ceil(config.num_generations / (evaluations - 1))
        config = with_options(config, chosen)
    evaluations = sum(map(config.evaluates, range(config.num_generations + 1)))
    generation = rollouts_of(config) * _seconds_of_genome(config, sample, length) / (1 - _SPARE)
    seconds = config.num_generations * generation + evaluations * evaluation
    return Sizes(chosen, seconds, length)


def rollouts_of(config: Config) -> int:
    """Return the number of rollouts in one generation."""
    genomes = 2 if config.num_pairs else config.optimizer.population_size
    problems = int(getattr(config.dataset, "problems_per_generation", 1))
    return genomes * problems * config.attempts


def _seconds_of(sample: AnswerSample, length: float) -> float:
    """Estimate the seconds of a rollout with as many turns as the first answers had."""
    seconds = cast(Pace, sample.pace).seconds(_prompt_tokens(sample), length)
    return _OF_GENOME * _turns(sample) * max(seconds, 1e-6)


def _seconds_of_genome(config: Config, sample: AnswerSample, length: float) -> float:
    """Estimate the seconds that a genome spends on a problem, once.

    With a surrogate it reads the prompt and answers to it, whose tokens cost twice since they have
    logits, and has a share of the centre's answers.
    """
    answered = _seconds_of(sample, length)
    if config.surrogate is None:
        return answered
    gold = math.fsum(answer.gold_tokens for answer in sample.answers) / sample.num_rollouts
    read = config.surrogate.tokens_read(_turns(sample) * length, gold)
    seconds = cast(Pace, sample.pace).seconds(_prompt_tokens(sample) + 2 * read, 0)
    by_centre = config.surrogate.attempts / config.optimizer.population_size * answered
    return _OF_GENOME * seconds + by_centre


def _turns(sample: AnswerSample) -> float:
    return max(1.0, len(sample.answers) / sample.num_rollouts)


def _prompt_tokens(sample: AnswerSample) -> float:
    return float(np.mean([answer.prompt_tokens for answer in sample.answers]))


def _length(answer: Answer, stop: Sequence[str]) -> float:
    """Return the length of an answer in tokens, infinite for one that did not end."""
    for text in stop:
        before, found, _ = answer.text.partition(text)
        if found:
            return 1 + answer.num_tokens * len(before) / len(answer.text)
    return answer.num_tokens if answer.ending == "stop" else math.inf


def _room(sample: AnswerSample, lengths: Sequence[float], most: int) -> int | None:
    """Return the tokens that an answer needs; None if unknown, or not less than `most`."""
    gold = max(answer.gold_tokens for answer in sample.answers)
    ended = [length for length in lengths if length < math.inf]
    if 2 * len(ended) >= len(sample.answers):
        needed = max(float(np.quantile(ended, 0.95)), gold)
    elif gold and all(answer.ending == "length" for answer in sample.answers):
        needed = 2 * gold
    else:
        return None
    room = 8 * math.ceil((_ROOM * needed + _MORE_TOKENS) / 8)
    return room if room < most else None


def goes_on(answers: Sequence[Answer]) -> bool:
    """Return whether answers go on after a first line that is already an answer."""
    cut = [answer for answer in answers if answer.ending != "stop"]
    are_lines = all(answer.gold and "\n" not in answer.gold.strip() for answer in answers)
    num_on = sum(runs_on(answer.text, answer.gold) for answer in cut)
    return are_lines and 2 * num_on >= len(answers)


def _shape(
    config: Config, free: Collection[str], rollouts: int, num_train: int
) -> dict[str, object]:
    """Choose genomes, problems and generations for about this many rollouts."""
    chosen: dict[str, object] = {}
    generations = config.num_generations
    if "num_generations" in free:
        generations = _within(round(math.sqrt(rollouts) / 3), *_GENERATIONS)
    each = rollouts / generations / config.attempts
    if not config.num_pairs:
        genomes = config.optimizer.population_size
        problems = int(getattr(config.dataset, "problems_per_generation", 1))
        # With a surrogate, directions are worth more than problems (docs/lab_notes.md).
        if "optimizer.population_size" in free and config.surrogate is None:
            wanted = math.sqrt(2 * each) if _PROBLEM in free else each / problems
            count = 2 ** round(math.log2(_within(wanted, *_GENOMES)))
            with contextlib.suppress(ConfigError):  # Its optimizer or search space may need more.
                with_options(config, {"optimizer.population_size": count})
                chosen["optimizer.population_size"] = genomes = count
        if _PROBLEM in free:
            most = min(_PROBLEMS[1], num_train)
            chosen[_PROBLEM] = _within(round(each / genomes), min(_PROBLEMS[0], most), most)
    if "num_generations" in free:
        of_one = rollouts_of(with_options(config, chosen))
        chosen["num_generations"] = max(_LEAST_GENERATIONS, round(rollouts / of_one))
    return chosen


_Number = TypeVar("_Number", int, float)


def _within(number: _Number, least: _Number, most: _Number) -> _Number:
    return max(least, min(number, most))


def told(config: Config, sizes: Sizes) -> str:
    """Return a sentence with the duration of the run, and the chosen options for a shell."""
    genomes, generations = config.optimizer.population_size, config.num_generations
    options = shlex.join(
        f"{path}={json.dumps(value) if isinstance(value, tuple) else value}"
        for path, value in sizes.chosen.items()
    )
    return (
        f"{plural(generations, 'generation')} of {genomes} genomes x "
        f"{plural(rollouts_of(config) // genomes, 'answer')} of about "
        f"{plural(round(sizes.length), 'token')} (at most {config.sampling.max_tokens}) take about "
        f"{duration_in_words(sizes.seconds)} here, for minutes={config.minutes:g}: {options}"
    )


def as_recorded(config: Config, recorded: Recorded) -> Config:
    """Return the Config with the sizes that the run in its directory recorded, if there is one."""
    with contextlib.suppress(ConfigError):  # It is raised where the directory is opened.
        if recorded.history.generations:
            found = config_from_json(recorded.config_json, trust_of(config_to_json(config)))
            paths = [path for path in config.size if has(config, path)]
            if all(has(found, path) for path in paths):
                chosen = {path: operator.attrgetter(path)(found) for path in paths}
                return with_options(config, {**chosen, **_CHOSEN})
    return config


def has(config: object, path: str) -> bool:
    """Return whether a config has an option at this dotted path."""
    name, _, rest = path.partition(".")
    if not chz.is_chz(config) or name not in chz.chz_fields(config):
        return False
    return not rest or has(getattr(config, name), rest)


def with_options(config: _Config, options: Mapping[str, object]) -> _Config:
    """Return a config with other values for some options, given by dotted path."""
    for path, value in options.items():
        name, _, rest = path.partition(".")
        if rest:
            value = with_options(getattr(config, name), {rest: value})
        config = chz.replace(config, **{name: value})
    return config
