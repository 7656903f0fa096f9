"""The centre of the population: parameters as a function of the base model and the history.

The centre is kept in float32 whatever the base model's dtype, for the selected parameters only. It
moves by steps, in exact arithmetic (see `es_cookbook.evolution.spaces.base`), so the same steps
give the same bits on any machine and with any number of threads, and `restore` is exact in every
dtype: perturbed weights are derived from the centre, and nothing is ever undone by subtraction.

Decay towards the base is exact too: with keep = float32(1 - decay), rounded once from float64,

    centre <- base + keep * (centre - base)

where the difference, the product and the sum are each rounded to float32 by themselves.

The fingerprint of a centre is Σ bits_i · m_i modulo 2⁶⁴ over all elements, bits_i the float32 bit
pattern of element i of a tensor and m_i = a + i · b with a odd and b twice an odd number, both from
the tensor's name. It is a sum, so shards add up in any order; a flipped bit always changes it, and
so do two different elements that change places (in tensors of up to 2³¹ elements).
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from es_cookbook.errors import ModelError
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.base import SearchSpace, as_array
from es_cookbook.evolution.spaces.part import Part

_PIECE = 2**15
"""Elements that are worked on at once, so that they and their temporaries stay in the cache."""
_MODULUS = 2**64


class Centre:
    """The current parameters. Not safe to move from two threads at once.

    Args:
        base: the base model's parameters by name, at least the selected ones; kept by reference and
            never written, and nobody else may write them either.
        space: which of them genomes perturb, and how.
        num_threads: that move it; one a core if None. Bits do not depend on it.
        parts: which part of each selected parameter the base has, for a tensor-parallel rank; all
            of all of them if None.

    Attributes:
        weights: name -> float32 tensor, the selected parameters only; the same tensors for the
            centre's whole life, moved in place.
        parts: name -> which part of the parameter that is.
        fingerprints: name -> what it added to the fingerprint that was given last; a rank's own
            share, which others' are added to.

    Raises:
        ModelError: The base lacks a selected parameter, or has it in another size or not on the
            CPU.
    """

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        space: SearchSpace,
        num_threads: int | None = None,
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        base = space.base(base)
        if parts is None:
            parts = {name: Part.whole(shape) for name, shape in space.shapes.items()}
        self.parts = parts
        self.fingerprints: dict[str, int] = {}
        for name, shape in space.shapes.items():
            if name not in base:
                raise ModelError(
                    f"the search space perturbs {name}, and the base model has no such parameter"
                )
            whole = parts[name] == Part.whole(shape)
            found = tuple(base[name].shape)
            fits = found == shape if whole else base[name].numel() == parts[name].num_elements
            if not fits or base[name].device.type != "cpu":
                raise ModelError(
                    f"{name} must be a CPU tensor of shape {shape}, or the part asked for, found "
                    f"one of shape {found} on {base[name].device}"
                )
        self._space = space
        self._num_threads = num_threads or os.cpu_count() or 1
        self._base = {name: base[name].detach() for name in space.shapes}
        self.weights = {
            name: tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in self._base.items()
        }

    def apply(self, step: Step) -> int:
        """Move by one step: decay first, then the terms in order. Gives the fingerprint."""
        return self._each_tensor(lambda name: self._move(name, [step]))

    def restore(
        self, steps: Iterable[Step], start: Mapping[str, torch.Tensor] | None = None
    ) -> int:
        """Set the centre to the base moved by these steps, from anywhere. Gives the fingerprint.

        Args:
            steps: in order.
            start: a centre to move in place of the base: whole parameters by name. The base is
                still what decay goes towards.
        """
        merged = merge_steps(steps)

        def from_start(name: str) -> None:
            weight = self.weights[name]
            if start is None:
                weight.copy_(self._base[name])
            else:
                weight.copy_(_part_of(start[name], self.parts[name]).reshape(weight.shape))
            self._move(name, merged)

        return self._each_tensor(from_start)

    def perturbed(self, genome: Genome, name: str) -> torch.Tensor:
        """A genome's own value of one parameter: a new float32 tensor, centre + terms."""
        weight = self.weights[name].clone()
        self._space.add_terms_(name, weight, genome.terms, self.parts[name])
        return weight

    def fingerprint(self) -> int:
        """64-bit unsigned fingerprint of all selected parameters."""
        return self._each_tensor(lambda name: None)

    def _fingerprint_of(self, name: str) -> int:
        flat = self.weights[name].view(-1)
        total, done = 0, 0
        for span in self.parts[name].spans():
            total += fingerprint_part(name, flat[done : done + len(span)], span.start)
            done += len(span)
        return total % _MODULUS

    def _move(self, name: str, steps: Sequence[Step]) -> None:
        part = self.parts[name]
        _move_(name, self.weights[name], self._base[name], self._space, steps, part)

    def _each_tensor(self, work: Callable[[str], None]) -> int:
        """Do the work on each tensor, a few at a time; gives the fingerprint of what came out."""

        def work_and_sum(name: str) -> int:
            work(name)
            return self._fingerprint_of(name)

        largest_first = sorted(self.weights, key=lambda name: -self.weights[name].numel())
        with ThreadPoolExecutor(self._num_threads) as pool:
            found = pool.map(work_and_sum, largest_first)
            self.fingerprints = dict(zip(largest_first, found, strict=True))
        return sum(self.fingerprints.values()) % _MODULUS


def fingerprint_part(name: str, flat: torch.Tensor, start: int) -> int:
    """What a range of one tensor's elements adds to the fingerprint; parts add up modulo 2⁶⁴.

    Args:
        name: the parameter's name.
        flat: its elements `start`, `start + 1`, ... in C order: contiguous float32 on the CPU, one
            axis.
        start: index of the first.

    Returns:
        0 ... 2⁶⁴ - 1.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=16, person=b"fingerprint").digest()
    a = int.from_bytes(digest[:8], "little") | 1
    b = int.from_bytes(digest[8:], "little") & ~3 | 2
    patterns = as_array(flat).view(np.uint32)
    position = np.arange(min(_PIECE, patterns.size), dtype=np.uint64)
    total = 0
    for i in range(0, patterns.size, _PIECE):
        bits = patterns[i : i + _PIECE].astype(np.uint64)
        # Σ bits_j · (a + (start + i + j) · b) over the elements j of the piece; uint64 sums wrap.
        plain = int(bits.sum())
        by_position = int(bits @ position[: bits.size])
        total += (a + (start + i) * b) * plain + b * by_position
    return total % _MODULUS


def moved(
    name: str,
    base: torch.Tensor,
    space: SearchSpace,
    steps: Sequence[Step],
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """One parameter of the centre alone: where the base, or `start`, comes to by these steps.

    Args:
        name: one of the space's.
        base: the parameter in the base model.
        space: what the steps' terms mean.
        steps: in order; `merge_steps` makes them cheaper.
        start: the parameter in a centre, to move in place of the base.

    Returns:
        A new float32 tensor.
    """
    weight = (base if start is None else start).to(torch.float32, copy=True).contiguous()
    _move_(name, weight, base, space, steps)
    return weight


def merge_steps(steps: Iterable[Step]) -> list[Step]:
    """The same movement in as few steps as can be, so that a weight is read once for many."""
    merged: list[tuple[float, list[Term]]] = [(0.0, [])]
    for step in steps:
        if step.decay:
            merged.append((step.decay, []))
        merged[-1][1].extend(step.terms)
    return [Step(terms=tuple(terms), decay=decay) for decay, terms in merged]


def _move_(
    name: str,
    weight: torch.Tensor,
    base: torch.Tensor,
    space: SearchSpace,
    steps: Sequence[Step],
    part: Part | None = None,
) -> None:
    for step in steps:
        if step.decay:
            _decay_(weight, base, step.decay)
        if step.terms:
            space.add_terms_(name, weight, step.terms, part)


def _part_of(whole: torch.Tensor, part: Part) -> torch.Tensor:
    return whole.reshape(-1, part.width)[slice(*part.rows), slice(*part.columns)]


def _decay_(weight: torch.Tensor, base: torch.Tensor, decay: float) -> None:
    keep = np.float32(1 - decay)
    moving = as_array(weight.view(-1))
    anchor = base.reshape(-1)
    for i in range(0, moving.size, _PIECE):
        piece = moving[i : i + _PIECE]
        anchor_piece = anchor[i : i + _PIECE].to(torch.float32).numpy()
        np.subtract(piece, anchor_piece, out=piece)
        np.multiply(piece, keep, out=piece)
        np.add(anchor_piece, piece, out=piece)
