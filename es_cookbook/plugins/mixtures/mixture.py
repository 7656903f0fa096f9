"""Several data sets in one run, and which of their problems come next.

    easy, hard = Part(dataset=easy, tag="easy", weight=1), Part(dataset=hard, tag="hard", weight=2)
    Mixture(parts=(easy, hard))

    es-cookbook train model_name=... dataset=mixture dataset.parts=countdown,math
        dataset.parts.0.weight=1 dataset.parts.1.weight=2 dataset.parts.1.dataset.prompt=tags

Each problem keeps its own prompt, reward and tags, and may have a limit of tokens. A batch is put
together from

- *kinds*, a part's problems of the same tags: each gets a share of the batch, from the parts'
  weights (fixed, or by a table over generations, such as `easy_pool`) and a curriculum, and gives
  its next problems, each once per epoch;
- a replay buffer, for up to a fraction of the batch;
- less what a filter leaves out.

Curriculum, replay and filter go by results, which the history records (`RLDataset.tell`): the next
batch follows from the Config and the history, however often the run was interrupted.

Left out: data sets that are not in memory. A part's own order and size of batch are not used.
"""

import dataclasses
import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook import Env, EnvGroupBuilder, Observation, RLDataset, RLDatasetBuilder, StepResult
from es_cookbook.common.checks import MOST, check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.schedules import Table
from es_cookbook.plugins.mixtures.selection import (
    Curriculum,
    Filter,
    Replay,
    ReplayBuffer,
    Stream,
    interleaved,
    quotas,
)
from es_cookbook.rl.data.problem_dataset import (
    DATASETS,
    ChangedProblem,
    ProblemDataset,
    one_by_one,
    told_golds,
)
from es_cookbook.rl.objectives import SOLVED, outcomes
from es_cookbook.rl.rollouts import mean_of, reward_and_solved
from es_cookbook.rl.types import (
    Action,
    Datasets,
    EnvGroup,
    Metrics,
    ProblemResult,
    Tokenizer,
    TrajectoryGroup,
)

EASY_POOL = Table(
    generations=(0, 50, 100, 150, 200, 250, 300, 400, 500, 800, 1000, 2700, 3000),
    factors=(1.0, 0.9, 0.8, 0.7, 0.6, 0.55, 0.53, 0.51, 0.49, 0.42, 0.38, 0.04, 0.01),
)
"""Share of easy problems by generation: all in the first, one in a hundred from the 3000th on."""


@chz.chz
class Part:
    """One data set of a mixture."""

    dataset: RLDatasetBuilder = chz.field(meta_factory=DATASETS, doc="training and test problems")
    tag: str = chz.field(default="", doc="name under which its metrics are reported as well")
    weight: float | None = chz.field(
        default=None, doc="share of batches beside the other parts'; None: its number of problems"
    )
    schedule: Table = chz.field(default=Table(), doc="factor on weight by generation")
    max_tokens: int | None = chz.field(
        default=None, doc="most tokens of an answer, where fewer than sampling.max_tokens"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "weight", at_least=0)
        check_range(self, "max_tokens", at_least=1)
        if max(self.schedule.factors) > MOST:
            raise ConfigError(
                f"schedule.factors must be at most {MOST:g}, found {max(self.schedule.factors):g}"
            )


def easy_pool(easy: Part, main: Part, schedule: Table = EASY_POOL) -> tuple[Part, Part]:
    """Return two parts: the easy one has the share of `schedule`, the main one the rest."""
    rest = tuple(1 - factor for factor in schedule.factors)
    return (
        chz.replace(easy, weight=1.0, schedule=schedule),
        chz.replace(main, weight=1.0, schedule=chz.replace(schedule, factors=rest)),
    )


@chz.chz
class Mixture(RLDatasetBuilder):
    """Several data sets in one run."""

    parts: tuple[Part, ...] = chz.field(
        default=(),
        doc="the data sets: names, countdown,rows, and options by number, parts.0.weight=2",
    )
    order: Literal["weighted", "balanced", "concatenate"] = chz.field(
        default="weighted",
        doc="weighted: shares of each batch by weight; balanced: all problems once per epoch, "
        "parts spread evenly; concatenate: all once per epoch, in any order",
    )
    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
    curriculum: Curriculum | None = chz.field(
        default=None, doc="shares by recent performance: dataset.curriculum.favour=..."
    )
    filter: Filter | None = chz.field(
        default=None, doc="leaves out what all or none solve: dataset.filter.generations=..."
    )
    replay: Replay | None = chz.field(
        default=None, doc="replays earlier problems: dataset.replay.fraction=..."
    )
    solved_metric: str = chz.field(
        default=SOLVED,
        doc="Env metric of whether a rollout solved its problem, or reward; a rollout without it "
        "counts by its reward",
    )
    seed: int = chz.field(default=0, doc="seed of the order of the training problems")

    @property
    def members(self) -> tuple[Part, ...]:
        """All data sets; a subclass may have some as separate fields."""
        return self.parts

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "problems_per_generation", at_least=1)
        if not self.members:
            raise ConfigError("parts must be one or more data sets, found none")
        if self.order != "weighted" and (
            self.curriculum is not None
            or any(part.weight is not None or part.schedule != Table() for part in self.members)
        ):
            raise ConfigError(
                f"order={self.order} takes every problem once per epoch: weights, schedules and a "
                "curriculum need order=weighted"
            )
        turns = sorted({turn for part in self.members for turn in part.schedule.generations})
        for turn in turns:
            if all(part.weight == 0 or not part.schedule(turn, 0) for part in self.members):
                raise ConfigError(f"all parts have weight 0 in generation {turn}")

    @override
    def check(self) -> None:
        for part in self.members:
            one_by_one(part.dataset).check()

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Build the parts; refuses problems that one trains on and another holds out."""
        problems: list[_Problem] = []
        held_out: list[_Problem] = []
        datasets: list[ProblemDataset] = []
        for p, part in enumerate(self.members):
            # A small part may have fewer problems than its batch.
            built = await one_by_one(part.dataset)(tokenizer)
            if not isinstance(built.train, ProblemDataset):
                raise ConfigError(
                    f"part {part.tag or p}: a mixture needs problems in memory (ProblemDataset), "
                    f"found {type(built.train).__name__}"
                )
            datasets.append(built.train)
            problems += [_Problem(b, p, part.tag, part.max_tokens) for b in built.train.builders]
            held_out += [_Problem(b, p, part.tag, part.max_tokens) for b in built.test_P]
        _refuse_shared(problems, held_out)
        if self.solved_metric != SOLVED:
            _check_metric(self.solved_metric, await told_golds(problems, tokenizer))
        return Datasets(_MixtureDataset(problems, datasets, self), held_out)


@dataclasses.dataclass(frozen=True, slots=True)
class _Problem(ChangedProblem):
    """A training or held-out problem, under its part's tag and within its part's limit.

    Attributes:
        problem: the problem in its data set.
        part: index of its part.
    """

    part: int
    tag: str
    max_tokens: int | None

    @property
    def name(self) -> str:
        """The name of the problem."""
        return str(getattr(self.problem, "name", type(self.problem).__name__))

    @property
    def key(self) -> str:
        """Identifies the problem in the history by part, tags, and content."""
        what = map(str, self.digests or (self.name,))
        text = "\n".join((self.tag or str(self.part), *self.tags, *what))
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()

    @property
    @override
    def tags(self) -> tuple[str, ...]:
        return (*((self.tag,) if self.tag else ()), *self.problem.tags)

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        group = await self.problem.make_envs(num_envs)
        if self.max_tokens is not None:
            group.envs = [_Limited(env, self.max_tokens) for env in group.envs]
        return group


def _refuse_shared(problems: Sequence[_Problem], held_out: Sequence[_Problem]) -> None:
    """Refuse problems that one part trains on and another holds out."""
    train = {digest: problem.name for problem in problems for digest in problem.digests}
    for problem in held_out:
        for digest in problem.digests:
            if digest in train:
                raise DataError(
                    f"{problem.name}: this problem is held out in one part and trained on "
                    f"in another, as {train[digest]}; training and test must be disjoint"
                )


def _check_metric(metric: str, groups_P: Sequence[TrajectoryGroup]) -> None:
    """Refuse a metric that none of these rollouts reports, except the usual one."""
    if groups_P and metric != SOLVED:
        outcomes(groups_P).values(metric, "dataset.solved_metric")


class _Limited(Env):
    """An Env whose actions have at most so many tokens."""

    def __init__(self, env: Env, max_tokens: int) -> None:
        self._env = env
        self._max_tokens = max_tokens

    async def initial_observation(self) -> Observation:
        self._env.policy = self.policy
        return self._limited(await self._env.initial_observation())

    @override
    async def act(self, observation: Observation) -> Action:
        return await self._env.act(observation)

    async def step(self, action: Action) -> StepResult:
        result = await self._env.step(action)
        if result.next_observation is None:
            return result
        return dataclasses.replace(result, next_observation=self._limited(result.next_observation))

    @override
    async def close(self) -> None:
        await self._env.close()

    def _limited(self, observation: Observation) -> Observation:
        most = min(self._max_tokens, observation.max_tokens or self._max_tokens)
        return dataclasses.replace(observation, max_tokens=most)


_Kind: TypeAlias = tuple[int, tuple[str, ...]]
"""A part's index, and tags."""


class _MixtureDataset(RLDataset):
    """Batches from several data sets, chosen one generation after the other."""

    def __init__(
        self, problems: Sequence[_Problem], parts: Sequence[ProblemDataset], config: Mixture
    ) -> None:
        self._problems = problems
        self._keys = [problem.key for problem in problems]
        self._parts = parts
        self._config = config
        self._index = {key: i for i, key in enumerate(self._keys)}
        self._kinds: dict[_Kind, list[int]] = {}
        for i, problem in enumerate(problems):
            self._kinds.setdefault((problem.part, problem.tags), []).append(i)
        self._streams = self._make_streams()
        window = config.curriculum.window if config.curriculum else 1
        self._solved = {kind: deque[float](maxlen=window) for kind in self._kinds}
        """For each kind, the mean share solved in each of the last generations that had any."""
        self._out_until: dict[int, int] = {}
        self._buffer = ReplayBuffer(config.replay) if config.replay else None
        self._batches: list[list[int]] = []
        self._measured: list[Metrics] = []
        self._latest = 0

    @override
    def __len__(self) -> int:
        return len(self._problems)

    @override
    def check_rollouts(self, number: int) -> None:
        filter_, replay = self._config.filter, self._config.replay
        by_shares = {
            "dataset.filter.solved_by_all=False": filter_ is not None
            and (filter_.solved_by_all and filter_.solved_by_none),
            "dataset.replay.value=reward": replay is not None and replay.value == "learnable",
        }
        for instead, is_chosen in by_shares.items():
            if is_chosen and number == 1:
                raise ConfigError(
                    "the mixture chooses by the share of a problem's answers that solve it, and "
                    "with one answer to each all or none do: set surrogate.attempts or attempts "
                    f"above 1, or {instead}"
                )

    @property
    @override
    def training_problems(self) -> Sequence[EnvGroupBuilder]:
        return self._problems

    @override
    async def validate(self, context_length: int) -> None:
        for part in self._parts:
            await part.validate(context_length)

    @override
    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        self._latest = generation
        return [self._problems[i] for i in self._batch(generation)]

    @override
    def results(
        self, generation: int, groups_P: Sequence[TrajectoryGroup]
    ) -> Sequence[ProblemResult]:
        metric = self._config.solved_metric
        if not self.depends_on_results:
            return ()
        batch = self._batch(generation)
        # Other batches may lack the parts that report it.
        if generation == 0 and {self._problems[i].part for i in batch} == {
            *range(len(self._parts))
        }:
            _check_metric(metric, groups_P)
        return [
            ProblemResult(self._keys[i], *reward_and_solved(group, metric))
            for i, group in zip(batch, groups_P, strict=True)
        ]

    @override
    def tell(
        self, generation: int, results_P: Sequence[ProblemResult], given: bool = False
    ) -> None:
        self._latest = generation
        expected = [self._keys[i] for i in self._batch(generation)]
        if results_P and not given and [r.problem for r in results_P] != expected:
            raise DataError(
                f"generation {generation}: the recorded problems are others than the data set has "
                "now; resume with the data that the run began with"
            )
        known = [result for result in results_P if result.problem in self._index]
        by_kind: dict[_Kind, list[float]] = {}
        for result in known:
            i = self._index[result.problem]
            problem = self._problems[i]
            by_kind.setdefault((problem.part, problem.tags), []).append(result.solved)
            if (filter_ := self._config.filter) and filter_.leaves_out(result.solved):
                self._out_until[i] = generation + 1 + filter_.generations
        for kind, solved in by_kind.items():
            if not math.isnan(mean := mean_of(solved)):
                self._solved[kind].append(mean)
        if self._buffer is not None:
            self._buffer.tell(known)

    @property
    @override
    def depends_on_results(self) -> bool:
        config = self._config
        return any(part is not None for part in (config.curriculum, config.filter, config.replay))

    @override
    def metrics(self) -> Metrics:
        return self._measured[self._latest] if self._measured else {}

    def _batch(self, generation: int) -> list[int]:
        while len(self._batches) <= generation:
            self._batches.append(self._choose(len(self._batches)))
        return self._batches[generation]

    def _choose(self, generation: int) -> list[int]:
        config = self._config
        num_left_out = sum(until > generation for until in self._out_until.values())

        def is_usable(index: int) -> bool:
            return self._out_until.get(index, 0) <= generation and index not in replayed

        replayed: list[int] = []
        if self._buffer is not None and config.replay and generation >= config.replay.warmup:
            out = {self._keys[i] for i in self._out_until if not is_usable(i)}
            most = int(config.replay.fraction * config.problems_per_generation)
            replayed = [self._index[key] for key in self._buffer.sample(most, out)]
        weights = self._weights(generation)
        offset = random.Random(derive_seed(config.seed, "mixture", generation)).random()
        shares = quotas(
            list(weights.values()), config.problems_per_generation - len(replayed), offset
        )
        batch = list(replayed)
        for kind, share in zip(weights, shares, strict=True):
            batch += self._streams[kind].take(share, is_usable)
        metrics: Metrics = {
            **{f"data/share/{_name(kind)}": w for kind, w in weights.items() if len(weights) > 1},
            **({"data/replayed": len(replayed)} if config.replay else {}),
            **({"data/left_out": num_left_out} if config.filter else {}),
        }
        self._measured.append(metrics)
        return batch

    def _make_streams(self) -> Mapping[_Kind | None, Stream]:
        """Return a stream for each kind, or one for all where there are no shares."""
        order, seed = self._config.order, self._config.seed

        def epoch(kind: _Kind | None, number: int) -> list[int]:
            rng = random.Random(derive_seed(seed, f"mixture/{_name(kind)}", number))
            problems = range(len(self)) if kind is None else self._kinds[kind]
            return rng.sample(problems, len(problems))

        if order == "weighted":
            kinds = self._kinds.items()
            return {kind: Stream(partial(epoch, kind), len(problems)) for kind, problems in kinds}
        if order == "concatenate":
            return {None: Stream(partial(epoch, None), len(self))}
        return {None: Stream(lambda n: interleaved([epoch(k, n) for k in self._kinds]), len(self))}

    def _weights(self, generation: int) -> Mapping[_Kind | None, float]:
        """Return each stream's share of a batch; they sum to 1."""
        if None in self._streams:
            return {None: 1.0}
        members = self._config.members
        sizes = Counter(problem.part for problem in self._problems)
        weights: dict[_Kind | None, float] = {}
        for kind, problems in self._kinds.items():
            part = members[kind[0]]
            weight = sizes[kind[0]] if part.weight is None else part.weight
            share = weight * part.schedule(generation, 0) * len(problems) / sizes[kind[0]]
            if self._config.curriculum is not None and (recent := self._solved[kind]):
                share *= self._config.curriculum.factor(mean_of(recent))
            weights[kind] = share
        total = math.fsum(weights.values())
        return {kind: weight / total for kind, weight in weights.items()}


def _name(kind: _Kind | None) -> str:
    return "all" if kind is None else ".".join(kind[1]) or str(kind[0])
