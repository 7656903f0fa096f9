"""A Hugging Face causal LM that runs many genomes in one batch.

The model's own modules stay, and its linear weights are computed differently. Every linear layer
becomes a `_PopulationLinear`: one matmul with the shared weight for all rows, plus each genome's
low-rank part for its own rows,

    y = x Wᵀ + (x B_g) A_gᵀ,

so E = A Bᵀ is never formed. Experts in parameters of three axes do the same (`kernels.experts`).

How a batch runs is the model's `Path`. On the flat path attention is `es_cookbook` attention: it
reads and writes the key-value cache of the lane that runs the forward pass, which is how requests
of different lengths share a batch of flat token rows, shape [1, T] (see `flat`). On all
others the model's own forward runs a batch of sequences with the model's own cache (see
`own`). `self_check` finds the right one for a model.

Rows come in blocks that belong to one genome, so the low-rank parts are two batched matmuls,
for any mix of genomes. The layers find all they need about the rows in the `Batch` of the
calling thread.

Bit for bit, a row of the flat path must not depend on its neighbours. Products in float32 and in
int8 on the CPU are this package's own (see `kernels.products` and `kernels.int8`). oneDNN gives a
row of a product in bfloat16 the same bits at every height of at least `MIN_ROWS` when it runs on
one thread; so smaller batches are padded, every lane runs on one thread, and batched matmuls never
have a single member (which takes another code path). Rows of a member that are not a whole number
of registers long may get other kernels depending on where they begin, so tables are padded.
"""

import dataclasses
import threading
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from es_cookbook.checkpoints.linear_weights import is_linear, is_transposed, member_name
from es_cookbook.engines.torch.attention import (
    AttentionLayer,
    AttentionRows,
    KernelRows,
    set_attention,
    unknown_option,
)
from es_cookbook.engines.torch.kernels.experts import (
    ExpertFactors,
    ExpertGroup,
    PopulationExperts,
    expert_groups,
)
from es_cookbook.engines.torch.kernels.lanes import LANES
from es_cookbook.engines.torch.kernels.low_rank import LowRankRows, LowRankTable
from es_cookbook.engines.torch.kernels.modules import (
    FLAT,
    NO_FACTORS,
    GatedLayers,
    LinearOutputs,
    Norm,
    Path,
    RotaryAttention,
    alike,
    has_kernels,
    norm_like,
    replace,
    widen,
)
from es_cookbook.engines.torch.kernels.products import PackedWeight, multiply
from es_cookbook.engines.torch.kernels.rows import RankFactors
from es_cookbook.engines.torch.kernels.vectors import VectorFactors, VectorTable

if TYPE_CHECKING:
    from es_cookbook.engines.torch.kernels.int8 import Int8Weight

ROWS_PER_BLOCK = 8
"""Rows of a block: they share a genome."""
MIN_ROWS = 16
"""Fewest rows of a matmul for which a row's bits are known not to depend on the number of rows."""
ATTENTION = "es_cookbook"
"""Name under which the attention function is registered with transformers."""

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one parent that read the same input, in all Llama-like models."""


GroupFactors: TypeAlias = LowRankRows | ExpertFactors | VectorFactors
Factors: TypeAlias = Sequence[GroupFactors | None]
"""Low-rank parts of each group for the blocks of a batch; None: not perturbed."""


@dataclasses.dataclass(slots=True)
class Batch:
    """Rows of the forward pass under way on this thread, as the layers need them.

    Attributes:
        attention: how flat rows attend; None where the model's own attention runs.
        factors: low-rank parts of the batch's blocks, or None without perturbation.
        head_factors: the same for rows of the output head, one row per block; None where rows are
            the blocks.
        live: rows from here on belong to no request: products need not be computed, and are 0.
        layer: attention layer that ran last; `last`: last output of a linear layer.
    """

    attention: AttentionRows | None = None
    factors: Factors | None = None
    head_factors: GroupFactors | None = None
    live: int | None = None
    layer: AttentionLayer | None = None
    last: torch.Tensor | None = None
    shared: "tuple[LinearGroup, torch.Tensor, torch.Tensor] | None" = None


class _Current(threading.local):
    batch: Batch | None = None


_current = _Current()


@contextmanager
def _running(batch: Batch) -> Generator[None]:
    """Run layers for this batch on this thread inside."""
    _current.batch = batch
    try:
        yield
    finally:
        _current.batch = None


def _batch() -> Batch:
    if _current.batch is None:
        raise RuntimeError("a population layer ran outside `PopulationModel.forward`")
    return _current.batch


def factors_of(index: int) -> GroupFactors | None:
    """Return the factors of a group or table for the batch of the calling thread."""
    factors = _batch().factors
    return None if factors is None else factors[index]


def _expert_factors(group: ExpertGroup) -> ExpertFactors | None:
    return cast("ExpertFactors | None", factors_of(group.index))


def _bias(layer: nn.Linear | Conv1D) -> nn.Parameter | None:
    """Return a layer's bias; the type that torch gives the attribute leaves out None."""
    return cast("nn.Parameter | None", layer.bias)


def _matrix(layer: nn.Linear | Conv1D) -> torch.Tensor:
    """Return a layer's weight as (out, in), in the layer's own memory."""
    return layer.weight.data.T if is_transposed(layer) else layer.weight


class LinearGroup:
    """Linear layers that read the same input, computed by one matmul; most groups have one member.

    The members' weights are views of one fused tensor, so in-place writes to a member's
    weight are seen here.
    """

    def __init__(
        self, index: int, layers: Sequence[nn.Linear | Conv1D], is_head: bool, path: Path
    ) -> None:
        self.index = index
        self.is_head = is_head
        self.is_bare = False  # outputs of the weights need not be widened
        self.is_read = False  # by modules that may want more of the weights than products
        self.transposed = is_transposed(layers[0])
        self._packed: PackedWeight | None = None
        self._quantised: Int8Weight | None = None
        matrices = [_matrix(layer) for layer in layers]
        self.dtype = torch.float32 if path.wide else matrices[0].dtype
        self.rows_dtype = path.rows_of(matrices[0])
        self._multiplies = path.multiplies(matrices[0])
        self._quantises = path.quantises
        self.sizes = [len(matrix) for matrix in matrices]
        self.in_features = matrices[0].shape[1]
        if len(layers) == 1:
            self.weight, self.bias = matrices[0], _bias(layers[0])
            if self._multiplies and not self.weight.is_contiguous():
                self.weight = matrices[0].contiguous()
                layers[0].weight.data = self.weight.T if self.transposed else self.weight
            return
        self.weight = torch.cat(matrices)
        biases = [bias for layer in layers if (bias := _bias(layer)) is not None]
        self.bias = torch.cat([bias.data for bias in biases]) if biases else None
        for layer, start, size in zip(layers, self.offsets, self.sizes, strict=True):
            layer.weight.data = self.weight[start : start + size]
            if self.bias is not None:
                layer.bias.data = self.bias[start : start + size]

    @property
    def offsets(self) -> list[int]:
        """First output of each member."""
        return [sum(self.sizes[:i]) for i in range(len(self.sizes))]

    def pack(self) -> None:
        """Compute with packed copies of the weights as they are now.

        Copies in bfloat16 are exact and free the weights' memory, unless another module reads it.
        """
        if self._quantises(self.weight):
            from es_cookbook.engines.torch.kernels.int8 import Int8Weight  # compiles its kernels

            self._quantised = Int8Weight(self.weight, self.bias)
        elif not self._multiplies:
            self._packed = PackedWeight(self.weight, self.bias)
            if not self.is_read:
                self._packed.replace(self.weight)

    def unpack(self) -> None:
        """Drop the packed copies; the weights can be read and written again."""
        if self._packed is not None:
            self._packed.give_back(self.weight)
        self._packed = self._quantised = None

    def product(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x as rows, (rows, in), and x Wᵀ + bias, (rows, sum of sizes), in `rows_dtype`."""
        rows = x.reshape(-1, self.in_features).to(self.rows_dtype).contiguous()
        if self._multiplies:
            wide, live = rows.float(), _batch().live
            if self._quantised is not None:
                return rows, self._quantised(wide, live).to(self.rows_dtype)
            return rows, multiply(wide, self.weight, self.bias, live).to(self.rows_dtype)
        if (num_rows := len(rows)) < MIN_ROWS:
            rows = F.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
        y = F.linear(rows, self.weight, self.bias) if self._packed is None else self._packed(rows)
        return rows[:num_rows], y[:num_rows]

    def for_kernels(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, RankFactors]:
        """Return `product`, and what the genomes of its rows add to it."""
        rows, y = self.product(x)
        factors = self._factors(len(y))
        return rows, y, NO_FACTORS if factors is None else factors.for_kernels(len(y))

    def _factors(self, num_rows: int) -> LowRankRows | None:
        batch = _batch()
        factors = batch.factors[self.index] if batch.factors is not None else None
        if self.is_head and batch.head_factors is not None:
            return cast(LowRankRows, batch.head_factors)
        assert factors is None or isinstance(factors, LowRankRows)
        if factors is None or batch.attention is None:
            return factors
        if num_rows != ROWS_PER_BLOCK * len(factors):  # picked before the head itself
            raise ValueError("the model runs this layer on other rows than the batch's")
        return factors

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute all members' outputs side by side: (..., in) -> (..., sum of sizes)."""
        rows, y = self.product(x)
        if (factors := self._factors(len(y))) is not None:
            y = factors.added(y, rows)
        elif not self.is_bare:
            y = y.to(self.dtype)
        y = _batch().last = y.view(*x.shape[:-1], -1)
        return y


class _PopulationLinear(nn.Module):
    """One member of a `LinearGroup`, in the place and under the names of the layer it replaces."""

    def __init__(self, layer: nn.Linear | Conv1D, group: LinearGroup, member: int) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.in_features = group.in_features
        self.out_features = group.sizes[member]
        self.group = group
        self.start = group.offsets[member]
        self._alone = len(group.sizes) == 1

    @override
    def __getattr__(self, name: str) -> Any:
        """Return the weight of the batch's genome when code outside of the layer reads it.

        In a batch of several it is the centre's: right if only its dtype is looked at, and for the
        self-check to find out.
        """
        batch = _current.batch if name == "weight" else None
        factors = None
        if batch is not None and batch.factors is not None:
            factors = batch.factors[self.group.index]
        if not isinstance(factors, LowRankRows) or len(factors) > 1:
            return super().__getattr__(name)
        change = factors.of_first_block(slice(self.start, self.start + self.out_features)).T
        stored = cast("nn.Parameter", self._parameters["weight"])
        return stored + (change.T if self.group.transposed else change)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (..., in) -> (..., out); siblings called with the same input share one matmul."""
        group = self.group
        if self._alone:
            return group(x)
        batch = _batch()
        if batch.shared is None or batch.shared[0] is not group or batch.shared[1] is not x:
            batch.shared = (group, x, group(x))
        return batch.shared[2].narrow(-1, self.start, self.out_features)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend for transformers: q, k and v are (1, heads, T, d), with rotary applied.

    Raises:
        NotImplementedError: The model's attention takes more than this.
    """
    del attention_mask
    if (name := unknown_option(options)) is not None:
        raise NotImplementedError(f"attention takes {name}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    index = cast("int", module.layer_idx)  # set by transformers on every attention module
    layer = AttentionLayer(
        index, scale, sliding_window, cast("float | None", options.get("softcap"))
    )
    batch = _batch()
    batch.layer, attention = layer, batch.attention
    assert attention is not None, "attention of a batch that the model's own forward runs"
    out_T = attention.attend(layer, *(states[0].transpose(0, 1) for states in (query, key, value)))
    return out_T.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


class PopulationModel:
    """One set of weights in a Hugging Face model whose linear layers host low-rank genomes.

    Attributes:
        module: the model; its parameters keep their Hugging Face names.
        groups: linear layers and experts, as they are computed.
        tables: low-rank parts for each group, and then vectors; None where all genomes are the last
            row, or dense.
    """

    def __init__(self, module: PreTrainedModel, path: Path = FLAT) -> None:
        self.module = module.eval().requires_grad_(False)
        if path.flat:
            set_attention(self.module, ATTENTION)
        if path.wide:
            widen(self.module)
        self.groups: list[LinearGroup | ExpertGroup] = []
        self.tables: list[LowRankTable | VectorTable | None] | None = None
        head = module.get_output_embeddings()
        group_of: dict[tuple[int, ...], LinearGroup] = {}  # layers may share their weights
        for parent in list(module.modules()):
            children = dict(parent.named_children())
            linears = {n: c for n, c in children.items() if is_linear(c)}
            for names in _partition(linears):
                layers = [linears[name] for name in names]
                weights = tuple(id(layer.weight) for layer in layers)
                if weights not in group_of:
                    is_head = layers[0] is head
                    group_of[weights] = LinearGroup(len(self.groups), layers, is_head, path)
                    self.groups.append(group_of[weights])
                for member, (name, layer) in enumerate(zip(names, layers, strict=True)):
                    setattr(parent, name, _PopulationLinear(layer, group_of[weights], member))
            for name, child in children.items():
                if projections := expert_groups(len(self.groups), child, MIN_ROWS, path):
                    self.groups += projections
                    setattr(parent, name, PopulationExperts(child, projections, _expert_factors))
        self._head = next((group for group in group_of.values() if group.is_head), None)
        if path.flat:
            for like in (norm_like, _gated_like, partial(_attention_like, kept=path.kept)):
                replace(module, like)
        for parent in module.modules():
            for child in parent.children():
                if isinstance(child, _PopulationLinear):
                    child.group.is_read |= not isinstance(parent, GatedLayers | RotaryAttention)

    def group_members(self) -> "Iterator[tuple[str, LinearGroup | ExpertGroup, int]]":
        """Yield (name, group, first output or expert) of every linear weight."""
        for name, module in self.module.named_modules():
            if isinstance(module, _PopulationLinear):
                yield f"{name}.weight", module.group, module.start
            elif isinstance(module, PopulationExperts):
                for group in module.groups:
                    for expert in range(len(group.weight)):
                        yield member_name(f"{name}.{group.parameter}", expert), group, expert

    def pack(self, names: Container[str] | None = None) -> None:
        """Pack linear layers' weights as they are now; those of these names alone, if given."""
        for group in self._linear_groups(names):
            group.pack()

    def unpack(self, names: Container[str]) -> None:
        """Make linear layers' weights of these names writable until they are packed again."""
        for group in self._linear_groups(names):
            group.unpack()

    def _linear_groups(self, names: Container[str] | None) -> Iterable[LinearGroup]:
        members = [each for each in self.group_members() if names is None or each[0] in names]
        return {g.index: g for _, g, _ in members if isinstance(g, LinearGroup)}.values()

    @property
    def head_table(self) -> LowRankTable | None:
        """The output head's low-rank parts, where genomes perturb it."""
        table = self.tables[self._head.index] if self.tables and self._head else None
        return cast("LowRankTable | None", table)

    def perturbs(self, genomes: np.ndarray) -> bool:
        """Return whether any of these genomes is another than the last row of the tables, 0."""
        if self.tables is None:
            return False
        last = len(next(table for table in self.tables if table is not None)) - 1
        return bool((genomes != last).any())

    def factors(self, genome_of_block: np.ndarray) -> Factors | None:
        """Return low-rank parts as `gather` does; None if no genome perturbs."""
        if not self.perturbs(genome_of_block):
            return None
        return self.gather(torch.from_numpy(genome_of_block).to(self.module.device))

    def gather(self, genome_of_block: torch.Tensor) -> Factors:
        """Return low-rank parts of every group, one row per block; there are tables."""
        assert self.tables is not None
        return [None if table is None else table.rows(genome_of_block) for table in self.tables]

    def forward(
        self, batch: Batch, module: PreTrainedModel | None = None, **inputs: object
    ) -> CausalLMOutput:
        """Run the Hugging Face model, or a shell of it, with this batch's genomes."""
        with _running(batch):
            output = cast("CausalLMOutput", (module or self.module)(**inputs))
        if self._head is not None and output.logits is batch.last:
            self._head.is_bare = True  # the model does nothing with it: its readers widen it
        return output


def _gated_like(module: nn.Module) -> GatedLayers | None:
    """Return the same by a kernel for gated layers in float32 on the CPU, or else None."""
    children = dict(module.named_children())
    layers = [children.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(not isinstance(layer, _PopulationLinear) for layer in layers):
        return None
    gate, up, down = cast("list[_PopulationLinear]", layers)
    group = gate.group
    if up.group is not group or gate.out_features != down.in_features:
        return None
    if not _feeds_kernels(group) or down.in_features < LANES:
        return None
    replacement = GatedLayers(gate, up, down, group.for_kernels)
    with _running(Batch()):
        same = alike(module, replacement, group.in_features, group.rows_dtype)
    return replacement if same else None


def _attention_like(module: nn.Module, kept: torch.dtype) -> RotaryAttention | None:
    """Return the same by a kernel for rotary attention in float32 on the CPU, or else None."""
    children = dict(module.named_children())
    layers = [children.pop(name, None) for name in (*_SIBLINGS[0], "o_proj")]
    if any(not isinstance(layer, _PopulationLinear) for layer in layers):
        return None
    q, k, v, o = cast("list[_PopulationLinear]", layers)
    if len({id(layer.group) for layer in (q, k, v)}) > 1 or not _feeds_kernels(q.group):
        return None
    size = getattr(module, "head_dim", 0)
    if not size or k.out_features != v.out_features or q.out_features != o.in_features:
        return None
    norms = [children.pop(name, None) for name in ("q_norm", "k_norm")]
    is_norm = [isinstance(norm, Norm) and len(norm.weight) == size for norm in norms]
    if children or (any(norms) and not all(is_norm)):
        return None
    rows = KernelRows.of_a_block(5, kept)
    own: list[AttentionLayer] = []  # known once the module has run, and kept without its batch

    def attend(linear: LinearOutputs, heads: tuple[int, int]) -> torch.Tensor:
        batch = _batch()
        if not own:
            own.append(cast(AttentionLayer, batch.layer))
        return cast(KernelRows, batch.attention).attend_rotated(own[0], linear, heads)

    heads = k.out_features // size, size
    replacement = RotaryAttention(module, q.group.for_kernels, heads, attend)
    generator = torch.Generator().manual_seed(1)
    rotary = [torch.randn(1, 5, size, generator=generator) for _ in range(2)]

    def runs(other: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: other(
            hidden_states=x, position_embeddings=tuple(rotary), attention_mask=None
        )[0]

    with _running(Batch(rows)):
        same = alike(runs(module), runs(replacement), q.in_features, kept)
    return replacement if same and own[0].softcap is None else None


def _feeds_kernels(group: LinearGroup) -> bool:
    """Return whether kernels can read what linear layers compute."""
    return has_kernels(group.weight.device) and group.dtype == torch.float32


def _partition(linears: Mapping[str, nn.Linear | Conv1D]) -> list[tuple[str, ...]]:
    """Group siblings that read the same input; every other layer is alone."""
    fused = [names for names in _SIBLINGS if all(name in linears for name in names)]
    fused = [names for names in fused if len({_signature(linears[name]) for name in names}) == 1]
    taken = {name for names in fused for name in names}
    return fused + [(name,) for name in linears if name not in taken]


def _signature(layer: nn.Linear | Conv1D) -> tuple[bool, int, bool, torch.dtype]:
    """Return the properties that layers of one matmul share."""
    in_features = _matrix(layer).shape[1]
    return isinstance(layer, nn.Linear), in_features, _bias(layer) is None, layer.weight.dtype
