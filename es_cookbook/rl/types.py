"""Types of reinforcement learning, from datasets to rollouts.

A dataset returns batches of `EnvGroupBuilder`s, one per problem. A builder makes a group of `Env`s,
one per attempt of each genome. A rollout runs one Env with one `Policy` and returns a `Trajectory`;
the trajectories of a group form a `TrajectoryGroup`.

The types follow the Tinker cookbook's, with two differences that evolution strategies need: the
population, not the dataset, decides a group's size, and an Env may itself query the model (judges,
preferences, Markovian scoring) through `Env.policy`.
"""

import dataclasses
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, cast

import chz
from chz.tiepin import CastError

from es_cookbook.common.checks import check_range, check_types
from es_cookbook.common.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
Metrics: TypeAlias = Mapping[str, float]
"""Numbers; averaged over rollouts."""
Logs: TypeAlias = Mapping[str, str]
"""Text; shown, never averaged."""
ANSWER = "answer"
"""The log with the answer that a task read; attempts with equal ones vote together."""
SOURCE_DOC = "data files, a directory, or a Hub data set such as owner/name:configuration:split"
OnBadRow: TypeAlias = Literal["refuse", "skip"]
ON_BAD_ROW_DOC = "a row that lacks what the task needs is refused, or skipped with a notice"
_ESCAPED = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}
_ESCAPE = re.compile(r"\\[nt\\]")


def read_stop(typed: str) -> tuple[str, ...] | None:
    r"""Parse an option: a text, a JSON list of texts, or nothing for no texts.

    In a text `\n`, `\t` and `\\` are escape sequences, since a shell keeps them as they are.

    >>> read_stop(r"\n"), read_stop("."), read_stop('["###", "\\n\\n"]'), read_stop("None")
    (('\n',), ('.',), ('###', '\n\n'), None)

    Raises:
        CastError: Not such a list.
    """
    if typed in ("None", "none"):
        return None
    if not typed:
        return ()
    if not typed.startswith("["):
        return (_ESCAPE.sub(lambda found: _ESCAPED[found[0]], typed),)
    try:
        texts: object = json.loads(typed)
    except ValueError:
        texts = None
    items = cast("list[object]", texts) if isinstance(texts, list) else [None]
    if not all(isinstance(text, str) for text in items):
        raise CastError(f'a list of texts looks like ["###", "\\n\\n"], found {typed}')
    return tuple(cast("list[str]", items))


@chz.chz
class SamplingParams:
    """Parameters for sampling tokens from a policy."""

    max_tokens: int = chz.field(default=256, doc="most tokens sampled for one action")
    temperature: float = chz.field(default=0.0, doc="0 is greedy, the default for ES")
    top_p: float = chz.field(default=1.0, doc="nucleus sampling: probability mass to sample from")
    logprobs: bool = chz.field(default=False, doc="return log-probabilities of sampled tokens")
    stop: tuple[str, ...] | None = chz.field(
        default=(),
        blueprint_cast=read_stop,
        doc='text that ends an answer and is not part of it: "\\n", or ["###", "\\n\\n"] for '
        "several; None: the end of the line, where plain prompts have examples of one line",
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "max_tokens", at_least=1)
        check_range(self, "temperature", at_least=0)
        check_range(self, "top_p", above=0, at_most=1)
        stop = cast("object", self.stop or ())
        items = cast("tuple[object, ...]", stop) if isinstance(stop, tuple) else (None,)
        if not all(isinstance(text, str) for text in items):
            raise ConfigError(f"stop must be a tuple of texts, found {stop!r}")
        if not all(items):
            raise ConfigError(
                "stop must be texts of at least a character, since an empty one would end every "
                "answer; [] ends none"
            )

    def scaled(self, factor: float) -> "SamplingParams":
        """Return these parameters with the temperature multiplied by a factor."""
        return chz.replace(self, temperature=self.temperature * factor) if factor != 1 else self


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """Input of a policy: the whole prompt as tokens, and where to stop.

    Attributes:
        tokens_T: prompt tokens, at least one.
        stop: strings that end the action; the action's text and tokens include them.
        stop_token_ids: tokens that end the action, as the model's end-of-sequence tokens do.
        max_tokens: limit of the action's tokens, if lower than that of the sampling parameters.
        is_last: any action ends the rollout, so that engines need keep nothing for a next
            turn.
        usual_stop: strings that end the action where `SamplingParams.stop` is None.
        opened: the tag of a thought that the prompt opens; an action that does not close it is all
            thought.
    """

    tokens_T: tuple[int, ...]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    is_last: bool = False
    usual_stop: tuple[str, ...] = ()
    opened: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """Output of a policy.

    Attributes:
        tokens_T: sampled tokens, including the one that completes a stop string or stops.
        text: the tokens decoded without special tokens, so that an Env needs no tokenizer. It
            includes an observation's stop string, unless that is a special token, but not a stop
            text of the sampling parameters.
        stop_reason: "stop" at an end-of-sequence token, a stop token or a stop string; "length" at
            `max_tokens` or at the end of the context.
        logprobs_T: log-probability of each sampled token (natural log, before temperature and
            top-p), where requested.
    """

    tokens_T: tuple[int, ...]
    text: str
    stop_reason: Literal["stop", "length"]
    logprobs_T: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """A text that the policy read, whose mean log-probability is part of a step's reward.

    Such a reward depends on the weights, so policy gradients need its gradient as well.

    Attributes:
        prompt_T: the tokens before the text, at least one.
        continuation_T: the text, at least one token.
        logprobs_T: the policy's log-probability of each of its tokens.
    """

    prompt_T: tuple[int, ...]
    continuation_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """An Env's response to an action.

    Attributes:
        reward: finite; a rollout's reward is the sum over its steps.
        done: True ends the rollout; then `next_observation` is None.
        next_observation: next input of the policy.
        metrics: numbers, averaged over rollouts and reported as `env/<tag>/<metric>`.
        logs: text shown with sampled rollouts; `ANSWER` is what was read as the answer.
        reading: the text whose mean log-probability is in the reward, for policy gradients.
    """

    reward: float
    done: bool
    next_observation: Observation | None = None
    metrics: Metrics = dataclasses.field(default_factory=dict[str, float])
    logs: Logs = dataclasses.field(default_factory=dict[str, str])
    reading: Reading | None = None


Answer: TypeAlias = Callable[[Observation, SamplingParams, int], Awaitable[Action]]
"""One action at an observation, with these sampling parameters and this seed."""


class Policy(ABC):
    """A model that samples (a genome, the centre or the base), its sampling parameters bound."""

    @abstractmethod
    async def sample(
        self,
        observation: Observation,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> Action:
        """Sample one action.

        Args:
            observation: input of the policy.
            params: sampling parameters for this call, in place of the bound ones.
            seed: seed in place of this call's own, which is the same for every genome.
        """

    @abstractmethod
    async def logprobs(self, prompt_T: Sequence[int], continuation_T: Sequence[int]) -> list[float]:
        """Return the natural log-probability of each continuation token, given all before it."""

    @property
    @abstractmethod
    def sampling(self) -> SamplingParams:
        """The bound sampling parameters."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Most tokens of an observation and its action together."""

    @property
    @abstractmethod
    def centre(self) -> "Policy":
        """The centre of the population, with the same sampling parameters."""

    @property
    @abstractmethod
    def base(self) -> "Policy":
        """The frozen base model, with the same sampling parameters."""


class Env(ABC):
    """An environment for one rollout of one problem; there is no reset.

    All Envs share one event loop: run long computations in a worker (`rl.grading.workers`).

    Attributes:
        policy: the policy of the rollout, for Envs that query the model; set before it begins.
    """

    policy: Policy

    @abstractmethod
    async def initial_observation(self) -> Observation:
        """Return the first observation."""

    async def act(self, observation: Observation) -> Action:
        """Return the action for an observation; by default, sample it from the policy.

        Override it to use other sampling parameters, or an action that is not sampled.
        """
        return await self.policy.sample(observation)

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Apply an action; return its reward and the next observation, or the end."""

    async def close(self) -> None:  # noqa: B027 - most Envs hold nothing
        """Release resources when the group ends; does nothing by default."""


class ProvableEnv(Env):
    """An Env on which gold answers are tried before a run: can its reward be earned?"""

    full_reward: float = 1.0
    """The reward of a perfect rollout; `RLDataset.validate` compares gold answers with it."""

    @abstractmethod
    async def try_gold(self, gold: str | tuple[str, ...], context_length: int) -> tuple[float, str]:
        """Return the reward of a gold answer (a text per turn), and a hint if it is too low.

        Raises:
            EnvError: The Env broke its contract.
        """

    async def prompt_length(self, context_length: int) -> int:
        """Return the tokens of the first prompt."""
        return len((await self.initial_observation()).tokens_T)


class EnvGroup:
    """The group handle that `make_envs` returns: the Envs, and what they share.

    Override `close` if Envs share resources (a sandbox). It is called exactly once, when the group
    ends, also on failure and cancellation.
    """

    def __init__(self, envs: Sequence[Env]) -> None:
        self.envs = envs

    async def close(self) -> None:
        """Release what the group holds: by default, close its Envs."""
        for env in self.envs:
            await env.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Transition:
    """One step of a rollout."""

    observation: Observation
    action: Action
    reward: float
    metrics: Metrics
    logs: Logs
    reading: Reading | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished rollout."""

    transitions: tuple[Transition, ...]

    @property
    def reward(self) -> float:
        """Sum of the rewards of its steps."""
        return math.fsum(transition.reward for transition in self.transitions)

    @property
    def seen(self) -> Sequence[tuple[Literal["prompt", "added"], tuple[int, ...]]]:
        """The new tokens of each observation: a whole prompt, or what was added to the last."""
        seen: list[tuple[Literal["prompt", "added"], tuple[int, ...]]] = []
        before_T: tuple[int, ...] | None = None
        for transition in self.transitions:
            tokens_T = transition.observation.tokens_T
            if before_T is not None and tokens_T[: len(before_T)] == before_T:
                seen.append(("added", tokens_T[len(before_T) :]))
            else:
                seen.append(("prompt", tokens_T))
            before_T = tokens_T + transition.action.tokens_T
        return seen

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(transition.action.tokens_T) for transition in self.transitions)


@dataclasses.dataclass(frozen=True, slots=True)
class LostRollout:
    """A rollout that failed: an exception, a time-out, a lost engine. Its reward is NaN.

    Attributes:
        reason: one line, for example "TimeoutError: no answer within 60 s".
        traceback: the whole traceback as text.
    """

    reason: str
    traceback: str


@dataclasses.dataclass(frozen=True, slots=True)
class GroupReward:
    """Result of `compute_group_rewards` for one rollout.

    Attributes:
        reward: finite, added to the rollout's own reward.
        metrics: numbers reported in addition to the Env's own.
        logs: text shown with the rollout where that is shown, for example the games it played.
    """

    reward: float
    metrics: Metrics = dataclasses.field(default_factory=dict[str, float])
    logs: Logs = dataclasses.field(default_factory=dict[str, str])


@dataclasses.dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All attempts of all genomes at one problem.

    Attributes:
        trajectories_G_K: `[g][k]` is attempt k of genome g.
        group_rewards_G_K: the addition of `compute_group_rewards` to each trajectory, or None for
            nothing.
        tags: the builder's tags, for metrics.
    """

    trajectories_G_K: Sequence[Sequence[Trajectory | LostRollout]]
    group_rewards_G_K: Sequence[Sequence[GroupReward]] | None = None
    tags: tuple[str, ...] = ()

    @property
    def finished(self) -> Iterator[tuple[tuple[int, int], Trajectory]]:
        """The rollouts that finished, each with its place (g, k)."""
        for g, trajectories_K in enumerate(self.trajectories_G_K):
            for k, trajectory in enumerate(trajectories_K):
                if isinstance(trajectory, Trajectory):
                    yield (g, k), trajectory

    @property
    def rewards_G_K(self) -> list[list[float]]:
        """Reward of each attempt, group reward included; NaN where the rollout was lost."""
        rewards_G_K = [
            [t.reward if isinstance(t, Trajectory) else math.nan for t in trajectories_K]
            for trajectories_K in self.trajectories_G_K
        ]
        if self.group_rewards_G_K is None:
            return rewards_G_K
        return [
            [own + group.reward for own, group in zip(own_K, group_K, strict=True)]
            for own_K, group_K in zip(rewards_G_K, self.group_rewards_G_K, strict=True)
        ]


class EnvGroupBuilder(ABC):
    """Builds the Envs of one problem. Frozen, picklable and stateless, so it can be retried."""

    @abstractmethod
    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Make `num_envs` new Envs of this problem; the population determines the number."""

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward | LostRollout] | None:
        """Compute rewards that need the whole group: comparisons, tournaments, preferences.

        None, the default, adds nothing. Where genomes are asked here, as games between them ask,
        `asks_genomes` has to say so: this is called once all rollouts of the group have ended, so
        no rollout ever waits for a genome that is not resident yet.

        Args:
            trajectories: one for each Env of the group, genome by genome, attempt by attempt.
            policies: the policy that ran each.

        Returns:
            One `GroupReward` for each trajectory, in the same order; a `LostRollout` in its place
            loses that rollout.
        """
        return None

    @property
    def asks_genomes(self) -> bool:
        """Whether `compute_group_rewards` asks `policies`, not only their `centre` or `base`.

        Then the population is resident as a whole, on one engine, and a run is refused whose
        population does not fit.
        """
        return False

    @property
    def is_graded(self) -> bool:
        """Whether an attempt's own reward says how good it is."""
        return True

    @property
    def tags(self) -> tuple[str, ...]:
        """Names under which this problem's metrics are reported, in addition to `all`."""
        return ()

    @property
    def digests(self) -> tuple[int, ...]:
        """Hashes of the problem's content (`es_cookbook.rl.problem_env.digest_of`); () if unknown.

        Problems that share a digest are the same: evaluations report how many were trained on.
        """
        return ()

    async def check(self, context_length: int) -> None:  # noqa: B027 - some are of any length
        """Check before the run that the problem can be attempted; does nothing by default.

        Raises:
            DataError: It cannot; names the problem.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class ProblemResult:
    """The population's result on one problem, as the history records it.

    Attributes:
        problem: hexadecimal text that stands for the problem, the same in every run.
        reward: mean over the rollouts that were not lost; NaN without any.
        solved: the same mean of the metric that says whether a rollout solved it, in [0, 1].
    """

    problem: str
    reward: float
    solved: float


class RLDataset(ABC):
    """Batches of problems as a function of the generation, which is the dataset's position.

    A batch may also depend on earlier results (a curriculum, a replay buffer). Then `results`
    returns what the history keeps of a generation, and `tell` receives it, in order, now and
    whenever the run is rebuilt. Nothing else may have an effect, so that resuming is exact.
    """

    @abstractmethod
    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        """Return the problems of a generation, `env_group_builders_P`; reshuffled each epoch."""

    def results(
        self, generation: int, groups_P: Sequence[TrajectoryGroup]
    ) -> Sequence[ProblemResult]:
        """Return the results that the history keeps, one per problem; none by default."""
        return ()

    def tell(  # noqa: B027 - most depend on no results
        self, generation: int, results_P: Sequence[ProblemResult], given: bool = False
    ) -> None:
        """Update the dataset with what `results` returned; does nothing by default.

        `given` results come from the run that this one was forked from, maybe of other problems.

        Raises:
            DataError: They are of other problems than the generation's, and not given.
        """

    def check_rollouts(self, number: int) -> None:  # noqa: B027 - most depend on no results
        """Refuse, before a model is loaded, fewer rollouts of each problem than `tell` needs.

        Raises:
            ConfigError: They are too few to choose problems by.
        """

    @property
    def training_problems(self) -> Sequence[EnvGroupBuilder]:
        """All problems that batches are made of; none if they are made on demand."""
        return ()

    @property
    def depends_on_results(self) -> bool:
        """Whether a batch depends on results of earlier ones, given to `tell`."""
        return type(self).tell is not RLDataset.tell

    def metrics(self) -> Metrics:
        """Return metrics `data/...` to report with the latest generation."""
        return {}

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of distinct problems."""

    @abstractmethod
    async def validate(self, context_length: int) -> None:
        """Check, before the first generation, that every problem can be attempted and solved.

        Args:
            context_length: most tokens of prompt and action together; a prompt must be shorter.

        Raises:
            DataError: A prompt that fills the context, or a gold answer that does not earn the full
                reward; names the problem.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Datasets:
    """The data sets that a builder returns.

    Attributes:
        train: problems that move the centre.
        test_P: held-out problems on which the centre is evaluated; may be empty.
    """

    train: RLDataset
    test_P: Sequence[EnvGroupBuilder] = ()


@chz.chz
class RLDatasetBuilder(ABC):
    """Builds the training and the held-out problems.

    Attributes:
        environment: the field that names a library's environment, if there is one.
    """

    _types = chz.validate(check_types)

    environment: ClassVar[str] = ""

    @property
    def label(self) -> str:
        """The default name of a run on these problems."""
        return "run"

    def check(self) -> None:  # noqa: B027 - most need no sources
        """Check before a model is loaded that the sources exist; does nothing by default.

        Raises:
            DataError: Which one, and why.
        """

    @abstractmethod
    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Load, check and split.

        Args:
            tokenizer: the model's own, to render prompts.

        Raises:
            DataError: A row that cannot be used; names the file and the line.
            ConfigError: Fields that cannot work together.
        """
