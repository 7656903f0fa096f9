"""The torch engine: a population against the centre alone, one by one, and its products alone."""

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.engines import HISTORY, generation, sample
from benchmarks.gpu.kernels import centre_on_cpu
from benchmarks.gpu.sizes import SIGMA, Emit, Sizes, timed
from benchmarks.harness import mirrored_pairs, ratios, row
from es_cookbook.checkpoints.models import load_architecture, load_causal_lm, parameter_infos
from es_cookbook.engines.base import Engine, Target
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.rl.types import SamplingParams

_PASS = 4096
"""Rows of the widest products of the floor."""
Seconds = Mapping[str, float]
"""Seconds of a generation's stages, and their `total`."""


class Population:
    """The same genomes and prompts for every engine."""

    def __init__(self, sizes: Sizes, model: Path) -> None:
        self.sizes, self.model = sizes, str(model)
        self.params = SamplingParams(max_tokens=sizes.tokens)
        self.genomes_G = mirrored_pairs(sizes.genomes, SIGMA)
        self.blocks_one_by_one = [[genome] for genome in self.genomes_G[: sizes.one_by_one]]
        self.prompts_P = self.prompts(sizes.prompt)

    def prompts(self, tokens: int) -> list[tuple[int, ...]]:
        """Return a prompt of so many random tokens for each problem."""
        chooser = random.Random(tokens)
        vocabulary = len(AutoTokenizer.from_pretrained(self.model))
        return [
            tuple(chooser.randrange(vocabulary) for _ in range(tokens))
            for _ in range(self.sizes.problems)
        ]

    async def by_turns(
        self, contestants: Mapping[str, Callable[[], Awaitable[Seconds]]]
    ) -> AsyncIterator[Mapping[str, Sequence[Seconds]]]:
        """Run each in turn; yields the seconds of all so far after each round that counts."""
        found: dict[str, list[Seconds]] = {name: [] for name in contestants}
        for repeat in range(-self.sizes.warmups, self.sizes.repeats):
            for name, run in contestants.items():
                seconds = await run()
                if repeat >= 0:
                    found[name].append(seconds)
            if repeat >= 0:
                yield found

    def rates(self, found: Sequence[Seconds], genomes: int) -> list[float]:
        """Return sampled tokens per second."""
        tokens = genomes * self.sizes.problems * self.sizes.tokens
        return [tokens / seconds["total"] for seconds in found]

    async def generation(
        self, engine: Engine, blocks: Sequence[Sequence[Genome]]
    ) -> Mapping[str, float]:
        """Run a generation of these blocks of genomes, their loads and a step included."""
        return await generation(engine, blocks, self.prompts_P, self.params)

    async def centre(self, engine: Engine) -> Mapping[str, float]:
        """Have the centre answer all that the genomes do, without loads and steps."""
        began = time.perf_counter()
        targets: list[Target] = ["centre"] * self.sizes.genomes
        await sample(engine, targets, self.prompts_P, self.params)
        return {"total": time.perf_counter() - began}


def restored_on_cpu(contest: Population) -> int:
    """Return the fingerprint that a low-rank centre of the model has there after the steps."""
    loaded = load_causal_lm(contest.model, contest.sizes.dtype, torch.device("cpu"))
    space = LowRank()(parameter_infos(loaded))
    return centre_on_cpu(dict(loaded.named_parameters()), space).restore(HISTORY)


def floor(sizes: Sizes, infos: Sequence[ParameterInfo]) -> Callable[[], None]:
    """Return the products of all linear weights for as many rows as a generation has, alone."""
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    random_like = functools.partial(torch.rand, dtype=dtype, device=device)
    weights = [random_like(info.shape) for info in infos if info.kind == "linear"]
    requests = sizes.genomes * sizes.problems
    passes = [_PASS] * (requests * sizes.prompt // _PASS) + [requests * sizes.prompt % _PASS]
    heights = [*passes, *[requests] * sizes.tokens]
    inputs = {side: random_like(max(heights), side) for side in {w.shape[1] for w in weights}}

    def products() -> None:
        for height in heights:
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]][:height], weight)

    return products


def torch_engine(sizes: Sizes, model: Path, emit: Emit) -> None:
    """Measure generations of the torch engine on the device."""
    asyncio.run(_torch_engine(Population(sizes, model), emit))


async def _torch_engine(contest: Population, emit: Emit) -> None:
    sizes = contest.sizes
    builder = TorchEngineBuilder(dtype=sizes.dtype, device=sizes.device)
    engine = await builder(model_name=contest.model, search_space=LowRank())
    same = float(await engine.restore(HISTORY) == restored_on_cpu(contest))
    emit(row("torch engine: the CPU's fingerprint", [same], "", at_least=1))
    infos = parameter_infos(load_architecture(contest.model))
    least = timed({"floor": floor(sizes, infos)}, sizes)["floor"]
    what = f"torch engine, {sizes.genomes} rank-1 genomes"
    async for found in contest.by_turns(
        {
            "population": lambda: contest.generation(engine, [contest.genomes_G]),
            "centre": lambda: contest.centre(engine),
            "one by one": lambda: contest.generation(engine, contest.blocks_one_by_one),
        }
    ):
        ours = contest.rates(found["population"], sizes.genomes)
        centre = contest.rates(found["centre"], sizes.genomes)
        single = contest.rates(found["one by one"], sizes.one_by_one)
        seconds = [each["total"] for each in found["population"]]
        emit(row(f"{what}, tables and step included", ours, "tokens/s"))
        emit(row("torch engine, the centre alone", centre, "tokens/s"))
        emit(row("torch engine, one genome after the other", single, "tokens/s"))
        emit(row("torch engine, population / centre", ratios(ours, centre), "x", at_least=0.9))
        emit(row("torch engine, population / one by one", ratios(ours, single), "x"))
        emit(row("torch engine, a generation", seconds, "s"))
        times = [second / min(least) for second in seconds]
        emit(row("torch engine, a generation / its products alone", times, "x"))
    await engine.close()
