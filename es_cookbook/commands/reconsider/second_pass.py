"""The same problem once more: prompt, first answer and a cue, and whatever is answered then.

The second answer alone is graded, by a fresh Env of the problem that sees it as if it were the
first. In a chat the cue is the user's next turn, by the chat template; where a prompt is plain text
the cue follows the answer, without the answer's end of sequence.

An engine tells the log-probability of a sampled token and not the whole distribution. So entropies
are computed apart, once the engine is closed: by a forward pass of transformers in float32, over
the tokens that were sampled, with the weights that sampled them. Of a run these are written as a
model directory for as long as that takes.

Left out: problems of several turns, in which a cue would be one more turn and not a second try.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from es_cookbook.commands.evaluate.measuring import (
    Setting,
    Subject,
    opened,
    problems_of,
    trained_on,
)
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural, say
from es_cookbook.population.evaluate import attempt
from es_cookbook.population.results import Results, problem_names, results_of
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.renderer import SENTINEL, Renderer
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    Observation,
    Policy,
    StepResult,
    Tokenizer,
    Trajectory,
    TrajectoryGroup,
    Transition,
)

_LOGITS_PER_PASS = 1 << 27
"""Half a GiB of them in float32."""


class Cue:
    """A text that asks for a second answer.

    Args:
        tokenizer: the model's own.
        text: the cue.
        chat: whether it is a user's turn; if None where the prompt ends as a chat's does.

    Raises:
        ConfigError: The tokenizer does not know the text.
        ModelError: It is to be a user's turn, and the chat template cannot be used.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, chat: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._chat = chat
        self._plain_T = _known(tokenizer, text)
        wanted = chat or (chat is None and bool(tokenizer.chat_template))
        self._renderer = Renderer(tokenizer, keep_history=True) if wanted else None
        self._opening = ""
        if self._renderer is not None:
            asked = self._renderer.prompt([Message("user", SENTINEL)])
            self._opening = str(tokenizer.decode(list(asked))).partition(SENTINEL)[2]
        added = tokenizer.added_tokens_decoder.items()
        self._special = {i for i, token in added if token.special} | set(tokenizer.all_special_ids)

    def after(self, observation: Observation, action: Action) -> Observation:
        """What the model sees before its second answer."""
        prompt_T, said_T = observation.tokens_T, action.tokens_T
        if self._renderer is not None and self._is_chat(prompt_T):
            added_T = self._renderer.added(
                action, [Message("user", self._text.strip() or self._text)]
            )
            return dataclasses.replace(observation, tokens_T=(*prompt_T, *said_T, *added_T))
        ended = said_T and said_T[-1] in self._special | set(observation.stop_token_ids)
        kept_T = said_T[:-1] if ended else said_T
        return dataclasses.replace(observation, tokens_T=(*prompt_T, *kept_T, *self._plain_T))

    def _is_chat(self, prompt_T: Sequence[int]) -> bool:
        if self._chat is not None:
            return self._chat
        text = str(self._tokenizer.decode(list(prompt_T)))
        return bool(self._opening) and text.endswith(self._opening)


def _known(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The cue's tokens, of which none is unknown; tokenizers may change blanks and capitals."""
    tokens_T = tuple(tokenizer.encode(text, add_special_tokens=False))
    back = str(tokenizer.decode(list(tokens_T)))
    asked, known = ("".join(each.split()).casefold() for each in (text, back))
    if not tokens_T or tokenizer.unk_token_id in tokens_T or asked != known:
        raise ConfigError(
            f"cue={text!r}: the model's tokenizer knows {back!r} of it; give a cue of characters "
            r"that the model has tokens for, such as cue='\n' (a new line)"
        )
    return tokens_T


def first_of_one_turn(name: str, group: TrajectoryGroup) -> Transition | None:
    """The only turn of the first attempt at a problem; None if it was lost.

    Raises:
        ConfigError: It had several.
    """
    ((first,),) = group.trajectories_G_K
    if isinstance(first, LostRollout):
        return None
    if len(first.transitions) != 1:
        raise ConfigError(
            f"{name} took {len(first.transitions)} turns; problems of one turn alone can be "
            "reconsidered"
        )
    return first.transitions[0]


@dataclasses.dataclass(frozen=True, slots=True)
class SecondPass(EnvGroupBuilder):
    """A problem whose first observation comes after a first answer.

    Attributes:
        problem: makes the Envs that grade.
        name: as the problem is called.
        observation: what the model sees; None if there was no first answer, which loses the second.
    """

    problem: EnvGroupBuilder
    name: str
    observation: Observation | None

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return _SecondPassGroup(await self.problem.make_envs(num_envs), self.observation)

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward | LostRollout] | None:
        return await self.problem.compute_group_rewards(trajectories, policies)

    @property
    @override
    def asks_genomes(self) -> bool:
        return self.problem.asks_genomes

    @property
    @override
    def tags(self) -> tuple[str, ...]:
        return self.problem.tags


class _SecondPassGroup(EnvGroup):
    def __init__(self, group: EnvGroup, observation: Observation | None) -> None:
        super().__init__([_SecondPassEnv(env, observation) for env in group.envs])
        self._group = group

    @override
    async def close(self) -> None:
        await self._group.close()


class _SecondPassEnv(Env):
    """The problem's own Env, of which only the first observation is another."""

    def __init__(self, env: Env, observation: Observation | None) -> None:
        self._env = env
        self._observation = observation

    @override
    async def initial_observation(self) -> Observation:
        if self._observation is None:
            raise EnvError("the first answer was lost, so there is none to reconsider")
        self._env.policy = self.policy
        await self._env.initial_observation()  # An Env may prepare there what it grades with.
        return self._observation

    @override
    async def act(self, observation: Observation) -> Action:
        return await self._env.act(observation)

    @override
    async def step(self, action: Action) -> StepResult:
        result = await self._env.step(action)
        if not result.done:
            raise EnvError(
                "the second answer asked for another turn; problems of one turn alone can be "
                "reconsidered"
            )
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One answer as it was given.

    Attributes:
        prompt: all that the model saw before it, as text.
        tokens_T: its tokens, the end of sequence included.
    """

    prompt: str
    text: str
    prompt_T: tuple[int, ...]
    tokens_T: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    """One answer to each problem, and another after the cue; None where one was lost.

    `trained_on` is how many of the problems a run may have trained on; None if that is not known.
    """

    first_P: Sequence[Answer | None]
    second_P: Sequence[Answer | None]
    first: Results
    second: Results
    trained_on: int | None = None


async def both_passes(
    subject: Subject, setting: Setting, cue: str, chat: bool | None = None
) -> Passes:
    """Ask every problem, and ask again.

    The first answers are those of an evaluation, with the same sampling seeds.

    Raises:
        ConfigError: There are no problems, one had several turns, prompt, answer and cue leave no
            room for a second answer, or the tokenizer does not know the cue.
        ESCookbookError: Anything else that the user can put right, in one sentence.
    """
    config, temperature = setting.config, setting.temperature
    async with opened(subject) as (engine, rebuilt):
        asked = Cue(engine.tokenizer, cue, chat)
        problems_P = await problems_of(setting, engine)
        names_P = problem_names(problems_P)
        if rebuilt is not None:
            await rebuilt.go_to(subject.generations[0])
        say(f"asking {plural(len(problems_P), 'problem')}")
        first_P = await attempt(config.sampler(engine), problems_P, 1, temperature)
        again_P: list[SecondPass] = []
        for name, problem, group in zip(names_P, problems_P, first_P, strict=True):
            turn = first_of_one_turn(name, group)
            seen = None if turn is None else asked.after(turn.observation, turn.action)
            if seen is not None and len(seen.tokens_T) >= engine.traits.context_length:
                raise ConfigError(
                    f"{name}: prompt, first answer and cue have {len(seen.tokens_T)} tokens, which "
                    f"leaves no room for a second answer in {engine.traits.context_length} tokens; "
                    "lower sampling.max_tokens, give a shorter cue, or raise engine.max_model_len"
                )
            again_P.append(SecondPass(problem, name, seen))
        say("asking again")
        sampler = config.sampler(engine, seed=derive_seed(config.seed, "second pass"))
        second_P = await attempt(sampler, again_P, 1, temperature)
        return Passes(
            [_answer(engine.tokenizer, each) for each in first_P],
            [_answer(engine.tokenizer, each) for each in second_P],
            results_of(problems_P, first_P),
            results_of(again_P, second_P),
            await trained_on(subject, subject.generations[0], engine, problems_P),
        )


def _answer(tokenizer: Tokenizer, group: TrajectoryGroup) -> Answer | None:
    turn: Transition | None = first_of_one_turn("", group)
    if turn is None:
        return None
    prompt_T, action = turn.observation.tokens_T, turn.action
    return Answer(str(tokenizer.decode(list(prompt_T))), action.text, prompt_T, action.tokens_T)


def entropies(
    subject: Subject, answers_P: Sequence[Answer | None], trust: Sequence[str] = ()
) -> list[tuple[float, ...] | None]:
    """Of the distribution over all tokens at each token of an answer, in nats; None if lost.

    At temperature 1 and without top-p, however the tokens were sampled.

    Raises:
        ModelError: transformers cannot load the model.
        HistoryError: The run's centre cannot be rebuilt.
    """
    say("measuring entropies")
    answers = [answer for answer in answers_P if answer is not None]
    if subject.run is None:
        found = iter(_entropies(subject.model_name, answers))
    else:
        from es_cookbook.runs.export.export import write_export
        from es_cookbook.runs.replay import open_replay

        log_path, name = subject.run.history.parent, subject.run.model_name
        replay = open_replay(log_path, subject.generations[0], model_name=name, trust=trust)
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / "model"
            write_export(replay, model, merge=True)
            found = iter(_entropies(str(model), answers))
    return [None if each is None else next(found) for each in answers_P]


def _entropies(model_name: str, answers: Sequence[Answer]) -> list[tuple[float, ...]]:
    # torch, which the options do without.
    import torch

    from es_cookbook.baselines.learner import Learner
    from es_cookbook.baselines.supervised import joined
    from es_cookbook.checkpoints.models import load_causal_lm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(model_name, "float32", device)
    size = int(model.config.get_text_config().vocab_size)
    learner = Learner(model, (), tokens_per_pass=max(1, _LOGITS_PER_PASS // size))
    examples = [joined([(each.prompt_T, False), (each.tokens_T, True)]) for each in answers]
    return learner.entropies(examples)
