"""What trackers of other libraries have in common: a readable Config, rollouts as rows of text.

What fails in such a library is a warning, said once; the library is left alone from then on, and
the run goes on. What was measured is in `metrics.jsonl` in any case.
"""

import contextlib
import html
import json
import logging
from collections.abc import Generator, Sequence
from typing import cast

from es_cookbook.common.terminal import printable
from es_cookbook.rl.types import LostRollout, TrajectoryGroup
from es_cookbook.runs.tracking.base import Decode, SampledRollout, choose_rollouts

COLUMNS = ("generation", "problem", "genome", "attempt", "tags", "reward", "prompt", "answer")
"""Of a table of rollouts."""
MAX_CHARS = 2_000
"""Longer prompts and answers are cut in such a table."""

_logger = logging.getLogger(__name__)


class Library:
    """A library that may fail.

    Attributes:
        has_failed: it is to be left alone.
    """

    def __init__(self, name: str) -> None:
        self.has_failed = False
        self._name = name

    @contextlib.contextmanager
    def may_fail(self) -> Generator[None]:
        """Inside, an exception is a warning, and the end of this library's part."""
        try:
            yield
        # These raise anything from their own errors to those of sockets, disks and processes; none
        # of them may stop a run.
        except Exception as error:
            self.has_failed = True
            name = type(error).__name__
            _logger.warning("%s is off for the rest of this run: %s: %s", self._name, name, error)


def readable(config_json: str) -> dict[str, object]:
    """A Config as plain values: a part's class by its name, without its module, as `class`."""
    return cast("dict[str, object]", _readable(json.loads(config_json)))


def _readable(value: object) -> object:
    if isinstance(value, list):
        return [_readable(item) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, object]", value)
    if list(fields) == ["$tuple"]:
        return _readable(fields["$tuple"])
    found = {name: _readable(entry) for name, entry in fields.items()}
    if isinstance(named := found.pop("$class", None), str):
        return {"class": named.rpartition(":")[2], **found}
    return found


def rows_of(
    run_seed: int,
    generation: int,
    groups_P: Sequence[TrajectoryGroup],
    decode: Decode,
    count: int,
) -> list[list[str | int | float]]:
    """So many rollouts of a generation, chosen at random, as rows of `COLUMNS`.

    What a model or an Env wrote is text: control characters are written out, and what would be
    HTML is escaped.
    """
    chosen = choose_rollouts(run_seed, generation, groups_P, count)
    return [_row(generation, sampled, decode) for sampled in chosen]


def _row(generation: int, sampled: SampledRollout, decode: Decode) -> list[str | int | float]:
    rollout, prompt = sampled.rollout, ""
    if isinstance(rollout, LostRollout):
        answer = f"lost: {rollout.reason}"
    else:
        turns: list[str] = []
        for i, transition in enumerate(rollout.transitions):
            said = _cut(decode(rollout.seen[i][1]))
            prompt = prompt or said
            turns += ([f"[{said}]"] if i else []) + [transition.action.text]
        answer = "\n".join(turns)
    return [
        *(generation, sampled.problem, sampled.genome, sampled.attempt),
        *(_text(", ".join(sampled.tags)), sampled.reward, _text(prompt), _text(answer)),
    ]


def _text(text: str) -> str:
    return html.escape(printable(_cut(text)), quote=False)


def _cut(text: str) -> str:
    more = len(text) - MAX_CHARS
    return text if more <= 0 else f"{text[:MAX_CHARS]} [{more} more characters]"
