"""A size for a run that nobody has given one: how much of it fits into some minutes here.

The centre's first answers tell how long they get and how fast they come (`population.look`). So

    seconds of a rollout  =  tokens of its prompt · s  +  tokens of its answer · s'

and the rollouts that fit are divided. Many generations of few rollouts learn more from as many than
few generations of many, up to a point: on the chat model's tasks 15 to 30 generations were best of
1,920 rollouts, and 64 × 8 needs more of them to be better (docs/lab_notes.md). So the generations
grow like the root of the number of rollouts, and a generation has about twice as many genomes as
problems, in a power of two: their rewards are what a step is made of.

Answers get shorter while a model learns to end them, or longer. Where gold answers are shorter the
run is told as if they came half way there. And at every evaluation it is seen how many generations
still fit: the run ends with its time (`length_for`), but is at most 1.5 times as long as planned:
the learning rate is for that length, and at 2 to 3 times as many generations noise had undone what
three of six runs had learned (docs/lab_notes.md).

An answer gets room for what the centre's own answers take where they end by themselves, and for
the gold answers. Where answers go on behind a first line that is an answer, and all gold answers
have one line, they end with the line.
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

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import parsed
from es_cookbook.common.terminal import one_line, plural
from es_cookbook.population.look import Answer, Look, Pace
from es_cookbook.rl.endings import runs_on
from es_cookbook.rl.types import SamplingParams
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import Recorded
from es_cookbook.runs.tracking.result import duration_in_words

_Config = TypeVar("_Config")

_OF_EVALUATIONS = 0.15
"""Share of the time for the evaluations before and after the run; as much for those between."""
_MOST_BETWEEN = 4
"""Evaluations between the first and the last."""
_LEAST_TEST = 40
_SPARE = 0.1
"""Of the time, for what lies between rollouts."""
_GENERATIONS = 12, 100
_LEAST_GENERATIONS = 6
_GENOMES = 16, 64
_PROBLEMS = 4, 64
_ROOM, _MORE_TOKENS = 1.5, 8
"""An answer's room: times its length, and tokens more."""
LATE = 1.3
"""Times as long as it may take, a run is told to take too long, and answers get less room."""
_OF_GENOME = 1.15
"""Times as long as the centre's, a genome's answer takes: 1.0 to 1.5 were measured, most where
lengths differ much, since the last ones are few at once (docs/lab_notes.md)."""
_WORTH_CHANGING = 0.1
"""Of a run's length, at the least."""
_LONGEST = 1.5
"""Times the length that was planned."""
_LEAST_ROOM = 4
"""Times 8 tokens, where less fits into the time."""
_LONGEST_SHOWN = 60
"""Characters of an answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What was chosen, and what it takes.

    Attributes:
        chosen: values of the options that were free, by path.
        generation: seconds of the first.
        run: seconds from now to its end.
        num_rollouts: of a generation; `all_rollouts`: of the run, evaluations included.
        length: tokens of an answer, on average.
    """

    chosen: Mapping[str, object]
    generation: float
    run: float
    num_rollouts: int
    all_rollouts: int
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
    ends = dict(_ends(config, look, free))
    config = with_options(config, ends)
    sizes = _fitted(config, look, counts, seconds)
    if sizes.run > LATE * seconds and "sampling.max_tokens" in free:
        room = _less_room(look, sizes, seconds)
        if room < config.sampling.max_tokens:
            ends["sampling.max_tokens"] = room
            sizes = _fitted(with_options(config, ends), look, counts, seconds)
    return dataclasses.replace(sizes, chosen={**ends, **sizes.chosen})


def _fitted(config: Config, look: Look, counts: tuple[int, int], seconds: float) -> Sizes:
    """The same for a Config that says where answers end."""
    free = frozenset(path for path in config.size if has(config, path))
    chosen: dict[str, object] = {}
    length = mean_length(look.answers, config)
    first, rollout = (_seconds_of(look, each) for each in (length, _later_length(look, length)))
    num_train, num_test = counts
    if "dataset.num_test" in free and num_test:
        most = max(_LEAST_TEST, int(_OF_EVALUATIONS / 2 * seconds / rollout))
        if most < num_test:
            num_test = chosen["dataset.num_test"] = most
    evaluation = num_test * rollout
    evaluations = 2
    if "eval_every" in free and evaluation:
        between = max(0, int(_OF_EVALUATIONS * seconds / evaluation))  # The time may be over.
        evaluations += min(_MOST_BETWEEN, between)
    left = (1 - _SPARE) * seconds - evaluations * evaluation
    chosen |= _shape(config, free, max(0, int(left / rollout)), num_train)
    config = with_options(config, chosen)
    if "eval_every" in free:
        chosen["eval_every"] = math.ceil(config.num_generations / (evaluations - 1))
        config = with_options(config, chosen)
    num_rollouts, evaluations = rollouts_of(config), num_evaluations(config)
    run = config.num_generations * num_rollouts * rollout / (1 - _SPARE) + evaluations * evaluation
    everything = config.num_generations * num_rollouts + evaluations * num_test
    return Sizes(chosen, num_rollouts * first, run, num_rollouts, everything, length)


def _less_room(look: Look, sizes: Sizes, seconds: float) -> int:
    """Tokens of an answer with which as many rollouts fit; but for the gold answers."""
    pace = cast(Pace, look.pace)
    each = (1 - _SPARE) * seconds / (sizes.all_rollouts * _turns(look))
    fitting = (each - _prompt_tokens(look) * pace.prompt) / pace.sampled
    gold = max(answer.gold_tokens for answer in look.answers)
    return 8 * max(math.ceil((_ROOM * gold + _MORE_TOKENS) / 8), _LEAST_ROOM, int(fitting / 8))


def num_evaluations(config: Config) -> int:
    """Of a whole run."""
    return sum(map(config.evaluates, range(config.num_generations + 1)))


def length_for(
    config: Config, planned: int, done: int, left: float, generation: float, evaluation: float
) -> int:
    """Generations of a run that is over in time; as they are where that is much the same.

    Args:
        config: of the run, as long as it is now.
        planned: generations that it had at first.
        done: generations that it has behind it; it is evaluated now.
        left: seconds that it may still take.
        generation: seconds of one.
        evaluation: seconds of one.
    """
    now = config.num_generations
    each = generation + evaluation / (config.eval_every or now)
    more = (left - 2 * evaluation) / max(each, 1e-6)
    length = max(done + max(0, int(more)), min(planned, _LEAST_GENERATIONS))
    length = max(done, min(length, int(_LONGEST * planned)))
    return now if abs(length - now) <= _WORTH_CHANGING * now else length


def rollouts_of(config: Config) -> int:
    """Rollouts of a generation."""
    genomes = 2 if config.num_pairs else config.optimizer.population_size
    problems = int(getattr(config.dataset, "problems_per_generation", 1))
    return genomes * problems * config.attempts


def _seconds_of(look: Look, length: float) -> float:
    """Of a rollout of as many turns as those that were looked at."""
    seconds = cast(Pace, look.pace).seconds(_prompt_tokens(look), length)
    return _OF_GENOME * _turns(look) * max(seconds, 1e-6)


def _later_length(look: Look, length: float) -> float:
    """Tokens of an answer over the run: half way to the gold answers, where these are shorter."""
    gold = float(np.mean([answer.gold_tokens for answer in look.answers]))
    return (length + min(gold, length)) / 2 if gold else length


def _turns(look: Look) -> float:
    return max(1.0, len(look.answers) / look.num_rollouts)


def _prompt_tokens(look: Look) -> float:
    return float(np.mean([answer.prompt_tokens for answer in look.answers]))


def mean_length(answers: Sequence[Answer], config: Config) -> float:
    """Tokens of an answer, where `sampling` has more room or less, and other ends, than it had."""
    most = config.sampling.max_tokens
    return float(np.mean([min(length, most) for length in _lengths(answers, config)]))


def _lengths(answers: Sequence[Answer], config: Config) -> Sequence[float]:
    """Tokens that answers have in the end; infinite without one.

    One that the clock cut gets as long as the others that are longer than it is by then.
    """
    stop = config.sampling.stop or ()
    lengths = [_length(answer, stop) for answer in answers]
    whole = [each for each in lengths if not math.isnan(each)]
    return [
        np.mean([other for other in whole if other > answer.num_tokens] or [math.inf]).item()
        if math.isnan(length)
        else length
        for answer, length in zip(answers, lengths, strict=True)
    ]


def _length(answer: Answer, stop: Sequence[str]) -> float:
    """Tokens; infinite without an end, NaN where the clock cut it."""
    for text in stop:
        before, found, _ = answer.text.partition(text)
        if found:
            return 1 + answer.num_tokens * len(before) / len(answer.text)
    return {"stop": answer.num_tokens, "length": math.inf, "clock": math.nan}[answer.ending]


def _ends(config: Config, look: Look, free: Collection[str]) -> Iterator[tuple[str, object]]:
    """Where answers end: a text, and after so many tokens at the latest."""
    answers, most = look.answers, config.sampling.max_tokens
    if "sampling.stop" in free and config.sampling.stop is None and goes_on(answers):
        config = chz.replace(config, sampling=chz.replace(config.sampling, stop=("\n",)))
        yield "sampling.stop", ("\n",)
    if "sampling.max_tokens" not in free:
        return
    gold, lengths = max(answer.gold_tokens for answer in answers), _lengths(answers, config)
    ended = [length for length in lengths if length < math.inf]
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
    """Whether answers do not end, but go on behind a first line that is one."""
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
    """The Config with the sizes that the run in its directory has, if one is recorded there."""
    with contextlib.suppress(ConfigError, ValueError):
        if config.size and recorded.history.generations:
            plain = parsed(recorded.config_json.encode())
            found = {each: _recorded(plain, each) for each in config.size if has(config, each)}
            return with_options(config, {**found, "size": ()})
    return config  # What is wrong there is said where the directory is opened.


def _recorded(plain: object, path: str) -> object:
    """A value in a recorded Config.

    Raises:
        ValueError: There is none.
    """
    for name in path.split("."):
        if not isinstance(plain, dict) or name not in plain:
            raise ValueError(f"there is no {path}")
        plain = cast("dict[str, object]", plain)[name]
    if isinstance(plain, dict) and "$tuple" in plain:
        return tuple(cast("dict[str, list[object]]", plain)["$tuple"])
    return plain


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


def with_options(config: _Config, options: Mapping[str, object]) -> _Config:
    """A config with other values of some options, by path."""
    for path, value in options.items():
        name, _, rest = path.partition(".")
        if rest:
            value = with_options(getattr(config, name), {rest: value})
        config = chz.replace(config, **{name: value})
    return config


def shown(look: Look) -> Iterator[str]:
    """Lines with what the centre's answers show: three of them, their rewards, and the pace."""
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


def doubts(look: Look, sampling: SamplingParams) -> Iterator[str]:
    """Sentences on why nothing would be learned from answers such as these."""
    answers, rewards = look.answers, look.rewards
    if all(answer.ending != "clock" and not answer.text.strip() for answer in answers):
        yield (
            "every answer is empty. A plain prompt ends where the answer begins, without a space "
            "(dataset.chat=False), and examples show one (dataset.examples=3)"
        )
    elif rewards and min(rewards) == max(rewards):
        yield (
            f"every answer earned {rewards[0]:g}: where all genomes earn the same nothing is "
            "learned. Show the form of an answer in the prompt (dataset.examples=3), reward parts "
            "of one, or take easier rows"
        )
    if sampling.stop and all(answer.ending == "length" for answer in answers):
        yield (
            f"no answer came to sampling.stop={json.dumps(sampling.stop)}; all go on to "
            f"sampling.max_tokens={sampling.max_tokens}"
        )


def told(config: Config, sizes: Sizes) -> str:
    """How long a run of these sizes takes."""
    problems = sizes.num_rollouts // config.optimizer.population_size
    return (
        f"a generation of {config.optimizer.population_size} genomes x {plural(problems, 'answer')}"
        f" of about {plural(round(sizes.length), 'token')} (at most {config.sampling.max_tokens}) "
        f"takes about {duration_in_words(sizes.generation)} here, all "
        f"{plural(config.num_generations, 'generation')} with their evaluations about "
        f"{duration_in_words(sizes.run)}"
    )


def as_options(chosen: Mapping[str, object]) -> str:
    """Options to paste into a shell."""
    return shlex.join(
        f"{path}={json.dumps(value) if isinstance(value, tuple) else value}"
        for path, value in chosen.items()
    )
