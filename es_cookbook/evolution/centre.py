"""The centre of the population: parameters as a function of the base model and the history.

The centre is kept in float32 for any dtype of the base, for the selected parameters only. It
moves by steps, in exact arithmetic (see `es_cookbook.evolution.spaces.base`), so the same steps
give the same bits on any machine and with any number of threads, and `restore` is exact in every
dtype: perturbed weights are derived from the centre, and nothing is ever undone by subtraction.

A step with a rule (`es_cookbook.evolution.genome`) moves it by what the rule makes of the terms, in
`exact`. A genome with offsets begins at base + offsets in place of the centre.

It moves where it is kept: on the CPU with a few threads, on a GPU by Triton programs that make the
same noise there (`es_cookbook.evolution.noise.triton_kernels`). Those run in Triton's interpreter
in the tests, bit for bit like NumPy; **on a real GPU they have not run yet.**

Decay towards the base is exact too: with keep = float32(1 - decay), rounded once from float64,

    centre <- base + keep * (centre - base)

where the difference, the product and the sum are each rounded to float32 by themselves.

The fingerprint of a centre is Σ bits_i · m_i modulo 2⁶⁴ over all elements, bits_i the float32 bit
pattern of element i of a tensor and m_i = a + i · b with a odd and b twice an odd number, both from
the tensor's name. It is a sum, so shards add up in any order; a flipped bit always changes it, and
so do two different elements that change places (in tensors of up to 2³¹ elements).
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from es_cookbook.common.machine.cores import num_cores
from es_cookbook.evolution.exact import (
    MODULUS,
    apply_rule_,
    decay_,
    fingerprint_of,
    set_to_offsets_,
    start_of,
)
from es_cookbook.evolution.genome import Genome, OffsetsRule, Step, Term
from es_cookbook.evolution.noise import Part
from es_cookbook.evolution.spaces.base import AddTerms, SearchSpace

_T = TypeVar("_T")
_R = TypeVar("_R")


def noise_device(device: torch.device) -> torch.device:
    """Return the device that makes noise for a model on `device`: it if `on_gpu`, or the CPU."""
    return device if on_gpu(device) else torch.device("cpu")


def on_gpu(device: torch.device) -> bool:
    """Return whether Triton kernels can run on this device.

    That needs an NVIDIA GPU, and Triton installed.

    With TRITON_INTERPRET=1 they run on the CPU too, so tests need no GPU.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def for_each(work: Callable[[_T], _R], items: Iterable[_T], num_threads: int) -> list[_R]:
    """Apply `work` to each item in several threads; one thread is the caller's own.

    On a GPU `num_threads` must be 1: other threads may queue their work on another stream.
    """
    if num_threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))


_CPU = torch.device("cpu")


class Centre:
    """The current parameters. Not safe to move from two threads at once.

    Args:
        base: the base model's parameters by name, at least the selected ones; kept by reference and
            never written, here or elsewhere. They are on the CPU or on
            `device`, where they are sent one at a time when they are needed.
        num_threads: threads that move it on the CPU, `num_cores()` if None. Does not change bits.
        parts: the base's part of each selected parameter, for a tensor-parallel rank; all
            of all of them if None.
        device: device that holds and moves it: the CPU, or one that `noise_device` returns.

    Attributes:
        weights: name -> float32 tensor, the selected parameters only; the same tensors for the
            centre's whole life, moved in place.
        shapes: name -> shape of the whole parameter.
        parts: name -> which part of the parameter that is.
        fingerprints: name -> its term in the fingerprint returned last; a rank's own share, to
            which others' are added.
    """

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        space: SearchSpace,
        num_threads: int | None = None,
        parts: Mapping[str, Part] | None = None,
        device: torch.device = _CPU,
    ) -> None:
        base = space.base(base)
        if parts is None:
            parts = {name: Part.whole(shape) for name, shape in space.shapes.items()}
        self.shapes = space.shapes
        self.parts = parts
        self.fingerprints: dict[str, int] = {}
        self._space = space
        self._start = start_of(space.shapes)
        self._device = device
        self._on_gpu = on_gpu(device)
        self._num_threads = 1 if self._on_gpu else num_threads or num_cores()
        self._base = {name: base[name].detach() for name in space.shapes}
        self.weights = {
            name: tensor.to(device, torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in self._base.items()
        }
        self._adder = functools.partial(_adder, space, device if self._on_gpu else None)
        # Terms go to a GPU once for all the parameters that a genome perturbs.
        self._add_genome = functools.lru_cache(maxsize=1024)(self._adder)

    def apply(self, step: Step) -> int:
        """Move by one step: decay first, then the terms in order. Returns the fingerprint."""
        return self._each_tensor(self._mover([step]))

    def restore(
        self, steps: Iterable[Step], start: Mapping[str, torch.Tensor] | None = None
    ) -> int:
        """Set the centre to the base moved by these steps, from anywhere. Returns the fingerprint.

        Args:
            steps: steps in order.
            start: a centre to move in place of the base: whole parameters by name. The base is
                still what decay goes towards.
        """
        move = self._mover(merge_steps(steps))

        def from_start(name: str) -> None:
            weight = self.weights[name]
            if weight.shape != self._base[name].shape:  # it was released
                weight.data = weight.new_empty(self._base[name].shape)
            begin = self._base[name] if start is None else _part_of(start[name], self.parts[name])
            weight.copy_(begin.reshape(weight.shape))
            move(name)

        return self._each_tensor(from_start)

    def release(self) -> None:
        """Give back the memory of the weights: nothing but `restore` may follow."""
        for weight in self.weights.values():
            weight.data = weight.new_empty(0)  # a storage that NumPy has seen cannot be resized

    def perturbed(self, genome: Genome, name: str) -> torch.Tensor:
        """Return a genome's own value of one parameter: a new float32 tensor.

        The centre, or base + offsets where the genome has offsets, + terms.
        """
        weight = self.weights[name].clone()
        if genome.offsets is not None:
            set_to_offsets_(
                weight, self._base[name], genome.offsets, self._start[name], self.parts[name]
            )
        self._add_genome(genome.terms)(name, weight, self.parts[name])
        return weight

    def fingerprint(self) -> int:
        """Compute the 64-bit unsigned fingerprint of all selected parameters."""
        return self._each_tensor(lambda name: None)

    def _mover(self, steps: Sequence[Step]) -> Callable[[str], None]:
        """Return a function that moves one tensor by these steps."""
        move = _mover(self._space, steps, self._adder)
        return lambda name: move(name, self.weights[name], self._base[name], self.parts[name])

    def _each_tensor(self, work: Callable[[str], None]) -> int:
        """Do the work on each tensor, a few at a time. Returns the fingerprint."""

        def work_and_sum(name: str) -> int:
            work(name)
            return fingerprint_of(name, self.weights[name], self.parts[name])

        largest_first = sorted(self.weights, key=lambda name: -self.weights[name].numel())
        found = for_each(work_and_sum, largest_first, self._num_threads)
        self.fingerprints = dict(zip(largest_first, found, strict=True))
        return sum(found) % MODULUS


def moved(
    name: str,
    base: torch.Tensor,
    space: SearchSpace,
    steps: Sequence[Step],
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move one parameter of the centre alone, on the CPU, from the base or from `start`.

    Both are values of the parameter; `merge_steps` makes steps cheaper. Returns a new one, float32.
    """
    weight = (base if start is None else start).to(torch.float32, copy=True).contiguous()
    move = _mover(space, steps, functools.partial(_adder, space, None))
    move(name, weight, base, Part.whole(space.shapes[name]))
    return weight


def _mover(
    space: SearchSpace, steps: Sequence[Step], adder: Callable[[tuple[Term, ...]], AddTerms]
) -> Callable[[str, torch.Tensor, torch.Tensor, Part], None]:
    """Return a function that moves one weight, given its name, base and part, by these steps."""
    starts = start_of(space.shapes)
    moves = [(step, [adder(group) for group in step.groups]) for step in steps]

    def move(name: str, weight: torch.Tensor, base: torch.Tensor, part: Part) -> None:
        for step, adders in moves:
            if step.decay:
                decay_(weight, base, step.decay)
            if isinstance(step.rule, OffsetsRule):
                set_to_offsets_(weight, base, step.rule.offsets, starts[name], part)
            elif step.rule is not None:
                apply_rule_(step.rule, adders, name, weight, part, space.shapes[name])
            elif adders:
                adders[0](name, weight, part)

    return move


def _adder(space: SearchSpace, device: torch.device | None, terms: tuple[Term, ...]) -> AddTerms:
    """Return a function that adds these terms to weights on a GPU, or on the CPU if None."""
    if device is not None:
        return space.device_adder(terms, device)
    return lambda name, weight, part: space.add_terms_(name, weight, terms, part)


def merge_steps(steps: Iterable[Step]) -> list[Step]:
    """Merge steps into as few as possible, so that a weight is read once for many."""
    merged: list[Step] = []
    plain: list[Term] = []
    decay = 0.0

    def close() -> None:
        if plain or decay:
            merged.append(Step(terms=tuple(plain), decay=decay))
        plain.clear()

    for step in steps:
        if step.decay == 1:  # Back to the base: earlier steps do not matter.
            merged.clear()
            plain.clear()
            decay = 0.0
        if step.decay or step.rule is not None:
            close()
            decay = step.decay
        if step.rule is not None:
            merged.append(step)
            decay = 0.0
        else:
            plain.extend(step.terms)
    close()
    return merged


def _part_of(whole: torch.Tensor, part: Part) -> torch.Tensor:
    return whole.reshape(-1, part.width)[slice(*part.rows), slice(*part.columns)]
