"""Low-rank parts of resident genomes for one group of linear layers, and for the rows of a batch.

Each block of rows has a genome. Kernels on the CPU read its factors where they lie in the table;
elsewhere they are gathered by block, for two batched products over all blocks.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.experts import ExpertFactors
from es_cookbook.engines.torch.kernels.modules import rows_of, suits_kernels
from es_cookbook.engines.torch.kernels.rows import RankFactors, add_low_rank


@dataclasses.dataclass(slots=True)
class LowRankTable:
    """Low-rank parts of all resident genomes for one group; the last row is 0.

    Attributes:
        a_G_R_N: scaled A factors, transposed, block-diagonal over the group's layers; R = ranks of
            all of them and N = outputs, both padded with zeros. (genomes, experts, R, N) for
            experts, whose ranks and outputs are as they are.
        b_G_N_R: B factors, N = inputs; in memory (genomes, R, N).
        columns_R: first output, and one past the last, of each rank's layer.
    """

    a_G_R_N: torch.Tensor
    b_G_N_R: torch.Tensor
    columns_R: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.a_G_R_N)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that batches read."""
        return self.a_G_R_N, self.b_G_N_R

    def rows(self, genome_of_block: torch.Tensor) -> "LowRankRows | ExpertFactors":
        """Return the layers' factors for blocks of these genomes."""
        if self.a_G_R_N.dim() == 4:
            return self.a_G_R_N, self.b_G_N_R, genome_of_block
        return LowRankRows(self, genome_of_block)


class LowRankRows:
    """A group's low-rank part for the blocks of a batch.

    Attributes:
        gathered: each block's factors; None where a kernel reads the table itself.
    """

    def __init__(
        self,
        table: LowRankTable,
        genome_of_block: torch.Tensor,
        gathered: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._table = table
        self._genome_of_block = genome_of_block
        self._num_blocks = len(genome_of_block)
        self.gathered = gathered
        if suits_kernels(table.a_G_R_N):
            a_G_R_N, b_G_R_N = table.a_G_R_N.numpy(), table.b_G_N_R.mT.numpy()
            self._arrays = a_G_R_N, b_G_R_N, table.columns_R, genome_of_block.numpy()
        elif gathered is None:
            self.gathered = table.a_G_R_N[genome_of_block], table.b_G_N_R[genome_of_block]

    def gather(self) -> None:
        """Gather factors again, in place: the genomes of the blocks, or the table, have changed."""
        assert self.gathered is not None
        for own, table in zip(self.gathered, self._table.tensors, strict=True):
            own.copy_(table[self._genome_of_block])

    def first(self, num_blocks: int) -> "LowRankRows":
        """Return the same for the first blocks, which are gathered."""
        assert self.gathered is not None
        a, b = (each[:num_blocks] for each in self.gathered)
        return LowRankRows(self._table, self._genome_of_block[:num_blocks], (a, b))

    def __len__(self) -> int:
        return self._num_blocks

    def for_kernels(self, num_rows: int) -> RankFactors:
        """Return the table, and the genome of each block of rows, all of one height.

        Raises:
            ValueError: They are not: the model runs this layer on other rows than the batch's.
        """
        return (*self._arrays, self._height(num_rows))

    def _height(self, num_rows: int) -> int:
        height, rest = divmod(num_rows, self._num_blocks)
        if rest or not height:
            raise ValueError(f"{num_rows} rows cannot be {self._num_blocks} blocks of one height")
        return height

    def added(self, y_T_N: torch.Tensor, x_T_N: torch.Tensor) -> torch.Tensor:
        """Return y + x B A with each row's own factors; may write to y. Raises as `for_kernels`."""
        if self.gathered is None:
            out = y_T_N if suits_kernels(y_T_N) else torch.empty_like(y_T_N, dtype=torch.float32)
            factors = self.for_kernels(len(y_T_N))
            add_low_rank(rows_of(y_T_N), rows_of(x_T_N), factors, out.numpy())
            return out
        a, b = self.gathered
        height = self._height(len(y_T_N))
        x_blocks = x_T_N.view(len(self), height, -1)
        y_blocks = y_T_N.view(len(self), height, -1)
        # y + (x B) A
        y_blocks += torch.bmm(torch.bmm(x_blocks, b), a)[..., : y_T_N.shape[-1]]
        return y_T_N

    def of_first_block(self, columns: slice) -> torch.Tensor:
        """Return the first genome's addition to the weights of these outputs: (in, columns)."""
        genome = self._genome_of_block[0]
        return self._table.b_G_N_R[genome] @ self._table.a_G_R_N[genome, :, columns]
