"""A size for a run that was given none: how much of it fits into some minutes on this machine.

The centre's first answers tell how long answers get and how fast they come
(`population.centre_answers`):

    seconds of a rollout  =  tokens of its prompt · s  +  tokens of its answer · s'

and the rollouts that fit are divided. Many generations of few rollouts learn more from as many than
few generations of many, up to a point: on the chat model's tasks 15 to 30 generations were best of
1,920 rollouts, and 64 × 8 needs more of them to be better (docs/lab_notes.md). So the generations
grow like the root of the number of rollouts, and a generation has about twice as many genomes as
problems, in a power of two: their rewards are what a step is made of.

An answer gets room for what the centre's own answers take where they end by themselves, and for
the gold answers. If answers go on after a first line that is an answer, and all gold answers have
one line, they end with the line.

Left out: answers that get shorter or longer while the model learns, so a run may take less time
than planned, or more.
"""

import contextlib
import dataclasses
import json
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import chz
import numpy as np

from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import one_line, plural
from es_cookbook.population.centre_answers import Answer, Look, Pace
from es_cookbook.rl.rollouts import runs_on
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import Recorded
from es_cookbook.runs.tracking.jsonl import duration_in_words

_Config = TypeVar("_Config")

_OF_EVALUATIONS = 0.15
"""Share of the time for the evaluations before and after the run; as much for those between."""
_MOST_BETWEEN = 4
"""Evaluations between the first and the last."""
_LEAST_TEST = 40
_SPARE = 0.1
"""Share of the time for what lies between rollouts."""
_GENERATIONS = 12, 100
_LEAST_GENERATIONS = 6
_GENOMES = 16, 64
_PROBLEMS = 4, 64
_ROOM, _MORE_TOKENS = 1.5, 8
"""An answer's room: times its length, and tokens more."""
_OF_GENOME = 1.15
"""A genome's answer takes so many times as long as the centre's: 1.0 to 1.5 were measured, most if
lengths differ much, since the last ones are few at once (docs/lab_notes.md)."""
_LONGEST_SHOWN = 60
"""Characters of an answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What was chosen, and what it takes.

    Attributes:
        chosen: values of the options that were free, by path.
        seconds: from now to the end of the run.
        length: tokens of an answer, on average.
    """

    chosen: Mapping[str, object]
    seconds: float
    length: float


def sized(config: Config, look: Look, counts: tuple[int, int], seconds: float) -> Sizes:
    """Sizes for the options in `config.size`, and what a run of these sizes takes.

    Args:
        config: of the run.
        look: at the centre's answers, with a pace.
        counts: of training problems, and of held-out ones.
        seconds: that the run may take; of its generations and evaluations.
    """
    free = frozenset(path for path in config.size if has(config, path))
    chosen = dict(_ends(config, look, free))
    config = with_options(config, chosen)
    length = mean_length(look.answers, config)
    rollout = _seconds_of(look, length)
    num_train, num_test = counts
    if "dataset.num_test" in free and num_test:
        most = max(_LEAST_TEST, int(_OF_EVALUATIONS / 2 * seconds / rollout))
        if most < num_test:
            num_test = chosen["dataset.num_test"] = most
    evaluation, evaluations = num_test * rollout, 2
    if "eval_every" in free and evaluation:
        between = max(0, int(_OF_EVALUATIONS * seconds / evaluation))  # The time may be over.
        evaluations += min(_MOST_BETWEEN, between)
    left = (1 - _SPARE) * seconds - evaluations * evaluation
    chosen |= _shape(config, free, max(0, int(left / rollout)), num_train)
    config = with_options(config, chosen)
    if "eval_every" in free:
        chosen["eval_every"] = math.ceil(config.num_generations / (evaluations - 1))
        config = with_options(config, chosen)
    evaluations = sum(map(config.evaluates, range(config.num_generations + 1)))
    generations = config.num_generations * rollouts_of(config) * rollout / (1 - _SPARE)
    return Sizes(chosen, generations + evaluations * evaluation, length)


def rollouts_of(config: Config) -> int:
    """Rollouts of a generation."""
    genomes = 2 if config.num_pairs else config.optimizer.population_size
    problems = int(getattr(config.dataset, "problems_per_generation", 1))
    return genomes * problems * config.attempts


def _seconds_of(look: Look, length: float) -> float:
    """Of a rollout of as many turns as those that were looked at."""
    turns = max(1.0, len(look.answers) / look.num_rollouts)
    prompt = float(np.mean([answer.prompt_tokens for answer in look.answers]))
    seconds = cast(Pace, look.pace).seconds(prompt, length)
    return _OF_GENOME * turns * max(seconds, 1e-6)


def mean_length(answers: Sequence[Answer], config: Config) -> float:
    """Tokens of an answer, if `sampling` has more room or less, and other ends, than it had."""
    most = config.sampling.max_tokens
    return float(np.mean([min(length, most) for length in _lengths(answers, config)]))


def _lengths(answers: Sequence[Answer], config: Config) -> list[float]:
    """Tokens that answers have in the end; infinite if none is known."""
    stop = config.sampling.stop or ()
    return [_length(answer, stop) for answer in answers]


def _length(answer: Answer, stop: Sequence[str]) -> float:
    for text in stop:
        before, found, _ = answer.text.partition(text)
        if found:
            return 1 + answer.num_tokens * len(before) / len(answer.text)
    return answer.num_tokens if answer.ending == "stop" else math.inf


def _ends(config: Config, look: Look, free: Collection[str]) -> Iterator[tuple[str, object]]:
    """Where answers end: a text, and after so many tokens at the latest."""
    answers, most = look.answers, config.sampling.max_tokens
    if "sampling.stop" in free and config.sampling.stop is None and goes_on(answers):
        config = with_options(config, {"sampling.stop": ("\n",)})
        yield "sampling.stop", ("\n",)
    if "sampling.max_tokens" not in free:
        return
    gold = max(answer.gold_tokens for answer in answers)
    ended = [length for length in _lengths(answers, config) if length < math.inf]
    if 2 * len(ended) >= len(answers):
        needed = max(float(np.quantile(ended, 0.95)), gold)
    elif gold and all(answer.ending == "length" for answer in answers):
        needed = 2 * gold
    else:
        return
    room = 8 * math.ceil((_ROOM * needed + _MORE_TOKENS) / 8)
    if room < most:
        yield "sampling.max_tokens", room


def goes_on(answers: Sequence[Answer]) -> bool:
    """Whether answers do not end, but go on after a first line that is one."""
    cut = [answer for answer in answers if answer.ending != "stop"]
    are_lines = all(answer.gold and "\n" not in answer.gold.strip() for answer in answers)
    num_on = sum(runs_on(answer.text, answer.gold) for answer in cut)
    return are_lines and 2 * num_on >= len(answers)


def _shape(
    config: Config, free: Collection[str], rollouts: int, num_train: int
) -> dict[str, object]:
    """Genomes, problems and generations that are together about so many rollouts."""
    chosen: dict[str, object] = {}
    generations = config.num_generations
    if "num_generations" in free:
        generations = _within(round(math.sqrt(rollouts) / 3), *_GENERATIONS)
    each = rollouts / generations / config.attempts
    if not config.num_pairs:
        genomes = config.optimizer.population_size
        problems = int(getattr(config.dataset, "problems_per_generation", 1))
        has_problems = "dataset.problems_per_generation" in free
        if "optimizer.population_size" in free:
            wanted = math.sqrt(2 * each) if has_problems else each / problems
            genomes = 2 ** round(math.log2(_within(wanted, *_GENOMES)))
            chosen["optimizer.population_size"] = genomes
        if has_problems:
            most = min(_PROBLEMS[1], num_train)
            problems = _within(round(each / genomes), min(_PROBLEMS[0], most), most)
            chosen["dataset.problems_per_generation"] = problems
    if "num_generations" in free:
        of_one = rollouts_of(with_options(config, chosen))
        chosen["num_generations"] = max(_LEAST_GENERATIONS, round(rollouts / of_one))
    return chosen


_Number = TypeVar("_Number", int, float)


def _within(number: _Number, least: _Number, most: _Number) -> _Number:
    return max(least, min(number, most))


def as_recorded(config: Config, recorded: Recorded) -> Config:
    """The Config with the sizes of the run in its directory, if one is recorded there."""
    with contextlib.suppress(ConfigError):  # What is wrong is said where the directory is opened.
        if recorded.history.generations:
            trust = trust_of(config_to_json(config))
            found = config_from_json(recorded.config_json, trust)
            paths = [path for path in config.size if has(config, path)]
            if all(has(found, path) for path in paths):
                chosen = {path: _at(found, path) for path in paths}
                return with_options(config, {**chosen, "size": ()})
    return config


def one_by_one(config: Config) -> Config:
    """The Config in which problems come one by one, if how many make a batch is to be chosen."""
    path = "dataset.problems_per_generation"
    return with_options(config, {path: 1}) if path in config.size and has(config, path) else config


def has(config: object, path: str) -> bool:
    """Whether a config has an option of this path."""
    name, _, rest = path.partition(".")
    if not chz.is_chz(config) or name not in chz.chz_fields(config):
        return False
    return not rest or has(getattr(config, name), rest)


def _at(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def with_options(config: _Config, options: Mapping[str, object]) -> _Config:
    """A config with other values of some options, by path."""
    for path, value in options.items():
        name, _, rest = path.partition(".")
        if rest:
            value = with_options(getattr(config, name), {rest: value})
        config = chz.replace(config, **{name: value})
    return config


def shown(look: Look) -> Iterator[str]:
    """Lines that show the centre's answers: three of them, their rewards, and the pace."""
    some = sorted(look.answers, key=lambda answer: math.isnan(answer.reward))[:3]
    for answer in some:
        reward = "cut by the clock" if math.isnan(answer.reward) else f"earns {answer.reward:g}"
        text = one_line(answer.text.strip()) or "(nothing)"
        short = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
        gold = f" (gold {one_line(answer.gold):.30})" if answer.gold else ""
        yield f"  {reward}: {short}{gold}"
    if rewards := look.rewards:
        yield f"  reward of {plural(len(rewards), 'answer')}: {np.mean(rewards):.3g}"
    if look.pace is not None:
        yield f"  {1 / look.pace.sampled:,.0f} tokens a second, of many answers at once"


def told(config: Config, sizes: Sizes) -> str:
    """How long a run of these sizes takes, and the options to paste into a shell."""
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
