"""Fakes that stand in for time and failure: an engine that answers at once."""

import asyncio
import dataclasses
import functools
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import anyio
import anyio.lowlevel
import chz
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from es_cookbook import (
    EnvGroupBuilder,
    Grade,
    Observation,
    ProblemEnv,
    RLDataset,
    RLDatasetBuilder,
    SamplingParams,
)
from es_cookbook.engines.base import (
    Engine,
    EngineBuilder,
    EngineTraits,
    Host,
    LogprobsRequest,
    SampleRequest,
    Target,
)
from es_cookbook.evolution.genome import Genome, Offsets, Rule, Step, Term
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.rl.objectives import Objective, Outcomes
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action, Datasets, Metrics, Policy, Trajectory, Transition

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder


def rendered(value: object) -> str:
    """Return the text of a value that is hashed; fields of classes are listed by name.

    Fields that are None are left out, as are any that classes get later, so the answers in recorded
    runs stay what they are.
    """
    match value:
        case Term(seed=seed, coefficient=coefficient):
            fields = {"seed": seed, "coefficient": coefficient}
        case Genome(terms=terms, offsets=offsets):
            fields = {"terms": terms, "offsets": offsets}
        case Step(terms=terms, decay=decay, rule=rule):
            fields = {"terms": terms, "decay": decay, "rule": rule}
        case Offsets(data=data):
            fields = {"data": data}
        case Rule():
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        case tuple():
            return f"({', '.join(map(rendered, value))}{',' * (len(value) == 1)})"
        case list():
            return f"[{', '.join(map(rendered, value))}]"
        case None | int() | float() | str() | bytes():
            return repr(value)
        case _:
            raise TypeError(f"a fake answer cannot depend on {value!r}")
    counted = [f"{name}={rendered(of)}" for name, of in fields.items() if of is not None]
    return f"{type(value).__name__}({', '.join(counted)})"


def digest(*parts: object) -> int:
    """Return a small number that is a pure function of the arguments."""
    text = rendered(parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class FakeEngine(Engine):
    """Answers at once with digits that depend on the genome and the prompt.

    If sampling is not greedy, they depend on the sampling seed as well.

    Attributes:
        requests: all that were asked to sample, in order, each with who answered.
        loads: all populations that were loaded.
    """

    def __init__(
        self,
        capacity: int = 1000,
        answer: Callable[[Genome | str, SampleRequest], str] | None = None,
        base_dtype: str = "float32",
        max_terms: int | None = None,
        held_by: str = "",
    ) -> None:
        vocabulary = {chr(code): code - 32 for code in range(32, 127)}
        model = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        model.decoder = decoders.Fuse()
        self.traits = EngineTraits(capacity, 64, base_dtype, max_terms)
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?")
        self.space = FullRankSpace(shapes={"weight": (2, 2)})
        self.requests: list[tuple[Genome | str, SampleRequest]] = []
        self.loads: list[Sequence[Genome]] = []
        self.steps: list[Step] = []
        self.restored_from: Path | None = None
        self.closed = False
        self._answer = answer or self._digits
        self._genomes: Sequence[Genome] = ()
        self._held_by = Path(held_by) if held_by else None

    async def load(self, genomes_G: Sequence[Genome]) -> None:
        assert len(genomes_G) <= self.traits.capacity
        await anyio.lowlevel.checkpoint()
        self.loads.append(genomes_G)
        self._genomes = genomes_G

    def who(self, target: Target) -> Genome | str:
        return self._genomes[target] if isinstance(target, int) else target

    async def sample(self, request: SampleRequest) -> Action:
        who = self.who(request.target)
        self.requests.append((who, request))
        await anyio.lowlevel.checkpoint()
        while self._held_by and len(self.steps) >= 2 and self._held_by.exists():
            await anyio.sleep(0.01)
        text = self._answer(who, request)
        tokens_T = tuple(ord(c) - 32 for c in text)
        logprobs_T = self._logprobs(who, tokens_T) if request.params.logprobs else None
        return Action(tokens_T, text, "stop", logprobs_T and tuple(logprobs_T))

    def _digits(self, who: Genome | str, request: SampleRequest) -> str:
        seed = request.seed if request.params.temperature > 0 else None
        return str(digest(who, self.steps, request.observation.tokens_T, seed) % 1000)

    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        await anyio.lowlevel.checkpoint()
        return self._logprobs(self.who(request.target), request.continuation_T)

    @staticmethod
    def _logprobs(who: Genome | str, tokens_T: Sequence[int]) -> list[float]:
        return [-(digest(who, t) % 100) / 10 for t in tokens_T]

    async def apply(self, step: Step) -> int:
        self.steps.append(step)
        return digest(self.steps)

    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        self.restored_from = snapshot
        self.steps = list(steps)
        return digest(self.steps)

    async def save(self, path: Path) -> None:
        path.mkdir()
        (path / "steps.json").write_text(json.dumps([dataclasses.asdict(s) for s in self.steps]))

    def stats(self) -> Mapping[str, float]:
        return {"requests": len(self.requests)}

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed = True


class FakePool(FakeEngine):
    """Lends its hosts in the order in which they become free; answers for the centre itself."""

    def __init__(self, hosts_E: Sequence[FakeEngine]) -> None:
        super().__init__(min(host.traits.capacity for host in hosts_E))
        self.hosts_E = hosts_E
        self._free: asyncio.Queue[FakeEngine] = asyncio.Queue()
        for host in hosts_E:
            self._free.put_nowait(host)

    @property
    def num_engines(self) -> int:
        return len(self.hosts_E)

    @asynccontextmanager
    async def lend(self, centre: int | None = None) -> AsyncGenerator[Host]:
        assert not centre, "its engines have no steps"
        host = await self._free.get()
        try:
            yield host
        finally:
            self._free.put_nowait(host)


@chz.chz
class FakeEngineBuilder(EngineBuilder):
    """Builds a `FakeEngine` without a model."""

    capacity: int = chz.field(default=1000, doc="genomes that fit")
    held_by: str = chz.field(default="", doc="file; as long as it is there, generation 2 waits")
    made: ClassVar[list[FakeEngine]] = []

    @override
    def tokenizer(self, model_name: str) -> "PreTrainedTokenizerBase":
        return FakeEngine().tokenizer

    async def __call__(self, *, model_name: str, search_space: "SearchSpaceBuilder") -> Engine:
        self.made.append(FakeEngine(self.capacity, held_by=self.held_by))
        return self.made[-1]


@chz.chz
class NoEngineBuilder(EngineBuilder):
    """A run that builds it has gone too far."""

    async def __call__(self, **_: object) -> Engine:
        raise AssertionError("a model was loaded")


class FakePolicy(Policy):
    """One that other policies of tests answer in place of; its own centre and base."""

    async def sample(
        self,
        observation: Observation,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> Action:
        raise AssertionError("nothing is to be sampled")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams()

    async def logprobs(self, prompt_T: Sequence[int], continuation_T: Sequence[int]) -> list[float]:
        return [0.0] * len(continuation_T)

    @property
    def context_length(self) -> int:
        return 4096

    @property
    def centre(self) -> Policy:
        return self

    @property
    def base(self) -> Policy:
        return self


def trajectory(reward: float, *metrics_T: Metrics, tokens: int = 2) -> Trajectory:
    """Return a rollout with a step per metrics, at least one; the first step has the reward."""
    action = Action(tuple(range(1, tokens + 1)), "", "stop")
    return Trajectory(
        tuple(
            Transition(Observation((1,)), action, 0.0 if t else reward, metrics, {})
            for t, metrics in enumerate(metrics_T or ({},))
        )
    )


class Word(ProblemEnv):
    """Pays for "yes"."""

    def grade(self, text: str) -> Grade:
        return Grade(float(text == "yes"))


class Pieces(ProblemEnv):
    """Pays for every odd character of the answer."""

    def grade(self, text: str) -> Grade:
        odd = sum(ord(character) % 2 for character in text) / max(len(text), 1)
        return Grade(odd, {"correct": float(odd > 0.5), "format": float(bool(text))})


def problem(number: int, split: str) -> EnvGroupBuilder:
    make_env = functools.partial(Pieces, Observation((number % 90 + 1, number % 7 + 1)))
    return ProblemGroupBuilder(
        make_env, f"{split} {number}", gold="ace", problem_tags=("even",) * (number % 2 == 0)
    )


class SmallDataset(RLDataset):
    """Two problems a generation, twenty in all."""

    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        return [problem((2 * generation + i) % 20, "train") for i in range(2)]

    def __len__(self) -> int:
        return 20

    async def validate(self, context_length: int) -> None:
        pass


@chz.chz
class SmallDatasetBuilder(RLDatasetBuilder):
    """Builds a `SmallDataset` with four held-out problems."""

    async def __call__(self, tokenizer: "PreTrainedTokenizerBase") -> Datasets:
        return Datasets(SmallDataset(), [problem(number, "test") for number in range(50, 54)])


@chz.chz
class Following(Objective):
    """The mean reward, and more of `correct` the more the last two generations solved."""

    @property
    @override
    def follows_results(self) -> bool:
        return True

    @override
    def metrics(self, outcomes: Outcomes) -> Mapping[str, float]:
        latest = outcomes.solved_T[-2:]
        return {"objective/done": sum(latest) / max(len(latest), 1)}

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        share, correct = self.metrics(outcomes)["objective/done"], outcomes.metrics["correct"]
        return ((1 - share) * outcomes.rewards_P_G_K + share * correct).mean(axis=2)
