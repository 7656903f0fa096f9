"""Experts of a mixture that host low-rank genomes: weights in parameters of three axes.

Recognised are the modules of transformers' experts interface (see `checkpoints.linear_weights`).
Every pair of a token and one of its experts is a row. Rows are sorted by expert, so that each
expert's weight is multiplied once, and the low-rank part of a row is that of its token's genome.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn

from es_cookbook.checkpoints.linear_weights import expert_parameters, is_transposed
from es_cookbook.engines.torch.kernels.modules import Path
from es_cookbook.engines.torch.kernels.products import multiply

ELEMENTS_AT_ONCE = 1 << 24
"""Most elements of low-rank factors gathered at once, for separate rows."""


ExpertFactors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Low-rank parts of all resident genomes, scaled A factors transposed (a_G_E_R_N) and B factors
(b_G_E_N_R), and which genome each block of tokens belongs to; blocks have as many tokens."""


class _Routing(NamedTuple):
    """Rows that are sorted by expert.

    Attributes:
        token_of_row: token of each row.
        expert_of_row: expert of each row.
        rows_of_expert: number of rows of each expert.
        num_tokens: number of tokens of the whole batch.
    """

    token_of_row: torch.Tensor
    expert_of_row: torch.Tensor
    rows_of_expert: list[int]
    num_tokens: int


class ExpertGroup:
    """One projection of all experts of a layer.

    Attributes:
        weight: (experts, out, in), a view of the parameter.
        parameter: its attribute's name.
    """

    def __init__(
        self, index: int, module: nn.Module, parameter: str, rows_per_step: int, path: Path
    ) -> None:
        self.index = index
        self.parameter = parameter
        self.transposed = is_transposed(module)
        weight = cast("nn.Parameter", getattr(module, parameter))
        self.weight = weight.data.transpose(1, 2) if self.transposed else weight.data
        self._multiplies = path.multiplies(weight)
        if self._multiplies and not self.weight.is_contiguous():
            self.weight = self.weight.contiguous()
            weight.data = self.weight.transpose(1, 2)
        self.bias = cast("nn.Parameter | None", getattr(module, f"{parameter}_bias", None))
        self.dtype = torch.float32 if path.wide else weight.dtype
        self._rows_per_step = rows_per_step

    def __call__(
        self, x_B_N: torch.Tensor, routing: _Routing, factors: ExpertFactors | None
    ) -> torch.Tensor:
        """Compute the outputs of rows: (rows, in) -> (rows, out)."""
        parts: list[torch.Tensor] = []
        rows_of_expert = enumerate(x_B_N.split(routing.rows_of_expert))
        for expert, rows in rows_of_expert:
            if len(rows):
                bias = None if self.bias is None else self.bias[expert]
                parts.append(self._product(rows, self.weight[expert], bias).to(rows.dtype))
        y_B_N = torch.cat(parts) if parts else x_B_N.new_zeros(0, self.weight.shape[1])
        if factors is not None and len(y_B_N):
            self._add_low_rank(y_B_N, x_B_N, routing, factors)
        return y_B_N

    def _product(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self._multiplies:
            return multiply(rows.float().contiguous(), weight, bias)
        # Rows beyond a whole number of blocks would get another kernel, and other bits.
        missing = -len(rows) % self._rows_per_step
        padded = F.pad(rows, (0, 0, 0, missing)).to(weight.dtype)
        return F.linear(padded, weight, bias)[: len(rows)]

    @staticmethod
    def _add_low_rank(
        y_B_N: torch.Tensor, x_B_N: torch.Tensor, routing: _Routing, factors: ExpertFactors
    ) -> None:
        a, b, genome_of_block = factors
        height = routing.num_tokens // len(genome_of_block)
        genome_of_row = genome_of_block[routing.token_of_row // height]
        step = max(2, ELEMENTS_AT_ONCE // (a[0, 0].numel() + b[0, 0].numel()))
        for first in range(0, len(x_B_N), step):
            rows = slice(first, first + step)
            which = genome_of_row[rows], routing.expert_of_row[rows]
            # Summed by hand: a batched matmul's bits would depend on how many rows there are.
            reduced_B_R = (x_B_N[rows, :, None] * b[which]).sum(1)
            y_B_N[rows] += (reduced_B_R[:, :, None] * a[which]).sum(1)


class PopulationExperts(nn.Module):
    """Experts that host genomes, in the place and under the names of the module they replace.

    Args:
        factors: returns the low-rank parts of a group in the forward pass under way.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ExpertGroup],
        factors: Callable[[ExpertGroup], ExpertFactors | None],
    ) -> None:
        super().__init__()
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.groups = tuple(groups)
        self._factors = factors
        # It is recognised by these attributes (see `checkpoints.linear_weights`).
        self.has_gate = bool(getattr(module, "has_gate", True))
        self.is_transposed = is_transposed(module)
        self._apply_gate = getattr(module, "_apply_gate" if self.has_gate else "act_fn")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run experts as in transformers: (tokens, the experts of each, their shares) -> tokens."""
        up, down = self.groups
        x_T_N = hidden_states.reshape(-1, hidden_states.shape[-1])
        num_tokens, num_chosen = len(x_T_N), top_k_index.shape[-1]
        expert_of_pair = top_k_index.reshape(-1)
        order = expert_of_pair.argsort(stable=True)
        # Some models number experts that do nothing from the number of the real ones on.
        counts = torch.bincount(expert_of_pair, minlength=len(up.weight))[: len(up.weight)].tolist()
        order = order[: sum(counts)]
        routing = _Routing(order // num_chosen, expert_of_pair[order], counts, num_tokens)
        x_B = up(x_T_N[routing.token_of_row], routing, self._factors(up))
        y_B = down(self._apply_gate(x_B), routing, self._factors(down))
        share_B = top_k_weights.reshape(-1)[order]
        of_pairs = y_B.new_zeros(len(expert_of_pair), y_B.shape[-1])
        of_pairs[order] = (y_B * share_B[:, None]).to(y_B.dtype)
        summed = of_pairs.view(num_tokens, num_chosen, -1).sum(1)
        return summed.view(hidden_states.shape).to(hidden_states.dtype)


def expert_groups(
    first: int, module: nn.Module, rows_per_step: int, path: Path
) -> list[ExpertGroup]:
    """Return the projections of a module of experts, numbered from `first` on: up, then down.

    Empty for any other module. Rows of a matmul of torch's are a multiple of `rows_per_step`.
    """
    names = expert_parameters(module)
    if len(names) != 2:
        return []
    return [
        ExpertGroup(first + i, module, name, rows_per_step, path) for i, name in enumerate(names)
    ]
