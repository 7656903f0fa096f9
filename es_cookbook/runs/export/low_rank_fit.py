"""The nearest product of two thin matrices: what a difference of weights is as a LoRA adapter.

The best approximation of rank r in the Frobenius norm keeps the r largest singular values (Eckart
and Young 1936). Small matrices get a full singular value decomposition. Large ones get a randomised
one (Halko, Martinsson and Tropp 2011, arXiv:0909.4061) with 2 r + 10 directions and four rounds of
subspace iteration: on sums of hundreds of noise terms, whose singular values hardly fall, its error
came within 0.2 % of the best possible one, in a tenth of the time and less. The error that is
reported is measured, not estimated, whichever of the two it was.
"""

import dataclasses
import math

import torch

_FULL_UP_TO = 512
"""Sides: below, a full decomposition costs less than a fifth of a second."""
_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Fit:
    """B A in place of a matrix: b (rows, rank) and a (rank, columns), float32.

    `squared_error` is the squared Frobenius norm of the matrix less B A, `squared_norm` its own.
    """

    a: torch.Tensor
    b: torch.Tensor
    squared_error: float
    squared_norm: float

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the matrix; 0 for a matrix of zeros."""
        return relative_error(self.squared_error, self.squared_norm)


def relative_error(squared_error: float, squared_norm: float) -> float:
    """Of one matrix, or of several whose squares were added up."""
    return math.sqrt(squared_error / squared_norm) if squared_norm else 0.0


def fit(matrix: torch.Tensor, rank: int) -> Fit:
    """The nearest B A of this rank, with the singular values shared evenly between B and A.

    A rank above the matrix's own sides is filled up with zeros.

    Args:
        matrix: (rows, columns), float32.
        rank: at least 1.
    """
    rows, columns = matrix.shape
    kept = min(rank, rows, columns)
    if min(rows, columns) <= max(_FULL_UP_TO, 2 * kept + 10):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        u, s, vh = _randomised_svd(matrix, 2 * kept + 10)
    a, b = torch.zeros(rank, columns), torch.zeros(rows, rank)
    root = s[:kept].sqrt()
    torch.mul(root[:, None], vh[:kept], out=a[:kept])
    b[:, :kept] = u[:, :kept] * root
    return Fit(a, b, _squared_norm(matrix - b @ a), _squared_norm(matrix))


def _randomised_svd(
    matrix: torch.Tensor, directions: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Which start it is hardly matters, but the same weights shall give the same adapter.
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrix.shape[1], directions, generator=generator)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    u, s, vh = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ u, s, vh


def _squared_norm(matrix: torch.Tensor) -> float:
    return float(matrix.double().square().sum())
