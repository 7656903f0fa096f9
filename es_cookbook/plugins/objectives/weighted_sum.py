"""Several shared rewards at once: their weighted sum, and each of them as a metric by its name.

    reward=sum reward.rewards=exact,format reward.weights=1,0.1 reward.exact.fold_case=False

A row may name its own rewards in place of those, in its field `reward`: a name, or a list of names.
So one data set can hold problems that are graded in different ways. A row has names of shared
rewards only: data must not choose which code runs.

The sum is fixed before a generation: a reward with a large spread outweighs one with a small
spread, for all weights.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, TypeVar, cast

import chz
from typing_extensions import override

from es_cookbook.common.errors import ConfigError, DataError, EnvError, ESCookbookError, nearest
from es_cookbook.common.trust import load
from es_cookbook.rl.rewards.base import (
    REWARD_NAMES,
    Fields,
    Reward,
    Score,
    check_weights,
    reward_and_metrics,
)

_T = TypeVar("_T")


def _rewards() -> Iterator[tuple[str, type[Reward]]]:
    """Yield all rewards that can be imported; naming another one reports why it cannot."""
    for name in REWARD_NAMES:
        with contextlib.suppress(ConfigError):
            if name != "sum":
                yield name, cast("type[Reward]", load(REWARD_NAMES[name]))


_PARTS = dict(_rewards())
ROW_FIELD = "reward"
"""The field in which a row names its own rewards."""


def _with_parts(cls: type[_T]) -> type[_T]:
    """Add each reward's options, as a field of its name."""
    cls.__annotations__ = {**cls.__annotations__, **_PARTS}
    for name, part in _PARTS.items():
        setattr(cls, name, chz.field(default_factory=part, doc=f"options of the reward {name}"))
    return cls


@chz.chz
@_with_parts
class WeightedSum(Reward):
    """Σ weight · reward over some of the shared rewards.

    >>> both = WeightedSum(rewards=("exact", "format"), weights=(1.0, 0.5))
    >>> both("<think>so</think><answer>4</answer>", {"answer": "4"})
    (1.5, {'exact': 1.0, 'format': 1.0})
    >>> both("<answer>4.0</answer>", {"answer": "4", "reward": "number"})
    (1.0, {'number': 1.0})
    """

    rewards: tuple[str, ...] = chz.field(
        default=("exact",), doc="names of rewards; a row's own field `reward` goes before"
    )
    weights: tuple[float, ...] = chz.field(
        default=(), doc="one for each of the rewards; none: 1 each, as for those a row names alone"
    )

    @chz.validate
    def _valid(self) -> None:
        if not self.rewards:
            raise ConfigError(f"rewards must be at least one of {', '.join(_PARTS)}")
        for name in self.rewards:
            if name not in _PARTS:
                raise ConfigError(f"rewards: unknown {name!r}: {nearest(name, _PARTS)}")
        if len(set(self.rewards)) < len(self.rewards):
            raise ConfigError(f"rewards must differ, found {','.join(self.rewards)}")
        if self.weights:
            check_weights(self.rewards, weights=self.weights)

    def _parts(self) -> Mapping[str, Reward]:
        return {name: getattr(self, name) for name in _PARTS}

    @override
    def __call__(self, text: str, row: Fields) -> Score:
        """Return the sum, and each reward by its name, computed in this process."""
        return self._sum({name: part(text, row) for name, part in self._of(row)})

    @override
    async def grade(self, text: str, row: Fields) -> Score:
        scores: dict[str, Score] = {}
        for name, part in self._of(row):
            try:
                scores[name] = await part.grade(text, row)
            except ESCookbookError as error:
                raise EnvError(f"{name}: {error}") from error
        return self._sum(scores)

    @override
    def read(self, text: str, row: Fields) -> str | None:
        """Return the answer that the first reward to find one reads."""
        found = (part.read(text, row) for _, part in self._of(row))
        return next((answer for answer in found if answer is not None), None)

    @override
    def after(self, prompt: str) -> Self:
        parts = self._parts().items()
        moved = {name: new for name, part in parts if (new := part.after(prompt)) is not part}
        return chz.replace(self, **moved) if moved else self

    @override
    def check(self) -> None:
        for name in self.rewards:
            self._parts()[name].check()

    @override
    def check_row(self, row: Fields) -> None:
        for name, part in self._of(row):
            part.check()  # A row may have named it itself.
            try:
                part.check_row(row)
            except DataError as error:
                raise DataError(f"reward {name!r}: {error}") from None

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        weights = dict(zip(self.rewards, self.weights or (1.0,) * len(self.rewards), strict=True))
        rewards: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for name, score in scores.items():
            rewards[name], own = reward_and_metrics(score)
            metrics |= own
        total = math.fsum(weights.get(name, 1.0) * reward for name, reward in rewards.items())
        return total, metrics | rewards

    def _of(self, row: Fields) -> Iterator[tuple[str, Reward]]:
        """Yield the rewards of a row, with their names."""
        parts = self._parts()
        for name in self._named_by(row):
            if name not in parts:
                raise DataError(f"field {ROW_FIELD!r}: unknown {name!r}: {nearest(name, parts)}")
            yield name, parts[name]

    def _named_by(self, row: Fields) -> Sequence[str]:
        found = row.get(ROW_FIELD)
        if found is None:
            return self.rewards
        names = [found] if isinstance(found, str) else found
        items = cast("list[object]", names) if isinstance(names, list | tuple) else []
        if not items or not all(isinstance(item, str) for item in items):
            raise DataError(
                f"field {ROW_FIELD!r} must be a reward's name, or a list of names, found "
                f"{found!r:.60}"
            )
        return list(dict.fromkeys(cast("list[str]", items)))
