"""Everything that only a GPU can show.

    python -m benchmarks.gpu
    python -m benchmarks.gpu parts=noise,slots
    python -m benchmarks.gpu dry=true

The parts, each in a separate process; one that fails leaves the others their rows:

- noise: what the Triton programs make, in bytes a second, against copying on the same GPU. A copy
  of float32 reads and writes 8 bytes an element, as fast as the memory goes; what the programs read
  and write is counted likewise, so below 1 making the noise takes longer than moving the weights;
- slots: the factors of a population in all LoRA slots of a model, by one launch, against a copy of
  as many bytes; adapters also against a launch for each genome and factor;
- step: a whole step of a centre (decay, terms, fingerprint) there and on the CPU;
- torch: generations of the torch engine: a population against the centre alone and against one
  genome after the other, and its centre's fingerprint against the CPU's;
- vllm: the same population on vLLM against plain vLLM, and one by one with full weights.

The model has random weights and the shape of Qwen2.5-0.5B, in bfloat16, without its large
vocabulary. With `dry=true` all of it runs at tiny sizes where no GPU is: the programs in Triton's
interpreter, the engines on the CPU, vLLM where it is installed. The numbers then mean nothing, and
are only written where `results` says.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Literal

import chz
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks import harness
from benchmarks.engines import (
    HISTORY,
    generation,
    plain_generation,
    sample,
    shut_down,
    start_plain,
)
from benchmarks.harness import Row, interleaved, mirrored_pairs, ratios, report, row, table
from es_cookbook.checkpoints.models import load_architecture, load_causal_lm, parameter_infos
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.engines.base import Engine, Target
from es_cookbook.engines.genome_terms import GenomeFactors, Slots
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.noise import NoiseKind
from es_cookbook.evolution.noise import triton_kernels as twin
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.rl.types import SamplingParams

KINDS: tuple[NoiseKind, ...] = ("gaussian", "rademacher")
NAME = "model.layers.0.mlp.up_proj.weight"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; `side` is that of a square weight, `model` a Qwen2's sizes."""

    side: int
    calls: int
    warmups: int
    repeats: int
    terms: int
    model: Mapping[str, int]
    genomes: int
    one_by_one: int
    problems: int
    prompt: int
    tokens: int
    kv_gib: float
    dtype: Literal["bfloat16", "float32"]


FULL = Sizes(
    side=8192,
    calls=10,
    warmups=1,  # It compiles.
    repeats=3,
    terms=256,
    model={
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    genomes=64,
    one_by_one=2,
    problems=32,
    prompt=64,
    tokens=32,
    kv_gib=4.0,
    dtype="bfloat16",
)
DRY = Sizes(
    side=5,
    calls=1,
    warmups=0,
    repeats=1,
    terms=3,
    model={
        "hidden_size": 64,  # vLLM's attention on the CPU needs heads of 32
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    genomes=2,
    one_by_one=1,
    problems=1,
    prompt=3,
    tokens=2,
    kv_gib=0.1,
    dtype="float32",
)


def write_model(directory: Path, sizes: Sizes) -> Path:
    """Write a model of random weights, whose answers no token ends."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokenizer.save_pretrained(directory)
    shape = Qwen2Config(
        **sizes.model,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,  # vLLM has no LoRA slot for a separate head
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(shape).to(getattr(torch, sizes.dtype)).save_pretrained(directory)
    return directory


def device_of(sizes: Sizes) -> torch.device:
    return torch.device("cpu" if sizes == DRY else "cuda")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    device: torch.device, functions: Mapping[str, Callable[[], object]], sizes: Sizes
) -> dict[str, list[float]]:
    """Return seconds of each until the device is done, by turns."""

    def until_done(function: Callable[[], object]) -> None:
        function()
        wait(device)

    return interleaved(
        {name: functools.partial(until_done, function) for name, function in functions.items()},
        repeats=sizes.repeats,
        warmups=sizes.warmups,
    )


# --- noise ---------------------------------------------------------------------------------------


def noise(sizes: Sizes, _: Path) -> list[Row]:
    """Measure every program by turns, `calls` calls a turn; two rows for each."""
    device, side = device_of(sizes), sizes.side
    weight, copy = torch.zeros(side, side, device=device), torch.empty(side, side, device=device)
    programs = {"copy": (8 * side * side, functools.partial(copy.copy_, weight))}
    for kind in KINDS:
        programs |= {f"{kind}, {n}": p for n, p in of_kind(kind, weight, sizes).items()}

    def turn(program: Callable[[], object]) -> None:
        for _ in range(sizes.calls):
            program()

    seconds = timed(
        device, {n: functools.partial(turn, p) for n, (_, p) in programs.items()}, sizes
    )
    rates = {
        name: [sizes.calls * num_bytes / second / 1e9 for second in seconds[name]]
        for name, (num_bytes, _) in programs.items()
    }
    rows = [row("copy", rates["copy"], "GB/s")]
    for name in list(programs)[1:]:
        rows.append(row(name, rates[name], "GB/s"))
        rows.append(row(f"{name} / copy", ratios(rates[name], rates["copy"]), "x"))
    return rows


def of_kind(
    kind: NoiseKind, weight: torch.Tensor, sizes: Sizes
) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return for each program the bytes that it has to read and write, and a call of it."""
    elements, device = weight.numel(), weight.device
    terms = [Term(seed, 1e-3) for seed in range(sizes.terms)]

    def dense(number: int) -> Callable[[], object]:
        some = twin.device_terms(terms[:number], device)
        return lambda: twin.add_dense_(weight, NAME, some, kind)

    def low_rank(number: int) -> Callable[[], object]:
        some = twin.device_terms(terms[:number], device)
        return lambda: twin.add_low_rank_(weight, NAME, some, 1, kind)

    many = min(16, sizes.terms)
    return {
        "dense step of 1 term": (8 * elements, dense(1)),
        f"dense step of {many} terms": (8 * elements, dense(many)),
        "low-rank step of 1 term": (8 * elements, low_rank(1)),
        f"low-rank step of {sizes.terms} terms": (8 * elements, low_rank(sizes.terms)),
    }


# --- slots ---------------------------------------------------------------------------------------


def slots(sizes: Sizes, model: Path) -> list[Row]:
    """Measure the factors of a population in all slots of a model.

    Raises:
        RuntimeError: They are not those that the CPU makes.
    """
    device = device_of(sizes)
    infos = parameter_infos(load_architecture(str(model)))
    low_rank, adapters = LowRank()(infos), Adapter(rank=8, init="orthogonal")(infos)
    assert adapters.adapter is not None
    genomes_G = mirrored_pairs(sizes.genomes, 0.01)
    shapes = {info.name: info.shape for info in infos if info.name in low_rank.shapes}
    centre = Centre({}, adapters, device=device)

    def empty(rank: int, where: torch.device) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(len(genomes_G), *shape, dtype=torch.bfloat16, device=where)

        return {
            name: (zeros(rank, width), zeros(height, rank))
            for name, (height, width) in shapes.items()
        }

    def fill(
        factors: GenomeFactors, tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for name, (a, b) in tensors.items():
            factors.write(Slots(name, a, b))
        factors.finish()

    def population(where: torch.device) -> GenomeFactors:
        return GenomeFactors(genomes_G, low_rank, where)

    of_terms, of_adapters = empty(1, device), empty(8, device)
    there, factors = adapters.adapter, adapters.adapter.lora.scale

    def in_one_launch() -> None:
        fill(GenomeFactors(genomes_G, adapters, device, centre), of_adapters)

    def one_after_the_other() -> None:
        for name, (a, b) in of_adapters.items():
            of_a, of_b = there.targets[name]
            for g, genome in enumerate(genomes_G):
                a[g] = centre.perturbed(genome, of_a)
                b[g] = centre.perturbed(genome, of_b) * factors

    every = [tensor for pair in of_terms.values() for tensor in pair]
    copies = [torch.empty_like(tensor) for tensor in every]
    times = timed(
        device,
        {
            "copy": lambda: [c.copy_(tensor) for c, tensor in zip(copies, every, strict=True)],
            "low rank": lambda: fill(population(device), of_terms),
            "one after the other": one_after_the_other,
            "adapters": in_one_launch,
        },
        sizes,
    )
    on_cpu = empty(1, torch.device("cpu"))
    with no_interpreter():
        fill(population(torch.device("cpu")), on_cpu)
    same = all(
        torch.equal(found.cpu().view(torch.int16), wanted.view(torch.int16))
        for name in shapes
        for found, wanted in zip(of_terms[name], on_cpu[name], strict=True)
    )
    if not same:
        raise RuntimeError(f"the slots made on {device} are not those made on the CPU")
    what = f"{len(shapes)} weights, {len(genomes_G)} genomes"
    return [
        row(f"slots, rank 1: {what}", times["low rank"], "s"),
        row("slots, rank 1 / copies of them", ratios(times["low rank"], times["copy"]), "x"),
        row("slots are the CPU's, bit for bit", [float(same)], "", at_least=1),
        row(f"adapters, rank 8: {what}", times["adapters"], "s"),
        row(
            "adapters: a launch for each genome and factor / one launch",
            ratios(times["one after the other"], times["adapters"]),
            "x",
        ),
    ]


# --- step ----------------------------------------------------------------------------------------


def step(sizes: Sizes, _: Path) -> list[Row]:
    """Measure steps with decay, with the centre on the device and on the CPU with all its cores."""
    device, side = device_of(sizes), sizes.side
    parameters = [ParameterInfo(NAME, (side, side), "linear")]
    base = {NAME: torch.zeros(side, side, dtype=torch.bfloat16)}
    move = Step(tuple(Term(seed, 1e-3) for seed in range(min(32, sizes.terms))), decay=0.01)
    rows: list[Row] = []
    for name, builder in {"low rank": LowRank(), "dense": FullRank()}.items():
        space = builder(parameters)
        there = Centre(base, space, device=device)
        here = centre_on_cpu(base, space)
        times = timed(
            device,
            {
                "there": functools.partial(there.apply, move),
                "here": functools.partial(here.apply, move),
            },
            sizes,
        )
        same = float(there.fingerprint() == here.fingerprint())
        what = f"whole {name} step of {len(move.terms)} terms"
        rows += [
            row(what, times["there"], "s"),
            row(f"{what}, CPU", times["here"], "s"),
            row(f"{what}, CPU / GPU", ratios(times["here"], times["there"]), "x"),
            row(f"{what}: the CPU's fingerprint", [same], "", at_least=1),
        ]
    return rows


def centre_on_cpu(base: Mapping[str, torch.Tensor], space: SearchSpace) -> Centre:
    """Return a centre on the CPU by NumPy, also where Triton's interpreter would be used."""
    with no_interpreter():
        return Centre(base, space)


@contextlib.contextmanager
def no_interpreter() -> Generator[None]:
    """Have NumPy, not Triton's interpreter, compute on the CPU inside this context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


# --- engines -------------------------------------------------------------------------------------


class Population:
    """The same genomes and prompts for every engine."""

    def __init__(self, sizes: Sizes, model: Path) -> None:
        self.sizes, self.model = sizes, str(model)
        self.params = SamplingParams(max_tokens=sizes.tokens)
        self.genomes_G = mirrored_pairs(sizes.genomes)
        self.blocks_one_by_one = [[genome] for genome in self.genomes_G[: sizes.one_by_one]]
        chooser = random.Random(0)
        vocabulary = len(AutoTokenizer.from_pretrained(BUNDLED_MODEL))
        self.prompts_P = [
            tuple(chooser.randrange(vocabulary) for _ in range(sizes.prompt))
            for _ in range(sizes.problems)
        ]

    async def seconds(
        self, contestants: Mapping[str, Callable[[], Awaitable[Mapping[str, float]]]]
    ) -> dict[str, list[Mapping[str, float]]]:
        """Return seconds of each contestant, by turns, after the turns that warm up."""
        found: dict[str, list[Mapping[str, float]]] = {name: [] for name in contestants}
        for repeat in range(-self.sizes.warmups, self.sizes.repeats):
            for name, run in contestants.items():
                seconds = await run()
                if repeat >= 0:
                    found[name].append(seconds)
        return found

    def rates(self, found: Sequence[Mapping[str, float]], genomes: int) -> list[float]:
        """Return sampled tokens per second."""
        tokens = genomes * self.sizes.problems * self.sizes.tokens
        return [tokens / seconds["total"] for seconds in found]

    async def generation(
        self, engine: Engine, blocks: Sequence[Sequence[Genome]]
    ) -> Mapping[str, float]:
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


def torch_engine(sizes: Sizes, model: Path) -> list[Row]:
    """Measure generations of the torch engine on the device."""
    return asyncio.run(_torch_engine(Population(sizes, model)))


async def _torch_engine(contest: Population) -> list[Row]:
    sizes = contest.sizes
    device = device_of(sizes).type
    builder = TorchEngineBuilder(dtype=sizes.dtype, device=device)
    engine = await builder(model_name=contest.model, search_space=LowRank())
    found = await contest.seconds(
        {
            "population": lambda: contest.generation(engine, [contest.genomes_G]),
            "centre": lambda: contest.centre(engine),
            "one by one": lambda: contest.generation(engine, contest.blocks_one_by_one),
        }
    )
    there = await engine.restore(HISTORY)
    await engine.close()
    here = restored_on_cpu(contest)
    ours = contest.rates(found["population"], sizes.genomes)
    centre = contest.rates(found["centre"], sizes.genomes)
    single = contest.rates(found["one by one"], sizes.one_by_one)
    what = f"torch engine, {sizes.genomes} rank-1 genomes"
    return [
        row(f"{what}, tables and step included", ours, "tokens/s"),
        row("torch engine, the centre alone", centre, "tokens/s"),
        row("torch engine, one genome after the other", single, "tokens/s"),
        row("torch engine, population / centre", ratios(ours, centre), "x", at_least=0.8),
        row("torch engine, population / one by one", ratios(ours, single), "x"),
        row("torch engine: the CPU's fingerprint", [float(there == here)], "", at_least=1),
    ]


def vllm_engine(sizes: Sizes, model: Path) -> list[Row]:
    """Measure generations of the vLLM engine beside plain vLLM; nothing if it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return []
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return asyncio.run(_vllm_engine(Population(sizes, model)))


async def _vllm_engine(contest: Population) -> list[Row]:
    sizes = contest.sizes
    cache = round(sizes.kv_gib * 2**30)
    async with contextlib.AsyncExitStack() as stack:
        eager = sizes.dtype == "float32"
        plain = await asyncio.to_thread(start_plain, contest.model, sizes.dtype, cache, eager=eager)
        stack.push_async_callback(asyncio.to_thread, shut_down, plain)
        builder = VLLMEngineBuilder(
            dtype=sizes.dtype, kv_cache_gib=sizes.kv_gib, max_genomes=sizes.genomes
        )
        population = await builder(model_name=contest.model, search_space=LowRank())
        stack.push_async_callback(population.close)
        single = await builder(model_name=contest.model, search_space=FullRank())
        stack.push_async_callback(single.close)
        ids = itertools.count()
        found = await contest.seconds(
            {
                "plain": lambda: plain_generation(
                    plain, ids, contest.prompts_P, sizes.genomes, sizes.tokens
                ),
                "population": lambda: contest.generation(population, [contest.genomes_G]),
                "one by one": lambda: contest.generation(single, contest.blocks_one_by_one),
            }
        )
        there = await population.restore(HISTORY)
    here = restored_on_cpu(contest)
    ours = contest.rates(found["population"], sizes.genomes)
    theirs = contest.rates(found["plain"], sizes.genomes)
    one_by_one = contest.rates(found["one by one"], sizes.one_by_one)
    shares = {
        what: [seconds[what] / seconds["total"] for seconds in found["population"]]
        for what in ("load", "apply")
    }
    return [
        row("plain vLLM", theirs, "tokens/s"),
        row(
            f"vLLM engine, {sizes.genomes} rank-1 genomes, slots and step included",
            ours,
            "tokens/s",
        ),
        row("vLLM engine, full weights, one genome after the other", one_by_one, "tokens/s"),
        row("vLLM engine, population / plain vLLM", ratios(ours, theirs), "x", at_least=0.8),
        row("vLLM engine, population / one by one", ratios(ours, one_by_one), "x", at_least=1.7),
        row("vLLM engine: filling slots", shares["load"], "of a generation", at_most=0.05),
        row("vLLM engine: a step", shares["apply"], "of a generation", at_most=0.05),
        row("vLLM engine: the CPU's fingerprint", [float(there == here)], "", at_least=1),
    ]


# --- all of it -----------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[Sizes, Path], list[Row]]] = {
    "noise": noise,
    "slots": slots,
    "step": step,
    "torch": torch_engine,
    "vllm": vllm_engine,
}


@chz.chz
class Config:
    """What only a GPU can show: programs, slots, steps and engines."""

    parts: tuple[str, ...] = chz.field(default=tuple(PARTS), doc="which, in this order")
    dry: bool = chz.field(
        default=False, doc="tiny sizes on the CPU and in Triton's interpreter; numbers mean nothing"
    )
    results: str | None = chz.field(
        default=None, doc="directory of the JSON; benchmarks/results if unset, in a dry run none"
    )


def main(config: Config) -> None:
    """Run the parts and write what they measured."""
    for name in config.parts:
        if name not in PARTS:
            raise ConfigError(f"unknown part {name!r}: {nearest(name, PARTS)}")
    if not config.dry and not torch.cuda.is_available():
        raise ConfigError(
            "benchmarks.gpu measures on an NVIDIA GPU, and this machine has none that torch can "
            "use; dry=true runs every part at tiny sizes without one"
        )
    sizes, rows, failed = DRY if config.dry else FULL, list[Row](), list[str]()
    # The interpreter has to be asked for before Triton is imported; vLLM's programs have none.
    interpreted = [name for name in config.parts if name != "vllm"] if config.dry else []
    alone = [[name] for name in config.parts if name not in interpreted]
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        model = write_model(Path(directory) / "model", sizes)
        together = [(interpreted, True)] if interpreted else []
        for names, interpret in (*together, *((names, False) for names in alone)):
            with pytest.MonkeyPatch.context() as patch_too:
                if interpret:
                    patch_too.setenv("TRITON_INTERPRET", "1")
                found, failed_too = in_own_process(names, sizes, model)
            rows += found
            failed += failed_too
    if config.results is not None:
        harness.RESULTS = Path(config.results)
    if config.dry and config.results is None:
        print(table(rows))
    else:
        report("gpu", rows)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def in_own_process(names: Sequence[str], sizes: Sizes, model: Path) -> tuple[list[Row], list[str]]:
    """Return rows of some parts, and those parts that failed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(run_parts, names, sizes, model).result()
        except BrokenProcessPool:  # an engine's process that was killed, say
            return [], list(names)


def run_parts(names: Sequence[str], sizes: Sizes, model: Path) -> tuple[list[Row], list[str]]:
    """Run parts here, in turn; a failing part reports why, and the others go on."""
    rows, failed = list[Row](), list[str]()
    for name in names:
        began = time.perf_counter()
        try:
            rows += PARTS[name](sizes, model)
        except Exception:  # of any kind
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return rows, failed


if __name__ == "__main__":
    run_cli(main, Config)
