"""The Triton twin of the noise on a GPU: bytes a second, against copying on the same GPU.

    python -m benchmarks.triton_noise

A copy of float32 reads and writes 8 bytes an element, as fast as the memory goes. What the programs
have to read and write is counted likewise, so the ratio says how far they are from being as fast as
the memory: below 1, making the noise takes longer than moving the weights does. Last, a whole step
of a centre (decay, terms and fingerprint) is timed there and on the CPU, and must come to the same
fingerprint. It needs a CUDA device; without one it measures nothing.
"""

import functools
from collections.abc import Callable

import torch

from benchmarks.harness import Row, interleaved, ratios, report, row
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.noise import NoiseKind
from es_cookbook.evolution.noise.triton import kernels as twin
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank

SIDE = 8192
"""Rows and columns of the weight: 256 MiB of float32."""
SLOTS, SLOT_RANK = 256, 16
CALLS, REPEATS = 10, 25
KINDS: tuple[NoiseKind, ...] = ("gaussian", "rademacher")
NAME = "model.layers.0.mlp.up_proj.weight"


def main() -> None:
    if not torch.cuda.is_available():
        print("triton_noise measures programs on a CUDA device, and this machine has none.")
        return
    device = torch.device("cuda")
    report("triton_noise", measured(device, SIDE, CALLS, REPEATS) + whole_steps(device, SIDE, 5))


def measured(device: torch.device, side: int, calls: int, repeats: int) -> list[Row]:
    """Everything by turns, `calls` calls a turn; two rows for each program."""
    weight, copy = torch.zeros(side, side, device=device), torch.empty(side, side, device=device)
    programs = {"copy": (8 * side * side, functools.partial(copy.copy_, weight))}
    for kind in KINDS:
        programs.update({f"{kind}, {n}": p for n, p in of_kind(kind, weight).items()})

    def turn(program: Callable[[], object]) -> None:
        for _ in range(calls):
            program()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = interleaved(
        {name: functools.partial(turn, program) for name, (_, program) in programs.items()},
        repeats=repeats,
        warmups=2,  # The first compiles.
    )
    rates = {
        name: [calls * num_bytes / second / 1e9 for second in seconds[name]]
        for name, (num_bytes, _) in programs.items()
    }
    rows = [row("copy", rates["copy"], "GB/s")]
    for name in list(programs)[1:]:
        rows.append(row(name, rates[name], "GB/s"))
        rows.append(row(f"{name} / copy", ratios(rates[name], rates["copy"]), "x"))
    return rows


def whole_steps(device: torch.device, side: int, repeats: int) -> list[Row]:
    """A step of 32 terms, with the centre on the device and on the CPU with all its cores.

    Raises:
        RuntimeError: The two centres are not the same.
    """
    parameters = [ParameterInfo(NAME, (side, side), "linear")]
    base = {NAME: torch.zeros(side, side, dtype=torch.bfloat16)}
    step = Step(tuple(Term(seed, 1e-3) for seed in range(32)), decay=0.01)
    rows: list[Row] = []
    for name, space in {"low rank": LowRank(), "dense": FullRank()}.items():
        there = Centre(base, space(parameters), device=device)
        here = Centre(base, space(parameters))
        if there.apply(step) != here.apply(step):
            raise RuntimeError(f"a {name} step comes to another centre on {device}")
        times = interleaved(
            {
                "there": functools.partial(there.apply, step),  # waits for its fingerprint
                "here": functools.partial(here.apply, step),
            },
            repeats=repeats,
        )
        rows.append(row(f"whole {name} step of 32 terms", times["there"], "s"))
        rows.append(row(f"whole {name} step of 32 terms, CPU", times["here"], "s"))
        faster = ratios(times["here"], times["there"])
        rows.append(row(f"whole {name} step, CPU / GPU", faster, "x"))
    return rows


def of_kind(kind: NoiseKind, weight: torch.Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name of a program -> bytes that it has to read and write, and a call of it."""
    elements, side, device = weight.numel(), len(weight), weight.device
    narrow = torch.empty_like(weight, dtype=torch.bfloat16)
    terms = [Term(seed, 1e-3) for seed in range(SLOTS)]
    lora_a = torch.empty(SLOTS, SLOT_RANK, side, dtype=torch.bfloat16, device=device)
    lora_b = torch.empty(SLOTS, side, SLOT_RANK, dtype=torch.bfloat16, device=device)
    slots = twin.slot_terms(terms, range(SLOTS), SLOT_RANK, device)

    def dense(number: int) -> Callable[[], object]:
        some = twin.dense_terms(terms[:number], device)
        return lambda: twin.add_dense_(weight, NAME, some, kind)

    def low_rank(number: int) -> Callable[[], object]:
        some = twin.low_rank_terms(terms[:number], 1, device)
        return lambda: twin.add_low_rank_(weight, NAME, some, kind)

    one = twin.dense_terms(terms[:1], device)
    return {
        "noise, bfloat16": (2 * elements, lambda: twin.noise_into(narrow, 1, NAME, kind)),
        "weights of a genome, bfloat16": (
            6 * elements,
            lambda: twin.perturbed_into(narrow, weight, NAME, one, kind),
        ),
        "dense step of 1 term": (8 * elements, dense(1)),
        "dense step of 16 terms": (8 * elements, dense(16)),
        "low-rank step of 1 term": (8 * elements, low_rank(1)),
        f"low-rank step of {SLOTS} terms": (8 * elements, low_rank(SLOTS)),
        f"{SLOTS} LoRA slots of rank {SLOT_RANK}, bfloat16": (
            2 * (lora_a.numel() + lora_b.numel()),
            lambda: twin.factors_into(lora_a, lora_b, NAME, slots, kind),
        ),
    }


if __name__ == "__main__":
    main()
