"""Single-turn problems: a question, one answer, a grade.

Subclass `ProblemEnv`, write `grade`, and put `functools.partial(YourEnv, observation, ...)` into a
`ProblemGroupBuilder`. The prompt is tokenized once per problem (`render_observation`), not once per
rollout: a generation makes thousands of Envs, all on one event loop.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import re
import sysconfig
import traceback
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.errors import DataError, EnvError
from es_cookbook.common.terminal import plural
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.thoughts import whole_turn
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    Logs,
    Metrics,
    Observation,
    ProvableEnv,
    Reading,
    SamplingParams,
    StepResult,
)

_MAGIC = b"es_cookbook digests of training problems 1\n"
_DIGEST = np.dtype("<u8")
NEWLINE = ("\n",)
"""Ends answers to plain prompts with examples of one line (`usual_stop`)."""


class Grade(StepResult):
    """Grade of an answer: a `StepResult` that ends the rollout."""

    __slots__ = ()

    def __init__(
        self,
        reward: float,
        metrics: Metrics | None = None,
        logs: Logs | None = None,
        reading: Reading | None = None,
        *,
        done: bool = True,  # These two are for `dataclasses.replace`.
        next_observation: Observation | None = None,
    ) -> None:
        super().__init__(reward, done, next_observation, metrics or {}, logs or {}, reading)


class ProblemEnv(ProvableEnv):
    """One question, one answer, one grade.

    >>> class Parrot(ProblemEnv):
    ...     def grade(self, text: str) -> Grade:
    ...         return Grade(reward=float(text == "hello"))
    """

    gold_hint: str = ""
    """Advice if a gold answer earns less than full reward: a clause with options."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation

    def grade(self, text: str) -> Grade:
        """Grade an answer, in microseconds: it runs on the event loop, once per rollout.

        For slower grading override `graded`, and await `es_cookbook.rl.grading.workers.in_worker`.
        """
        raise EnvError(f"{type(self).__name__} has no `grade`: await `graded`, which it overrides")

    async def graded(self, text: str) -> Grade:
        """Grade an answer, where that may wait for something; by default `grade`."""
        return self.grade(text)

    async def initial_observation(self) -> Observation:
        """Return the question; engines need keep nothing of it after the answer."""
        return dataclasses.replace(self.observation, is_last=True)

    async def step(self, action: Action) -> StepResult:
        return await self.graded(whole_turn(action.text, self.observation.opened))

    @override
    async def try_gold(self, gold: str | tuple[str, ...], context_length: int) -> tuple[float, str]:
        return (await self.graded(str(gold))).reward, self.gold_hint


@dataclasses.dataclass(frozen=True, slots=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """One problem.

    Attributes:
        make_env: makes one fresh Env, of one turn or of many; a `functools.partial` of an
            importable class, so that the builder pickles.
        name: name of the problem in error messages, for example "train.jsonl, line 3".
        gold: an answer that must earn the Env's full reward, where one is known; for a
            `MessageEnv` of several turns a text for each.
        problem_tags: names under which the problem's metrics are reported, in addition to `all`.
        contents: digests of the problem's content, apart from its prompt.
    """

    make_env: Callable[[], Env]
    name: str
    gold: str | tuple[str, ...] | None = None
    problem_tags: tuple[str, ...] = ()
    contents: tuple[int, ...] = ()

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Make Envs that share nothing but the problem."""
        return EnvGroup([self.make_env() for _ in range(num_envs)])

    @property
    def usual_stop(self) -> tuple[str, ...]:
        """Texts that end an answer where `SamplingParams.stop` is None."""
        env = self.make_env()
        return env.observation.usual_stop if isinstance(env, ProblemEnv) else ()

    @property
    def tags(self) -> tuple[str, ...]:
        return self.problem_tags

    @property
    def digests(self) -> tuple[int, ...]:
        """Digests of its contents, and of its prompt if it has one turn."""
        env = self.make_env()
        if not isinstance(env, ProblemEnv):
            return self.contents
        return (*self.contents, digest_of(env.observation.tokens_T))

    @override
    async def check(self, context_length: int) -> None:
        """Check its prompt's length, and grade its gold answer, in this process."""
        length = await self.prompt_length(context_length)
        if length is not None:
            check_prompt(self.name, length, context_length)
        if self.gold is not None:
            with self._named():
                await self._check_gold(self.gold, context_length)

    async def prompt_length(self, context_length: int = 2**20) -> int | None:
        """Return the tokens of the first prompt; None if only a rollout can tell.

        Raises:
            DataError: The Env has no first prompt; names the problem.
        """
        with self._named():
            env = self.make_env()
            if isinstance(env, ProvableEnv):
                return await env.prompt_length(context_length)
            return len((await env.initial_observation()).tokens_T)

    @contextlib.contextmanager
    def _named(self) -> Generator[None]:
        """Turn an Env's error in the block into a `DataError` with the problem's name."""
        try:
            yield
        except EnvError as error:
            said = str(error).removeprefix(f"{self.name}: ")  # A reward names its row itself.
            frames = own_frames("".join(traceback.format_exception(error)))
            raise DataError(f"{self.name}: {said}\n{frames}".rstrip()) from error

    async def check_said(self, texts: AnswerTexts, stop: tuple[str, ...] | None) -> None:
        """Grade its gold answer as a model says it; that of several turns is so by `check`.

        Args:
            texts: texts of the model's tokenizer.
            stop: `stop` of the sampling parameters.

        Raises:
            DataError: It earns less than as a text; says what is lost on the way.
        """
        env, gold = self.make_env(), self.gold
        if not isinstance(env, ProblemEnv) or not isinstance(gold, str):
            return
        left = texts.said(gold, self.usual_stop if stop is None else stop)
        if left == gold:
            return
        with self._named():
            worth, earned = (await env.graded(gold)).reward, (await env.graded(left)).reward
        if earned >= worth or math.isclose(earned, worth):
            return
        why = "its tokenizer does not keep all characters, or leaves special tokens out of answers"
        if texts.said(gold) == gold:
            why = "sampling.stop ends it before its end ([] ends answers nowhere)"
        raise DataError(
            f"{self.name}: the model cannot say its own solution {gold!r:.200}: {why}; what is "
            f"left, {left!r:.200}, earns {earned:g} of {worth:g}"
        )

    async def _check_gold(self, gold: str | tuple[str, ...], context_length: int) -> None:
        env = self.make_env()
        if not isinstance(env, ProvableEnv):
            return
        earned, hint = await env.try_gold(gold, context_length)
        if not math.isclose(earned, env.full_reward):
            raise DataError(
                f"{self.name}: its own solution earns {earned:g} of {env.full_reward:g}: "
                f"{gold!r:.200}{hint}"
            )


def check_prompt(name: str, length: int, context_length: int) -> None:
    """Refuse a prompt that leaves no room in the context for an answer.

    Raises:
        DataError: Names the problem.
    """
    if length >= context_length:
        raise DataError(
            f"{name}: its prompt of {plural(length, 'token')} leaves no room in the engine's "
            f"context of {plural(context_length, 'token')}; shorten the prompt or raise "
            "engine.max_model_len"
        )


def told_stop(sampling: SamplingParams, problems_P: Sequence[EnvGroupBuilder]) -> str:
    """Return a sentence about where answers end, if the problems decide it; else ""."""
    found = {getattr(problem, "usual_stop", ()) for problem in problems_P}
    if sampling.stop is not None or found != {NEWLINE}:
        return ""
    return (
        "answers end at the first newline, since the prompt has examples of one line and no chat "
        "template; sampling.stop=[] lets them go on, and sampling.stop=TEXT ends them elsewhere"
    )


def digest_of(content: str | Sequence[int]) -> int:
    """Return a 64-bit hash (BLAKE2b) of a text, or of a prompt's tokens."""
    is_text = isinstance(content, str)
    data = content.encode("utf-8", "replace") if is_text else array("q", content).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedOn:
    """The problems that a run trains on, as sorted unique digests.

    Enough to say which problems of an evaluation are not held out. A problem has a digest of its
    own content and, where it is known, of its prompt (`EnvGroupBuilder.digests`); two that share
    one are the same problem, however they are asked.
    """

    digests: NDArray[np.uint64]

    @staticmethod
    def of(digests_P: Iterable[tuple[int, ...]]) -> "TrainedOn | None":
        """Collect the digests of all problems; None if there are none, or a problem has none."""
        found_P = list(digests_P)
        if not found_P or not all(found_P):
            return None
        return TrainedOn(np.unique(np.array([*itertools.chain(*found_P)], np.uint64)))

    def and_of(self, other: "TrainedOn") -> "TrainedOn":
        """Return the union of both."""
        return TrainedOn(np.union1d(self.digests, other.digests))

    def overlap(self, digests_P: Iterable[tuple[int, ...]]) -> int | None:
        """Count the problems that are among them; None if one has no digests."""
        found_P, known = list(digests_P), set(self.digests.tolist())
        return sum(not known.isdisjoint(each) for each in found_P) if all(found_P) else None

    def encode(self) -> bytes:
        """Return a header line, then 8 bytes per digest, little-endian, sorted."""
        return _MAGIC + self.digests.astype(_DIGEST).tobytes()

    @staticmethod
    def decode(data: bytes) -> "TrainedOn | None":
        """Read the digests that `encode` wrote; None for any other data."""
        found = data.removeprefix(_MAGIC)
        if len(found) == len(data) or len(found) % _DIGEST.itemsize:
            return None
        return TrainedOn(np.frombuffer(found, _DIGEST).astype(np.uint64))


_PATHS = sysconfig.get_paths()
_NOT_OWN = ("<", str(Path(__file__).parents[1]), *(_PATHS[k] for k in ("stdlib", "purelib")))
"""Path prefixes of files that are not the user's."""
_MOST_FRAMES = 6
"""Frames shown at each end of a long traceback."""


def own_frames(trace: str) -> str:
    """Return the frames of a traceback's first exception that are in the user's own files.

    Frames of this package and of libraries are left out. Endless recursion shows its
    first and last frames.
    """
    first = re.split(r"\n\n(?:The above exception|During handling) ", trace, maxsplit=1)[0]
    frames = re.finditer(r'^ +File "(.+)", line .*\n(?:    .*\n)*', first + "\n", re.MULTILINE)
    own = [each[0] for each in frames if not each[1].startswith(_NOT_OWN)]
    if len(own) > 2 * _MOST_FRAMES:
        own[_MOST_FRAMES:-_MOST_FRAMES] = ["  ...\n"]
    return "".join(own).rstrip()
