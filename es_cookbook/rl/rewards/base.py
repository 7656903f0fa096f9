"""Reward functions over rows: the interface, the shared ones by name, and the check of a result.

A reward function is called as `reward(text, row)`: `text` is a model's whole answer, and `row` the
fields of the problem's row. It returns a number, or a number and metrics to report beside it.
Any function that can be imported by its name is one. The shared ones are `Reward`s: chz objects
with options, so `reward=number reward.tolerance=0.01` works on a command line, and they pickle.

An Env awaits `graded`, which calls either kind. Slow grading then runs in a worker process,
and an invalid result is refused in a sentence with the reward's name and the row's origin.

Left out: NaN as a reward. A score that is lost, for example because a judge did not answer, is an
exception: it loses the rollout, whose reward is then NaN.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from typing import Self, TypeAlias, cast

import chz

from es_cookbook.common.checks import check_types
from es_cookbook.common.errors import ConfigError, EnvError, ESCookbookError
from es_cookbook.common.registry import Registered
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.rollouts import check_metrics, is_measured, shown
from es_cookbook.rl.types import ANSWER, Metrics

Fields: TypeAlias = Mapping[str, object]
"""A row: field -> value."""
Score: TypeAlias = float | tuple[float, Metrics]
"""A reward, or a reward and metrics."""
RewardFunction: TypeAlias = Callable[..., object]
"""`(text: str, row: Fields) -> Score | Awaitable[Score]`."""

REWARD_NAMES = Registered("rewards")
"""Names on the command line."""


@chz.chz
class Reward(ABC):
    """A shared reward function."""

    _types = chz.validate(check_types)

    @abstractmethod
    def __call__(self, text: str, row: Fields) -> Score:
        """Return the reward of an answer to a row.

        Raises:
            DataError: The row lacks what the reward needs.
        """

    async def grade(self, text: str, row: Fields) -> Score:
        """Return the reward in an Env; override it to run slow grading in a worker process."""
        return self(text, row)

    def read(self, text: str, row: Fields) -> str | None:
        """Return the answer as text, the same for equivalent answers; None if there is none.

        Attempts vote by it; by default None.
        """
        return None

    def after(self, prompt: str) -> Self:
        """Return the reward for answers to a prompt that ends in this text; unchanged by default.

        A reward that expects a tag at an answer's start does not if the prompt ends in it.
        """
        return self

    def check(self) -> None:
        """Check, before a run, that answers can be graded on this machine; by default nothing.

        Raises:
            ConfigError: What is missing.
        """
        return

    def check_row(self, row: Fields) -> None:
        """Refuse a row that lacks what the reward needs.

        Raises:
            DataError: What is missing or wrong.
        """
        self("", row)


async def graded(reward: RewardFunction, text: str, row: Fields, where: str) -> Grade:
    """Grade an answer by any reward function.

    Args:
        reward: a function, `async` or not, or a `Reward`; a function is called on the event loop.
        text: the model's whole answer.
        row: the problem's row.
        where: name of the row in sentences, for example "train.jsonl, line 3".

    Raises:
        EnvError: It raised, or returned something else than a finite number, alone or with finite
            metrics; names the reward and the row.
    """
    who = f"{where}: reward {name_of(reward)!r}"
    try:
        found = reward.grade(text, row) if isinstance(reward, Reward) else reward(text, row)
        if inspect.isawaitable(found):
            found = await cast("Awaitable[object]", found)
    except ESCookbookError as error:
        raise EnvError(f"{who}: {error}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split()):.200}".removesuffix(": ")
        raise EnvError(f"{who} raised {said}") from error
    try:
        value, metrics = reward_and_metrics(found)
    except EnvError as error:
        raise EnvError(f"{who} {error}") from None
    answer = reward.read(text, row) if isinstance(reward, Reward) else None
    return Grade(value, metrics, None if answer is None else {ANSWER: answer})


def reward_and_metrics(found: object) -> tuple[float, Metrics]:
    """Check what a reward function returned.

    A number is one of Python's, NumPy's or torch's; a truth value counts as 0 or 1.

    Raises:
        EnvError: Neither a finite number nor one with finite metrics.
    """
    value, metrics = found, cast(object, {})
    if isinstance(found, tuple) and len(cast("tuple[object, ...]", found)) == 2:
        value, metrics = cast("tuple[object, object]", found)
    value = _plain(value)
    if isinstance(metrics, Mapping):
        entries = cast("Mapping[object, object]", metrics)
        metrics = {name: _plain(each) for name, each in entries.items()}
    if not is_measured(value):
        raise EnvError(f"must return a finite number, or one and metrics, found {shown(found)}")
    check_metrics("must return", metrics)
    return float(cast(float, value)), cast(Metrics, metrics)


def _plain(value: object) -> object:
    """Convert a number of NumPy or torch, or a `Decimal`, to Python's own; else return it as it is.

    An array or a tensor without axes is one; one of shape [1] is a list.
    """
    if type(value) in (float, int, bool):
        return value
    if isinstance(value, Decimal):
        return math.nan if value.is_nan() else float(value)
    item: object = getattr(value, "item", None)
    return item() if getattr(value, "shape", None) == () and callable(item) else value


def check_arity(reward: RewardFunction) -> None:
    """Refuse a function that cannot be called as `reward(text, row)`.

    Raises:
        ConfigError: It cannot; says how it is called.
    """
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # Some built-in functions have none.
        return
    try:
        signature.bind("", {})
    except TypeError as error:
        raise ConfigError(
            f"reward: {name_of(reward)}{signature} cannot be called as a reward is, with the "
            f"answer's text and the row, reward(text, row): {error}"
        ) from error


def check_weights(rewards: Sequence[str], **weights: Sequence[float]) -> None:
    """Refuse lists of weights, by their options' names, that are not one for each of the rewards.

    Raises:
        ConfigError: Which, and why.
    """
    for name, values in weights.items():
        if len(values) != len(rewards):
            raise ConfigError(
                f"{name} must be one for each of the {len(rewards)} rewards, found {len(values)}"
            )
        if not all(map(math.isfinite, values)):
            raise ConfigError(f"{name} must be finite, found {values}")


def name_of(reward: RewardFunction) -> str:
    """Return a reward function's name for users: one of `REWARD_NAMES`, or the function's own."""
    kind = type(reward)
    target = f"{kind.__module__}:{kind.__qualname__}"
    own = cast(str, getattr(reward, "__qualname__", kind.__qualname__))
    return next((name for name, known in REWARD_NAMES.items() if known == target), own)
