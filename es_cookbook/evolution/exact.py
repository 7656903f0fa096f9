"""Exact arithmetic on weights: decay, fingerprints, and updates by a step's rule.

torch's eager operations compute one operation at a time and store its result as float32, so every
difference, product and sum is rounded separately; a kernel that fused two of them
(`torch.compile`, `addcmul_`) could round once for both. Integers wrap at 64 bits, so the sum of a
fingerprint is the same in any order.

A step's rule: sums, products and quotients of single elements are float32, each rounded separately,
as IEEE 754 requires on CPUs and GPUs. torch's float32 square roots are not: on Intel's CPUs they
are MKL's, and one in 150 is off by a bit. So roots are computed in float64 and rounded to
float32, which is correct even where the float64 root is off by one bit: no root of a float32 number
is that close to the middle between two others.

In matrix products the order of a sum depends on the library. So Muon's iteration works on whole
numbers in units of 2⁻²⁴, stored as float64. The singular values in it stay below 1.3, so by Cauchy
and Schwarz no partial sum of a product reaches 2⁵³: all of them are exact, and the order does not
matter. The result is rounded to the grid again.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from es_cookbook.evolution.genome import AdamRule, ErrorFeedbackRule, MuonRule, Offsets, Rule
from es_cookbook.evolution.noise import Part
from es_cookbook.evolution.spaces.base import PIECE, AddTerms

MODULUS = 2**64
"""Modulus of fingerprints."""
DEVICE_PIECE = 2**24
"""Elements that a GPU works on at once: temporaries of up to 128 MiB each."""


def decay_(weight: torch.Tensor, base: torch.Tensor, decay: float) -> None:
    """Set W <- base + keep * (W - base), keep = float32(1 - decay), on any device; W <- base for 1.

    The weight is contiguous float32; the base has as many elements, of any dtype, and may be on the
    CPU: it is copied piece by piece.
    """
    keep = float(np.float32(1 - decay))
    moving, anchor = weight.view(-1), base.reshape(-1)
    if decay == 1:  # The sum would turn a base's -0 into 0, and an infinite weight into NaN.
        moving.copy_(anchor)
        return
    at_once = _piece_of(weight)
    for i in range(0, moving.numel(), at_once):
        anchor_piece = anchor[i : i + at_once].to(weight.device, torch.float32)
        moving[i : i + at_once].sub_(anchor_piece).mul_(keep).add_(anchor_piece)


def fingerprint_of(name: str, weight: torch.Tensor, part: Part | None = None) -> int:
    """Compute a tensor's part of the centre's fingerprint, on any device: 0 ... 2⁶⁴ - 1.

    The weight is contiguous float32 and holds a part of the parameter of this name, all of it if
    None. Parts add up modulo 2⁶⁴. Waits for a GPU.
    """
    part = part or Part.whole(tuple(weight.shape))
    a, b = _multipliers(name)
    rows = weight.view(part.shape)
    column = torch.arange(part.shape[1], device=weight.device)
    at_once = max(1, _piece_of(weight) // max(1, part.shape[1]))
    total = 0
    for i in range(0, len(rows), at_once):
        # Sums of int64 wrap to the same bits as those of uint64.
        bits = rows[i : i + at_once].view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
        of_row, of_column = bits.sum(1), bits.sum(0)
        by_row = (of_row * torch.arange(len(bits), device=weight.device)).sum()
        sums = torch.stack((of_row.sum(), by_row, (of_column * column).sum())).tolist()
        first = (part.rows[0] + i) * part.width + part.columns[0]
        # Row r of the piece begins at element first + r · width.
        total += (a + first * b) * sums[0] + b * (part.width * sums[1] + sums[2])
    return total % MODULUS


def _piece_of(weight: torch.Tensor) -> int:
    """Return how many elements to work on at once: on the CPU they stay in the cache."""
    return PIECE if weight.device.type == "cpu" else DEVICE_PIECE


def _multipliers(name: str) -> tuple[int, int]:
    """Return A and b of a tensor: element i's bits count a + i · b times."""
    digest = hashlib.blake2b(name.encode(), digest_size=16, person=b"fingerprint").digest()
    return int.from_bytes(digest[:8], "little") | 1, int.from_bytes(digest[8:], "little") & ~3 | 2


_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Muon's quintic: x <- a x + b x³ + c x⁵ quickly brings singular values in (0, 1] near 1."""
_GRID = 2.0**24


def start_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the index of each parameter's first element among the offsets of a space.

    >>> start_of({"a": (2, 3), "b": (4,)})
    {'a': 0, 'b': 6}
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    return dict(zip(shapes, itertools.accumulate(sizes, initial=0), strict=False))


def set_to_offsets_(
    weight: torch.Tensor, base: torch.Tensor, offsets: Offsets, start: int, part: Part
) -> None:
    """Set W <- base + offsets, rounded once to float32.

    The weight, float32 on any device, is a `part` of the parameter; the base has as many elements
    of any dtype. The parameter's offsets are from `start` on among those of the search space.

    Raises:
        ValueError: There are fewer offsets than parameters.
    """
    values = torch.frombuffer(bytearray(offsets.data), dtype=torch.float32)
    spans = [slice(start + span.start, start + span.stop) for span in part.spans()]
    if spans and spans[-1].stop > len(values):
        raise ValueError(f"{len(values)} offsets do not reach element {spans[-1].stop - 1}")
    own = torch.cat([values[span] for span in spans]) if spans else values[:0]
    weight.copy_(base.reshape(weight.shape))
    weight.add_(own.view(weight.shape).to(weight.device))


def apply_rule_(
    rule: Rule,
    adders: Sequence[AddTerms],
    name: str,
    weight: torch.Tensor,
    part: Part,
    shape: tuple[int, ...],
) -> None:
    """Change a weight by the rule, but `OffsetsRule`, of a step whose decay is already applied.

    The weight, contiguous float32, is a part of the parameter of this name and shape. The adders
    belong to the rule's groups, and work on the weight's device.
    """
    match rule:
        case AdamRule():
            _adam_(rule, adders, name, weight, part)
        case MuonRule():
            _muon_(rule, adders[0], name, weight, part, shape)
        case ErrorFeedbackRule():
            _error_feedback_(rule, adders, name, weight, part)
        case _:
            raise ValueError(f"there is no arithmetic for {rule}")


def _adam_(
    rule: AdamRule, adders: Sequence[AddTerms], name: str, weight: torch.Tensor, part: Part
) -> None:
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    gradient = torch.empty_like(weight)
    for add_terms_, first, second in zip(adders, rule.first, rule.second, strict=True):
        gradient.zero_()
        add_terms_(name, gradient, part)
        if first:
            m.add_(gradient * first)
        v.add_(gradient.square_().mul_(second))
    # W + rate · m / (√v + epsilon); neither addcdiv_ nor add_(..., alpha=...), which may round once
    # for two operations.
    root = v.double().sqrt_().to(v.dtype)
    weight.add_(m.div_(root.add_(rule.epsilon)).mul_(rule.rate))


def _error_feedback_(
    rule: ErrorFeedbackRule, adders: Sequence[AddTerms], name: str, weight: torch.Tensor, part: Part
) -> None:
    residual, rounded = torch.zeros_like(weight), torch.zeros_like(weight)
    change = torch.empty_like(weight)
    terms = iter(zip(adders, rule.weights, strict=True))
    for count in rule.counts:
        residual.mul_(rule.residual_decay)  # s = decay · e + Σ_t weight_t · change_t
        for add_terms_, term_weight in itertools.islice(terms, count):
            change.zero_()
            add_terms_(name, change, part)
            residual.add_(change.mul_(term_weight))
        torch.round(residual, out=rounded)  # d = rint(s), half to even
        residual.sub_(rounded)  # e = s - d
    weight.add_(rounded).clamp_(0, rule.highest)


def _muon_(
    rule: MuonRule,
    add_terms_: AddTerms,
    name: str,
    weight: torch.Tensor,
    part: Part,
    shape: tuple[int, ...],
) -> None:
    if len(shape) != 2:
        add_terms_(name, weight, part)
        return
    # A rank of a tensor-parallel group generates the whole matrix too: noise needs no traffic.
    total = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    add_terms_(name, total, Part.whole(shape))
    update = orthogonalised(total, rule.iterations)
    if length := norm(update):
        update *= norm(total) / length
    own = update[slice(*part.rows), slice(*part.columns)]
    weight.add_(own.reshape(weight.shape).to(torch.float32))


def orthogonalised(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return approximately U Vᵀ of a matrix U S Vᵀ: float64, the same bits on every machine.

    Five iterations bring singular values of 1/1000 and more near 1. Zeros stay zeros.
    """
    x, largest = _whole_numbers(matrix)
    if not largest:
        return x
    wide = matrix.shape[0] <= matrix.shape[1]
    x = x if wide else x.T
    # A tensor, since CUDA multiplies by the reciprocal of a plain number.
    x = torch.round(x / torch.tensor(_norm(x), dtype=x.dtype, device=x.device) * _GRID)
    for _ in range(iterations):
        gram = _product(x, x.T)
        polynomial = torch.round(_B * gram + _C * _product(gram, gram))
        x = torch.round(_A * x + _product(polynomial, x))
    x = x / _GRID
    return x if wide else x.T


def norm(matrix: torch.Tensor) -> float:
    """Compute the root of the sum of squares to five digits or so, the same bits on any machine."""
    x, largest = _whole_numbers(matrix)
    return _norm(x) / 2**18 * largest


def _whole_numbers(matrix: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a matrix over its largest number, in units of 2⁻¹⁸, as float64; and that number."""
    largest = matrix.abs().max().double()
    if not largest:
        return torch.zeros_like(matrix, dtype=torch.float64), 0.0
    return torch.round(matrix.double() / largest * 2**18), float(largest)


def _norm(x: torch.Tensor) -> float:
    # Whole numbers up to 2¹⁸: their squares add up exactly in int64.
    return math.sqrt(int(x.to(torch.int64).square_().sum()))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices in units of the grid, and round the product to the grid."""
    return torch.round((a @ b) / _GRID)
