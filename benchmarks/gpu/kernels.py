"""Kernels: noise, slots of a population, and a whole step, each with the CPU's bits."""

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.sizes import Emit, Sizes, timed
from benchmarks.harness import mirrored_pairs, ratios, row
from es_cookbook.checkpoints.models import load_architecture, parameter_infos
from es_cookbook.engines.genome_terms import GenomeFactors, Slots
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.noise import NoiseKind
from es_cookbook.evolution.noise import triton_kernels as twin
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank

KINDS: tuple[NoiseKind, ...] = ("gaussian", "rademacher")
NAME = "model.layers.0.mlp.up_proj.weight"


@contextlib.contextmanager
def no_interpreter() -> Generator[None]:
    """Have NumPy, not Triton's interpreter, compute on the CPU inside this context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def centre_on_cpu(base: Mapping[str, torch.Tensor], space: SearchSpace) -> Centre:
    """Return a centre on the CPU by NumPy, also where Triton's interpreter would be used."""
    with no_interpreter():
        return Centre(base, space)


def noise(sizes: Sizes, _: Path, emit: Emit) -> None:
    """Measure what every program makes, in bytes a second, against copying; two rows for each.

    A copy of float32 reads and writes 8 bytes an element, as fast as the memory goes; what the
    programs read and write is counted likewise, so below 1 making the noise takes longer than
    moving the weights.
    """
    device, side = torch.device(sizes.device), sizes.side
    weight, copy = torch.zeros(side, side, device=device), torch.empty(side, side, device=device)
    programs = {"copy": (8 * side * side, functools.partial(copy.copy_, weight))}
    for kind in KINDS:
        programs |= {f"{kind}, {n}": p for n, p in of_kind(kind, weight, sizes).items()}

    def turn(program: Callable[[], object]) -> None:
        for _ in range(sizes.calls):
            program()

    seconds = timed({n: functools.partial(turn, p) for n, (_, p) in programs.items()}, sizes)
    rates = {
        name: [sizes.calls * num_bytes / second / 1e9 for second in seconds[name]]
        for name, (num_bytes, _) in programs.items()
    }
    emit(row("copy", rates["copy"], "GB/s"))
    for name in list(programs)[1:]:
        emit(row(name, rates[name], "GB/s"))
        emit(row(f"{name} / copy", ratios(rates[name], rates["copy"]), "x"))


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


def slots(sizes: Sizes, model: Path, emit: Emit) -> None:
    """Measure the factors of a population in all slots of a model, against copying as many bytes.

    All are written by one launch.

    Raises:
        RuntimeError: They are not those that the CPU makes.
    """
    device = torch.device(sizes.device)
    infos = parameter_infos(load_architecture(str(model)))
    low_rank, adapters = LowRank()(infos), Adapter(rank=8, init="orthogonal")(infos)
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
    fill(population(device), of_terms)
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
    emit(row("slots are the CPU's, bit for bit", [float(same)], "", at_least=1))
    every = [tensor for pair in of_terms.values() for tensor in pair]
    copies = [torch.empty_like(tensor) for tensor in every]
    times = timed(
        {
            "copy": lambda: [c.copy_(tensor) for c, tensor in zip(copies, every, strict=True)],
            "low rank": lambda: fill(population(device), of_terms),
            "adapters": lambda: fill(
                GenomeFactors(genomes_G, adapters, device, centre), of_adapters
            ),
        },
        sizes,
    )
    what = f"{len(shapes)} weights, {len(genomes_G)} genomes"
    emit(row(f"slots, rank 1: {what}", times["low rank"], "s"))
    emit(row("slots, rank 1 / copies of them", ratios(times["low rank"], times["copy"]), "x"))
    emit(row(f"adapters, rank 8: {what}", times["adapters"], "s"))


def step(sizes: Sizes, _: Path, emit: Emit) -> None:
    """Measure a step with decay and fingerprint there, and once on the CPU with all its cores."""
    side, device = sizes.side, torch.device(sizes.device)
    parameters = [ParameterInfo(NAME, (side, side), "linear")]
    base = {NAME: torch.zeros(side, side, dtype=torch.bfloat16)}
    move = Step(tuple(Term(seed, 1e-3) for seed in range(min(32, sizes.terms))), decay=0.01)
    for name, builder in {"low rank": LowRank(), "dense": FullRank()}.items():
        space = builder(parameters)
        there, here = Centre(base, space, device=device), centre_on_cpu(base, space)
        began = time.perf_counter()
        on_cpu = here.apply(move)
        seconds = time.perf_counter() - began
        same = float(there.apply(move) == on_cpu)
        what = f"whole {name} step of {len(move.terms)} terms"
        emit(row(f"{what}: the CPU's fingerprint", [same], "", at_least=1))
        times = timed({"there": functools.partial(there.apply, move)}, sizes)["there"]
        emit(row(what, times, "s"))
        emit(row(f"{what}, CPU", [seconds], "s"))
        emit(row(f"{what}, CPU / GPU", [seconds / each for each in times], "x"))
