"""A Hugging Face causal LM that runs many genomes in one batch.

The model's own modules stay; two things in them are replaced. Every linear layer becomes a
`PopulationLinear`: one matmul with the shared weight for all rows, plus each genome's low-rank part
for its own rows,

    y = x Wᵀ + (x B_g) A_gᵀ,

so E = A Bᵀ is never formed. And attention is `es_cookbook` attention: it reads and writes the
key-value cache of the lane that runs the forward pass, which is how requests of different lengths
share a batch.

A forward pass runs over flat token rows (shape [1, T]), in blocks of `ROWS_PER_BLOCK` rows that
belong to one genome, so the low-rank parts are two batched matmuls of fixed shape, whatever the mix
of genomes. What the layers need to know about the rows is the `Batch` of the calling thread.

Bit for bit, a row must not depend on its neighbours. On the CPU the BLAS behind torch gives a row
of a matmul the same bits at every height of at least `MIN_ROWS` when it runs on one thread; so
smaller batches are padded, every lane runs on one thread, and batched matmuls never have a single
member (which takes another code path). Rows of a member that are not a whole number of registers
long may get other kernels depending on where they begin, so tables are `padded`. Tests split,
shuffle and pad batches to hold this to account.

Left out: experts stored as three-dimensional parameters and transposed linear layers (GPT-2's
Conv1D) are not perturbed; attention variants without a custom-attention hook in transformers are
refused.
"""

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from es_cookbook.common.errors import ModelError
from es_cookbook.engines.torch.attention import AttentionLayer, AttentionRows

ROWS_PER_BLOCK = 8
"""Rows of a block: they share a genome."""
MIN_ROWS = 16
"""Fewest rows of a matmul for which a row's bits are known not to depend on the number of rows."""
_REGISTER = 4
"""Numbers of a shortest vector register: what begins at a multiple of it is aligned."""
ATTENTION = "es_cookbook"
"""Name under which the attention function is registered with transformers."""

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one parent that read the same input, in all Llama-like models."""


def padded(size: int) -> int:
    """How long a table makes ranks or outputs of this number, so that bits depend on no position.

    Sizes that no kernel of the BLAS cuts into registers stay as they are.
    """
    return size if size <= _REGISTER else -(-size // _REGISTER) * _REGISTER


@dataclasses.dataclass(slots=True)
class LowRankTable:
    """Low-rank parts of all resident genomes for one linear group; the last row is 0.

    Attributes:
        a_G_R_N: scaled A factors, transposed, block-diagonal over the group's layers; R = ranks of
            all of them and N = outputs, both `padded` with zeros.
        b_G_K_R: B factors.
    """

    a_G_R_N: torch.Tensor
    b_G_K_R: torch.Tensor

    def rows(self, genomes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, B) of each of these genomes."""
        return self.a_G_R_N[genomes], self.b_G_K_R[genomes]


Factors: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor] | None]
"""(A, B) of each linear group, gathered for the blocks of a batch; None: not perturbed."""


@dataclasses.dataclass(slots=True)
class Batch:
    """What the layers must know about the rows of the forward pass under way on this thread.

    Attributes:
        attention: how the rows attend.
        factors: low-rank parts of the batch's blocks, or None without perturbation.
        head_factors: the same for the rows of the output head, one row a block; None where rows are
            the blocks.
    """

    attention: AttentionRows
    factors: Factors | None = None
    head_factors: tuple[torch.Tensor, torch.Tensor] | None = None
    shared: "tuple[LinearGroup, torch.Tensor, torch.Tensor] | None" = None


class _Current(threading.local):
    batch: Batch | None = None


_current = _Current()


def _batch() -> Batch:
    if _current.batch is None:
        raise RuntimeError("a population layer ran outside `PopulationModel.forward`")
    return _current.batch


def _bias(layer: nn.Linear) -> nn.Parameter | None:
    """The type that torch gives the attribute leaves out None."""
    return cast("nn.Parameter | None", layer.bias)


class LinearGroup:
    """Linear layers that read the same input, computed by one matmul; most groups have one member.

    The members' weights are views of one fused tensor, so whatever writes a member's weight in
    place is seen here.
    """

    def __init__(self, index: int, layers: Sequence[nn.Linear], is_head: bool) -> None:
        self.index = index
        self.is_head = is_head
        self.sizes = [layer.out_features for layer in layers]
        self.in_features = layers[0].in_features
        if len(layers) == 1:
            self.weight, self.bias = layers[0].weight, layers[0].bias
            return
        self.weight = torch.cat([layer.weight.data for layer in layers])
        biases = [bias for layer in layers if (bias := _bias(layer)) is not None]
        self.bias = torch.cat([bias.data for bias in biases]) if biases else None
        for layer, start in zip(layers, self.offsets, strict=True):
            layer.weight.data = self.weight[start : start + layer.out_features]
            if self.bias is not None:
                layer.bias.data = self.bias[start : start + layer.out_features]

    @property
    def offsets(self) -> list[int]:
        """First output of each member."""
        return [sum(self.sizes[:i]) for i in range(len(self.sizes))]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """All members' outputs side by side: (1, T, in) -> (1, T, sum of sizes)."""
        batch = _batch()
        rows = x.reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        if num_rows < MIN_ROWS:
            rows = F.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
        y = F.linear(rows, self.weight, self.bias)
        factors = batch.factors[self.index] if batch.factors is not None else None
        if self.is_head and batch.head_factors is not None:
            factors = batch.head_factors
        if factors is not None:
            a, b = factors
            height = num_rows // a.shape[0]
            x_blocks = rows[:num_rows].view(-1, height, self.in_features)
            y_blocks = y[:num_rows].view(-1, height, y.shape[-1])
            if a.shape[-1] == y.shape[-1]:
                y_blocks.baddbmm_(torch.bmm(x_blocks, b), a)
            else:
                y_blocks += torch.bmm(torch.bmm(x_blocks, b), a)[..., : y.shape[-1]]
        return y[:num_rows].view(*x.shape[:-1], -1)


class PopulationLinear(nn.Module):
    """One member of a `LinearGroup`, in the place and under the names of the layer it replaces."""

    def __init__(self, layer: nn.Linear, group: LinearGroup, member: int) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self._group = (group, group.offsets[member], len(group.sizes) == 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, T, in) -> (1, T, out); siblings called with the same input share one matmul."""
        group, start, alone = self._group
        if alone:
            return group(x)
        batch = _batch()
        if batch.shared is None or batch.shared[0] is not group or batch.shared[1] is not x:
            batch.shared = (group, x, group(x))
        return batch.shared[2].narrow(-1, start, self.out_features)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: q, k and v are (1, heads, T, d) with rotary positions applied."""
    del attention_mask
    layer = AttentionLayer(
        cast("int", module.layer_idx),  # set by transformers on every attention module
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window,
        softcap,
    )
    out_T = _batch().attention.attend(
        layer, *(states[0].transpose(0, 1) for states in (query, key, value))
    )
    return out_T.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


class PopulationModel:
    """One set of weights in a Hugging Face model whose linear layers host low-rank genomes.

    Attributes:
        module: the model; its parameters keep their Hugging Face names.
        tables: low-rank parts for each group, or None where no low-rank genomes are resident.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module.eval().requires_grad_(False)
        self.module.set_attn_implementation(ATTENTION)
        self.groups: list[LinearGroup] = []
        self.tables: list[LowRankTable | None] | None = None
        head = module.get_output_embeddings()
        for parent in list(module.modules()):
            linears = {n: c for n, c in parent.named_children() if isinstance(c, nn.Linear)}
            for names in _partition(linears):
                layers = [linears[name] for name in names]
                group = LinearGroup(len(self.groups), layers, is_head=layers[0] is head)
                self.groups.append(group)
                for member, name in enumerate(names):
                    setattr(parent, name, PopulationLinear(linears[name], group, member))

    def group_members(self) -> Iterator[tuple[str, LinearGroup, int]]:
        """(parameter name, group, first output) of every linear weight."""
        for name, module in self.module.named_modules():
            if isinstance(module, PopulationLinear):
                group, start, _ = module._group  # pyright: ignore[reportPrivateUsage]
                yield f"{name}.weight", group, start

    @property
    def head_table(self) -> LowRankTable | None:
        """The output head's low-rank parts, where genomes perturb it."""
        heads = [group.index for group in self.groups if group.is_head]
        return self.tables[heads[0]] if self.tables is not None and heads else None

    def gather(self, genome_of_block: torch.Tensor) -> Factors | None:
        """Low-rank parts for every group, one row a block; None where all are the last, 0."""
        if self.tables is None:
            return None
        last = next(table.a_G_R_N.shape[0] for table in self.tables if table is not None) - 1
        if bool((genome_of_block == last).all()):
            return None
        return [None if table is None else table.rows(genome_of_block) for table in self.tables]

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        batch: Batch,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits (rows, vocabulary) of flat token rows, of all or of `logit_rows`."""
        _current.batch = batch
        try:
            output = self.module(
                input_ids=tokens_T.unsqueeze(0),
                position_ids=positions_T.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if logit_rows is None else logit_rows,
            )
        finally:
            _current.batch = None
        return output.logits[0]


def _partition(linears: Mapping[str, nn.Linear]) -> list[tuple[str, ...]]:
    """Siblings that read the same input together, every other layer alone."""
    fused = [names for names in _SIBLINGS if all(name in linears for name in names)]
    fused = [names for names in fused if len({_signature(linears[name]) for name in names}) == 1]
    taken = {name for names in fused for name in names}
    return fused + [(name,) for name in linears if name not in taken]


def _signature(layer: nn.Linear) -> tuple[int, bool, torch.dtype]:
    return layer.in_features, _bias(layer) is None, layer.weight.dtype


class _CacheProbe:
    """Attention that only adds up the bytes of keys and values that a token needs."""

    def __init__(self) -> None:
        self.bytes_of_layer: dict[int, int] = {}

    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        num_bytes = (k_T[0].numel() + v_T[0].numel()) * k_T.element_size()
        self.bytes_of_layer[layer.index] = num_bytes
        return q_T.new_zeros(*q_T.shape[:2], v_T.shape[2])


def no_attention_hook(module: PreTrainedModel) -> ModelError:
    """The error for a model whose attention cannot be replaced."""
    return ModelError(
        f"model_name: {type(module).__name__} has no attention hook in transformers, which the "
        "torch engine needs; accepted are models of the Llama, Qwen, Gemma, Mistral, GPT-NeoX and "
        "similar families"
    )


def cache_bytes_per_token(model: PopulationModel, device: torch.device) -> int:
    """Bytes of keys and values of one token over all layers, found by running a few tokens.

    Raises:
        ModelError: The model does not call the attention hook.
    """
    probe = _CacheProbe()
    tokens = torch.zeros(MIN_ROWS, dtype=torch.int64, device=device)
    with torch.inference_mode():
        model.forward(tokens, torch.arange(MIN_ROWS, device=device), Batch(probe), None)
    if not probe.bytes_of_layer:
        raise no_attention_hook(model.module)
    return sum(probe.bytes_of_layer.values())
