"""Single-turn problems: a question, one answer, a grade.

Subclass `ProblemEnv`, write `grade`, and put `functools.partial(YourEnv, observation, ...)` into a
`ProblemGroupBuilder`. The prompt is tokenized once per problem (`render_prompt`), not once per
rollout: a generation makes thousands of Envs, all on one event loop.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import traceback
import weakref
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.errors import ConfigError, DataError, EnvError, own_frames
from es_cookbook.common.terminal import plural
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.encoder import Controls, framed, inside, plain
from es_cookbook.rl.messages.message import Message, with_system
from es_cookbook.rl.messages.message_env import MessageEnv, Script
from es_cookbook.rl.messages.renderer import Renderer
from es_cookbook.rl.messages.template import ChatTemplate
from es_cookbook.rl.messages.thoughts import whole_turn
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    Logs,
    Metrics,
    Observation,
    Reading,
    StepResult,
    Tokenizer,
    Trajectory,
)

logger = logging.getLogger(__name__)

_MOST_SHOWN = 8
"""Unknown characters that are named."""
_MAGIC = b"es_cookbook digests of training problems 1\n"
_DIGEST = np.dtype("<u8")


class Grade(StepResult):
    """What an answer earned: a `StepResult` that ends the rollout."""

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


class ProblemEnv(Env):
    """One question, one answer, one grade.

    >>> class Parrot(ProblemEnv):
    ...     def grade(self, text: str) -> Grade:
    ...         return Grade(reward=float(text == "hello"))
    """

    full_reward: float = 1.0
    """What a perfect answer earns; `RLDataset.validate` compares gold answers with it."""
    gold_hint: str = ""
    """What to tell a user whose gold answer earns less: a clause with its options."""
    opened: str = ""
    """The tag of a thought that the prompt has opened: an answer that does not close it is one."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation

    def grade(self, text: str) -> Grade:
        """Grade an answer, in microseconds: it runs on the event loop, once per rollout.

        What takes longer overrides `graded` and awaits `es_cookbook.rl.grading.workers.in_worker`.
        """
        raise EnvError(f"{type(self).__name__} has no `grade`: await `graded`, which it overrides")

    async def graded(self, text: str) -> Grade:
        """Grade an answer, where that may wait for something; by default `grade`."""
        return self.grade(text)

    async def initial_observation(self) -> Observation:
        """The question, of which nothing need be kept once it is answered."""
        return dataclasses.replace(self.observation, is_last=True)

    async def step(self, action: Action) -> StepResult:
        return await self.graded(whole_turn(action.text, self.opened))


@dataclasses.dataclass(frozen=True, slots=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """One problem.

    Attributes:
        make_env: makes one fresh Env, of one turn or of many; a `functools.partial` of an
            importable class, so that the builder pickles.
        name: what error messages call the problem, for example "train.jsonl, line 3".
        gold: an answer that must earn the Env's full reward, where one is known; for a
            `MessageEnv` of several turns a text for each.
        problem_tags: names under which the problem's metrics are reported, in addition to `all`.
        contents: digests of what the problem is, whatever its prompt.
        usual_stop: texts that end an answer where `SamplingParams.stop` is None.
        opened: the tag of a thought that the prompt has opened (`opened_thought`).
        accepted: in place of `gold` several answers, of which the best must earn the reward.
    """

    make_env: Callable[[], Env]
    name: str
    gold: str | tuple[str, ...] | None = None
    problem_tags: tuple[str, ...] = ()
    contents: tuple[int, ...] = ()
    usual_stop: tuple[str, ...] = ()
    opened: str = ""
    accepted: tuple[str, ...] = ()

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Fresh Envs that share nothing but the problem."""
        envs = [self.make_env() for _ in range(num_envs)]
        for env in envs if self.usual_stop or self.opened else ():
            if isinstance(env, ProblemEnv):
                env.observation = dataclasses.replace(env.observation, usual_stop=self.usual_stop)
                env.opened = self.opened
        return EnvGroup(envs)

    @property
    def tags(self) -> tuple[str, ...]:
        return self.problem_tags

    @property
    def digests(self) -> tuple[int, ...]:
        """Of its contents, and of its prompt where it has one turn."""
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
        elif self.accepted:
            with self._named():
                await self._check_accepted()

    async def prompt_length(self, context_length: int = 2**20) -> int | None:
        """Tokens of its first prompt; None where only a rollout can tell.

        Raises:
            DataError: The Env has no first prompt; names the problem.
        """
        with self._named():
            env = self.make_env()
            if isinstance(env, MessageEnv):
                env.policy = Script((), env.chat.tokenizer, context_length)
            return len((await env.initial_observation()).tokens_T)

    @contextlib.contextmanager
    def _named(self) -> Generator[None]:
        """Inside, an Env's error is one of the data, with the problem's name and own lines."""
        try:
            yield
        except EnvError as error:
            said = str(error).removeprefix(f"{self.name}: ")  # A reward names its row itself.
            frames = own_frames("".join(traceback.format_exception(error)))
            raise DataError(f"{self.name}: {said}\n{frames}".rstrip()) from error

    async def told_gold(self, tokenizer: Tokenizer, context_length: int = 2**20) -> Trajectory:
        """The rollout of a policy that knows the gold answer.

        Raises:
            EnvError: The Env broke its contract.
        """
        assert self.gold is not None, "asked of problems that have one"
        texts = (self.gold,) if isinstance(self.gold, str) else self.gold
        script = Script(texts, tokenizer, context_length, closes_thoughts=True)
        return await run_rollout(self.make_env(), script)

    async def check_said(self, texts: AnswerTexts, stop: tuple[str, ...] | None) -> int:
        """Grade its gold answers as a model says them; that of several turns is so by `check`.

        Args:
            texts: of the model's tokenizer.
            stop: of the sampling parameters.

        Returns:
            How many of several the model cannot say; it can say another that is as good.

        Raises:
            DataError: All earn less than as texts; says what is lost on the way.
        """
        env, stop = self.make_env(), self.usual_stop if stop is None else stop
        golds = (self.gold,) if isinstance(self.gold, str) else self.accepted
        said = {gold: texts.said(gold, stop) for gold in golds}
        if not isinstance(env, ProblemEnv) or all(gold == left for gold, left in said.items()):
            return 0
        with self._named():
            worth = {gold: (await env.graded(gold)).reward for gold in said}
            earned = {gold: (await env.graded(left)).reward for gold, left in said.items()}
        lost = [each for each in worth if _is_less(earned[each], worth[each])]
        best = max(worth, key=worth.__getitem__)
        if all(_is_less(each, worth[best]) for each in earned.values()):
            self._refuse(best, said[best], texts, f"earns {earned[best]:g} of {worth[best]:g}")
        return len(lost)

    def _refuse(self, gold: str, left: str, texts: AnswerTexts, earns: str) -> NoReturn:
        why = texts.lost_in(gold) or "the model's tokenizer does not keep all its characters"
        if texts.said(gold) == gold:
            why = (
                "sampling.stop ends it before its end ([] ends answers nowhere; else take such "
                "rows out of the source, since on_bad_row does not know sampling.stop)"
            )
        raise DataError(
            f"{self.name}: the model cannot say its own solution {gold!r:.200}: {why}; what is "
            f"left, {left!r:.200}, {earns}"
        )

    async def _check_accepted(self) -> None:
        env = self.make_env()
        if not isinstance(env, ProblemEnv):
            return
        earned = {gold: (await env.graded(gold)).reward for gold in self.accepted}
        best = max(earned, key=earned.__getitem__)
        if not math.isclose(earned[best], env.full_reward):
            raise DataError(
                f"{self.name}: none of its own solutions earns {env.full_reward:g}; the best, "
                f"{best!r:.200}, earns {earned[best]:g}{env.gold_hint}"
            )

    async def _check_gold(self, gold: str | tuple[str, ...], context_length: int) -> None:
        env, hint = self.make_env(), ""
        if isinstance(env, MessageEnv):
            told = await self.told_gold(env.chat.tokenizer, context_length)
            earned, full_reward = told.reward, env.full_reward
            lost = AnswerTexts(env.chat.tokenizer).lost_in("".join(gold))
            hint = lost and f": {lost}"
        elif isinstance(env, ProblemEnv):
            earned, full_reward = (await env.graded(str(gold))).reward, env.full_reward
            hint = env.gold_hint
        else:
            return
        if not math.isclose(earned, full_reward):
            raise DataError(
                f"{self.name}: its own solution earns {earned:g} of {full_reward:g}: "
                f"{gold!r:.200}{hint}"
            )


def _is_less(earned: float, worth: float) -> bool:
    return earned < worth and not math.isclose(earned, worth)


def with_gold(asked: EnvGroupBuilder, use: str) -> ProblemGroupBuilder:
    """The problem, if it has a gold answer.

    Args:
        asked: any problem.
        use: what of a gold answer the user asked for; follows "which" in the sentence.

    Raises:
        DataError: It has none; names the problem.
    """
    if isinstance(asked, ProblemGroupBuilder) and asked.gold is not None:
        return asked
    name = getattr(asked, "name", type(asked).__name__)
    raise DataError(f"{name}: it has no gold answer, which {use}")


def check_prompt(name: str, length: int, context_length: int) -> None:
    """Refuse a prompt of so many tokens if nothing is left of the context for an answer.

    Raises:
        DataError: Names the problem.
    """
    if length >= context_length:
        raise DataError(
            f"{name}: its prompt of {plural(length, 'token')} leaves no room in the engine's "
            f"context of {plural(context_length, 'token')}; shorten the prompt or raise "
            "engine.max_model_len"
        )


def digest_of(content: str | Sequence[int]) -> int:
    """64 bits (BLAKE2b) that stand for a text, or for a prompt's tokens."""
    is_text = isinstance(content, str)
    data = content.encode("utf-8", "replace") if is_text else array("q", content).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedOn:
    """What a run trains on: digests of all its problems, sorted, each once.

    Enough to say which problems of an evaluation are not held out. A problem has a digest of its
    own content and, where it is known, of its prompt (`EnvGroupBuilder.digests`); two that share
    one are the same problem, however they are asked.
    """

    digests: NDArray[np.uint64]

    @staticmethod
    def of(digests_P: Iterable[tuple[int, ...]]) -> "TrainedOn | None":
        """Of each problem's digests; None where there is no problem, or one has none."""
        found = array("Q")
        for digests in digests_P:
            if not digests:
                return None
            found.extend(digests)
        return TrainedOn(np.unique(np.array(found, np.uint64))) if found else None

    def and_of(self, other: "TrainedOn") -> "TrainedOn":
        """All that the one or the other has."""
        return TrainedOn(np.union1d(self.digests, other.digests))

    def overlap(self, digests_P: Iterable[tuple[int, ...]]) -> int | None:
        """How many of some problems are among them; None where one has no digests."""
        count = 0
        for digests in digests_P:
            if not digests:
                return None
            count += any(map(self._has, digests))
        return count

    def _has(self, digest: int) -> bool:
        place = int(np.searchsorted(self.digests, np.uint64(digest)))
        return place < len(self.digests) and int(self.digests[place]) == digest

    def encode(self) -> bytes:
        """A line that says what it is, then 8 bytes for each digest, little end first, sorted."""
        return _MAGIC + self.digests.astype(_DIGEST).tobytes()

    @staticmethod
    def decode(data: bytes) -> "TrainedOn | None":
        """What `encode` made; None of anything else."""
        found = data.removeprefix(_MAGIC)
        if len(found) == len(data) or len(found) % _DIGEST.itemsize:
            return None
        return TrainedOn(np.frombuffer(found, _DIGEST).astype(np.uint64))


PREFILL_DOC = "text after the chat template, with which every answer begins: '<think>'"


def render_prompt(
    tokenizer: Tokenizer,
    question: str | None,
    *,
    chat: bool,
    system: str = "",
    prefill: str = "",
    most: int | None = None,
    before: Sequence[Message] = (),
    tools: Sequence[ToolSchema] = (),
) -> tuple[int, ...]:
    """The prompt as tokens.

    With `chat` a chat up to the assistant's turn, by the tokenizer's own template, if it has one;
    else plain text, in which a blank line separates the system message from the question. The name
    of a control token in the question is text in a chat, and that token in plain text. That is said
    once a name, and what the tokenizer does not know once a character: the model cannot see it.

    Args:
        tokenizer: the model's own.
        question: what the user asks; None: the chat ends with the last message of `before`.
        chat: use the template.
        system: message before the question; empty for none.
        prefill: text behind all that, with which the answer begins.
        most: tokens that are wanted: the question loses its beginning until all of it fits. It is
            longer where everything but the question is.
        before: messages of the chat before the question.
        tools: that the template is to show.

    Raises:
        ModelError: The template cannot render the chat; says why.
        ConfigError: The template ends in the prefill itself, or there are messages and no template.
    """
    _tell_unknown(tokenizer, f"{system}{question or ''}{prefill}")
    is_chat = chat and tokenizer.chat_template is not None
    if (before or tools) and not is_chat:
        raise ConfigError("a chat of several messages needs chat=True and a model's chat template")
    said = "\n".join([*(message.content for message in before), question or ""])
    _tell_control(tokenizer, said, ChatTemplate.of(tokenizer) if is_chat else None)

    def rendered(question: str | None) -> tuple[int, ...]:
        if is_chat:
            last = [] if question is None else [Message("user", question)]
            chat = with_system(system, [*before, *last])
            template = ChatTemplate.of(tokenizer)
            if tools:
                template = Renderer.best(tokenizer, tools, keep_history=True)
            text = template.text(chat)
            if prefill.strip() and text.rstrip().endswith(prefill.rstrip()):
                raise ConfigError(
                    f"prefill={prefill!r}: the model's chat template already ends in it; leave it "
                    "out"
                )
            return framed(tokenizer, text + prefill)
        opening = f"{system}\n\n" if system else ""
        return plain(tokenizer, f"{opening}{question or ''}{prefill}")

    tokens_T = rendered(question)
    if question is None or most is None or len(tokens_T) <= most:
        return tokens_T
    left_T = inside(tokenizer, question, split_special_tokens=is_chat)
    while left_T and len(tokens_T) > most:
        left_T = left_T[len(tokens_T) - most :]
        left = tokenizer.decode(list(left_T), clean_up_tokenization_spaces=False)
        tokens_T = rendered(str(left).lstrip("\ufffd"))  # Half of a character.
    return tokens_T


_told: "weakref.WeakKeyDictionary[Tokenizer, set[tuple[str, bool]]]" = weakref.WeakKeyDictionary()
"""Names of control tokens that a user was told of, in plain text or in chats."""


def _tell_control(tokenizer: Tokenizer, question: str, template: ChatTemplate | None) -> None:
    """Say that a question names a control token, or has been put into the template before."""
    name, told = Controls.of(tokenizer).named_in(question), _told.setdefault(tokenizer, set())
    if name is None and template is not None and template.looks_framed(question):
        name = question.lstrip()[:20]
    if name is None or (key := (name, template is None)) in told:
        return
    told.add(key)
    if template is None:
        logger.warning("%r in %.60r is read as that control token of the model", name, question)
        return
    logger.warning(
        "%r in %.60r belongs to the model's chat template, and is shown to the model as text; "
        "questions that have been put into the template before need chat=False",
        *(name, question),
    )


_characters: "weakref.WeakKeyDictionary[Tokenizer, set[str]]" = weakref.WeakKeyDictionary()
"""Those that a tokenizer was asked about."""


def _tell_unknown(tokenizer: Tokenizer, text: str) -> None:
    asked = _characters.setdefault(tokenizer, set())
    new = set(text) - asked
    asked |= new
    unknown = [character for character in sorted(new) if not _is_known(tokenizer, character)]
    if unknown:  # Alone; a tokenizer of words may know them inside of words.
        seen = set(str(tokenizer.decode(list(inside(tokenizer, text)))))
        unknown = [character for character in unknown if character not in seen]
    if unknown:
        shown = ", ".join(map(repr, unknown[:_MOST_SHOWN]))
        more = f" and {len(unknown) - _MOST_SHOWN} more" if len(unknown) > _MOST_SHOWN else ""
        logger.warning(
            "the model's tokenizer does not know %s%s: the model does not see them in %.60r",
            *(shown, more, text),
        )


def _is_known(tokenizer: Tokenizer, character: str) -> bool:
    tokens_T = inside(tokenizer, character)
    return character.isspace() or (bool(tokens_T) and tokens_T != (tokenizer.unk_token_id,))
