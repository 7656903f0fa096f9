"""reasoning-gym's generators: the usable ones, their settings, and their problems.

A generator makes problems from a seed and scores answers to them by its own `score_answer`. Not all
of those 106 can be trusted with a model's text, or come out the same twice: `REFUSED` names them,
with the reason, and the tests go over all 106. `score` is what the rest is graded by.

This is the only module that imports reasoning_gym, and only when it is called.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import resource
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, DataError, nearest, not_installed
from es_cookbook.common.seeds import derive_seed

_EXAMPLE = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}


def gold_answer(task: str, entry: Mapping[str, Any]) -> str | None:
    """Return a right answer to a problem of a generator, if one is known.

    Most bring one, and three hide an example in their metadata; `boxnet` and `rush_hour` have none.
    """
    if entry["answer"] is not None:
        return str(entry["answer"])
    if task not in _EXAMPLE:
        return None
    example = entry["metadata"][_EXAMPLE[task]]
    return example if isinstance(example, str) else json.dumps(example)


_PARSES = "its score_answer parses answers with sympy, which evaluates them as Python"
_HASHES = (
    "its problems depend on Python's hash seed, so a run that is resumed would have other problems"
)
REFUSED: Mapping[str, str] = {
    "codeio": "to make a problem it executes programs that a language model wrote",
    "composite": "it is a mixture of the others and makes nothing by itself",
    "countdown": f"{_PARSES}; `es-cookbook countdown` is the same task",
    "intermediate_integration": _PARSES,
    "isomorphic_strings": _HASHES,
    "list_functions": "some of its problems come from Python's global random generator",
    "polynomial_multiplication": f"{_PARSES}; and {_HASHES}",
    "puzzle24": f"{_PARSES}, and accepts other numbers than the problem's",
    "ransom_note": _HASHES,
    "simple_integration": _PARSES,
    "word_ladder": _HASHES,
}
"""Generators that are not used, each with the reason, as half a sentence."""

EXACT = frozenset(
    {"binary_matrix", "game_of_life_halting", "n_queens", "spiral_matrix", "string_insertion"}
)
"""Generators whose answers are compared in place of being scored: their score_answer evaluates an
answer that is not the expected one, in case it is a list, or (the second) gives full marks to any.
"""

TAKES_NAN = frozenset({"complex_arithmetic", "number_sorting"})
"""Generators whose score_answer gives full marks to NaN, or to a list of them."""

CHEAP = frozenset({"chain_sum", "decimal_chain_sum", "products", "spell_backward"})
"""Generators with their own score_answer, which takes microseconds for any answer."""

LONGEST_ANSWER = 10_000
"""Characters; a longer answer scores 0."""
SCORING_BYTES = 1 << 30
"""Memory that scoring may take in addition to what its process has."""
_OWN_OPTIONS = ("seed", "size")
_CHUNK = 256
_STALE_CHUNKS = 4
"""Consecutive chunks without new problems after which a generator counts as exhausted."""

_Dataset: TypeAlias = Any  # reasoning_gym has no types
_Package: TypeAlias = Any


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A generator with its settings.

    Attributes:
        task: its name.
        options: (name, value) pairs that differ from its defaults.
    """

    task: str
    options: tuple[tuple[str, object], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A generated problem: its question, a right answer if known, and data for its score."""

    source: Source
    question: str
    gold: str | None
    entry: Mapping[str, Any]


def usable() -> list[str]:
    """Return the names of the generators that are not refused."""
    return sorted(set(_factory().DATASETS) - set(REFUSED))


def check_source(source: Source) -> None:
    """Refuse a generator that does not exist, cannot be used, or does not fit its settings.

    Raises:
        ConfigError: Names the generator, and what is accepted.
    """
    known = _factory().DATASETS
    if source.task not in known:
        raise ConfigError(f"there is no task {source.task!r}: {nearest(source.task, usable())}")
    if source.task in REFUSED:
        raise ConfigError(f"task {source.task!r} cannot be used: {REFUSED[source.task]}")
    _configured(source, seed=0, size=1)


def problems(source: Source, seed: int) -> Iterator[Problem]:
    """Yield problems in an order that a seed decides, each question once.

    Raises:
        DataError: The generator fails with these settings.
    """
    asked: set[str] = set()
    chunk = last_new = 0
    while chunk - last_new < _STALE_CHUNKS:
        first = derive_seed(seed, f"logic/{source.task}", chunk) % 2**31
        with _failures(source), _quiet():
            dataset = _made(source, first, _CHUNK)
        for i in range(_CHUNK):
            with _failures(source), _quiet():
                entry = dataset[i]
                gold = gold_answer(source.task, entry)
            if entry["question"] not in asked:
                asked.add(entry["question"])
                last_new = chunk
                yield Problem(source, entry["question"], gold, entry)
        chunk += 1


class _Scorer:
    """Scores answers to a generator's problems; unpickling one prepares what scores need."""

    def __init__(self, source: Source) -> None:
        self.source = source
        factory = _factory()
        compares_texts = factory.ProceduralDataset.score_answer  # reasoning-gym's default
        scores = factory.DATASETS[source.task][0].score_answer
        self.is_cheap = source.task in CHEAP | EXACT or scores is compares_texts
        self._dataset: _Dataset = _made(source, 0, 1)

    def __reduce__(self) -> tuple[Callable[[Source], "_Scorer"], tuple[Source]]:
        return scorer, (self.source,)

    def __call__(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Return the score in [0, 1]; raises any error of the generator's function."""
        task = self.source.task
        if len(answer) > LONGEST_ANSWER or (task in TAKES_NAN and "nan" in answer.lower()):
            return 0.0
        if task in EXACT:
            accepted = entry["metadata"].get("valid_answers", [entry["answer"]])
            return float(answer.strip() in [each.strip() for each in accepted])
        found = float(self._dataset.score_answer(answer, dict(entry)))
        return min(max(found, 0.0), 1.0) if math.isfinite(found) else 0.0


@functools.cache
def scorer(source: Source) -> _Scorer:
    """Return a generator's scorer, which is made once."""
    return _Scorer(source)


def score(scorer: _Scorer, answer: str, entry: Mapping[str, Any]) -> float | None:
    """Return the score of an answer; None if the generator's function fails."""
    try:
        return scorer(answer, entry)
    except Exception:
        return None


def score_in_limits(scorer: _Scorer, answer: str, entry: Mapping[str, Any]) -> float | None:
    """Return `score` in a worker process, without output and with limited memory."""
    with _limited_memory(), _quiet():
        return score(scorer, answer, entry)


def parsed_options(task: str, options: Sequence[str]) -> tuple[tuple[str, object], ...]:
    """Parse `name=value` texts; a value is JSON, or else text.

    Raises:
        ConfigError: One is not of that form.
    """
    if wrong := [option for option in options if "=" not in option]:
        raise ConfigError(f"an option of task {task!r} is name=value, found {wrong[0]!r}")
    pairs = (option.partition("=") for option in options)
    return tuple((name, _value(text)) for name, _, text in pairs)


def _value(text: str) -> object:
    try:
        found = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text
    return tuple(cast("list[object]", found)) if isinstance(found, list) else found


def _factory() -> _Package:
    if find_spec("reasoning_gym") is None:
        raise not_installed("the recipe logic", "reasoning-gym", "es-cookbook[logic]")
    with _quiet():
        from reasoning_gym import factory  # pyright: ignore[reportMissingImports]
    return factory


def _configured(source: Source, seed: int, size: int) -> object:
    factory = _factory()
    config_class = factory.DATASETS[source.task][1]
    accepted = {field.name for field in dataclasses.fields(config_class)} - set(_OWN_OPTIONS)
    for name, _ in source.options:
        if name not in accepted:
            raise ConfigError(
                f"task {source.task!r} has no option {name!r}: {nearest(name, accepted)}"
            )
    options = {**dict(source.options), "seed": seed, "size": size}
    try:
        config = config_class(**options)
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        shown = ", ".join(f"{name}={value}" for name, value in source.options)
        raise ConfigError(
            f"{source.task} refuses the options {shown or '(none)'}: {error or 'they do not fit'}"
        ) from None
    return config


def _made(source: Source, seed: int, size: int) -> _Dataset:
    return _factory().DATASETS[source.task][0](config=_configured(source, seed, size))


@contextlib.contextmanager
def _failures(source: Source) -> Generator[None]:
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise DataError(
            f"the generator {source.task} failed with these options ({type(error).__name__}: "
            f"{str(error)[:200]})"
        ) from error


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Suppress output: generators print dots and warnings."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _limited_memory() -> Generator[None]:
    """Limit the memory of scoring on Linux, where more raises MemoryError."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(statm.read_text().split()[0]) * resource.getpagesize() + SCORING_BYTES
    accepted = [each for each in (limit, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(accepted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
