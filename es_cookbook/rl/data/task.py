"""A task that is a prompt and a score: rows, a template, and a function. No class is needed.

    def score(text, row):
        return float(text.strip() == row["answer"])

    Task(source="rows.jsonl", prompt="{question}", reward=score)

The function gets the answer's text and the row, and returns a number, or a number and metrics to
report beside it; it may be `async`. It runs on the event loop, once per rollout: what takes longer
than microseconds awaits `es_cookbook.rl.grading.workers.in_worker`.
"""

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from string import Formatter
from typing import TypeAlias, cast

import chz
from typing_extensions import override

from es_cookbook.common.configs import Functions
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.rl.data.row_dataset import RowDatasetBuilder
from es_cookbook.rl.data.rows import Fields, Row
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, render_prompt
from es_cookbook.rl.types import Observation, Tokenizer

Score: TypeAlias = float | tuple[float, Mapping[str, float]]
"""The reward of an answer; with it, numbers to average over rollouts."""
Reward: TypeAlias = Callable[..., object]
"""`(text: str, row: Mapping[str, object]) -> Score | Awaitable[Score]`."""


@chz.chz
class Task(RowDatasetBuilder):
    """Rows that are asked by a template and scored by a function."""

    prompt: str = chz.field(
        default="{question}", doc="what the model is asked: text with fields of the row in braces"
    )
    reward: Reward = chz.field(
        meta_factory=Functions(),
        doc="scores an answer: my_module:function or path/to/script.py:function, which gets the "
        "text and the row",
    )
    system: str = chz.field(default="", doc="system message before the prompt; empty: none")
    chat: bool = chz.field(
        default=True, doc="put the prompt into the tokenizer's chat template, if it has one"
    )
    full_reward: float | None = chz.field(
        default=1.0,
        doc="what a row's own `answer` must earn, where it has one; None: it is not scored",
    )
    tag: str | None = chz.field(
        default=None, doc="field of the row under whose values metrics are reported as well"
    )

    @chz.validate
    def _template(self) -> None:
        _fields_of(self.prompt)

    @override
    def key(self, row: Row) -> str:
        return self._question(row)

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        tokens_T = render_prompt(tokenizer, self._question(row), chat=self.chat, system=self.system)
        answer = row.fields.get("answer")
        checked = self.full_reward is not None and isinstance(answer, str | int | float)
        given = Observation(tokens_T), self.reward, row, self.full_reward
        return ProblemGroupBuilder(
            functools.partial(TaskEnv, *given),
            row.where,
            gold=str(answer) if checked else None,
            problem_tags=(str(row.value(self.tag)),) if self.tag else (),
        )

    def _question(self, row: Row) -> str:
        return "".join(
            literal + ("" if field is None else str(row.value(field)))
            for literal, field in _fields_of(self.prompt)
        )


def _fields_of(template: str) -> list[tuple[str, str | None]]:
    """The pieces of a template: text, and the name of the field that follows it.

    Raises:
        ConfigError: It is none, or asks for more than a field.
    """
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt={template!r:.80}: {error}; write {{{{ for a brace") from error
    for _, field, form, conversion in pieces:
        if field is not None and (not field.isidentifier() or form or conversion):
            raise ConfigError(
                f"prompt={template!r:.80}: in braces stands the name of one field of the row, "
                f"found {field!r:.40}; write {{{{ for a brace"
            )
    return [(literal, field) for literal, field, _, _ in pieces]


class TaskEnv(ProblemEnv):
    """One row: its prompt, and the function that scores the answer."""

    def __init__(
        self, observation: Observation, reward: Reward, row: Row, full_reward: float | None
    ) -> None:
        super().__init__(observation)
        self._reward, self._row = reward, row
        if full_reward is not None:
            self.full_reward = full_reward

    @override
    def grade(self, text: str) -> Grade:
        found = self._scored(text)
        if inspect.isawaitable(found):
            if inspect.iscoroutine(found):
                found.close()
            raise EnvError(f"{self._name}: it is async, so `graded` is what to await")
        return self._grade(found)

    @override
    async def graded(self, text: str) -> Grade:
        found = self._scored(text)
        if inspect.isawaitable(found):
            try:
                found = await cast("Awaitable[object]", found)
            except Exception as error:  # Whatever the user's function raises.
                raise self._raised(error) from error
        return self._grade(found)

    def _scored(self, text: str) -> object:
        fields: Fields = self._row.fields
        try:
            return self._reward(text, fields)
        except Exception as error:  # Whatever the user's function raises.
            raise self._raised(error) from error

    def _grade(self, found: object) -> Grade:
        score, metrics = found, {}
        if isinstance(found, tuple) and len(cast("tuple[object, ...]", found)) == 2:
            score, metrics = cast("tuple[object, object]", found)
        if not _is_number(score) or not isinstance(metrics, Mapping):
            raise EnvError(
                f"{self._name} must return a finite number, or one and a dict of metrics, found "
                f"{found!r:.80}"
            )
        named = cast("Mapping[object, object]", metrics)
        for name, value in named.items():
            if not isinstance(name, str) or not _is_number(value):
                raise EnvError(
                    f"{self._name}: a metric is a name and a finite number, found {name!r:.40}: "
                    f"{value!r:.40}"
                )
        return Grade(
            float(cast(float, score)),
            {cast(str, name): float(cast(float, value)) for name, value in named.items()},
        )

    @property
    def _name(self) -> str:
        called = getattr(self._reward, "__qualname__", None) or repr(self._reward)
        return f"{self._row.where}: reward {called}"

    def _raised(self, error: Exception) -> EnvError:
        said = " ".join(str(error).split())
        return EnvError(f"{self._name} raised {type(error).__name__}: {said:.200}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
