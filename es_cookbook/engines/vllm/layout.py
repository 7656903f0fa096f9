"""The places of Hugging Face parameters in one rank's vLLM model.

vLLM fuses parameters (q, k and v; gate and up), shards them over ranks, pads and permutes them,
each model in its own way, and only its own loader defines how. So we ask the loader:
it is given tensors whose elements name their row or column, and its result is the map.
It is checked element by element, so a parameter that is laid out in some other way is refused, not
guessed at.

The same question goes to the LoRA layers: their own slicing, given the numbers of rows and columns,
says which of them a rank's slots hold.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch

from es_cookbook.checkpoints.linear_weights import split_member
from es_cookbook.checkpoints.models import AsStored
from es_cookbook.common.errors import ModelError, first_line
from es_cookbook.engines.genome_terms import Places, Slots
from es_cookbook.evolution.noise import Part
from es_cookbook.evolution.spaces.base import ParameterInfo

_BACKENDS_AS_LOADED = ("TRITON", "BATCHED_TRITON")
"""vLLM's kernels of experts that take weights as its loader leaves them."""

_BASE = 256
"""Places are encoded digit by digit: bfloat16 is exact for whole numbers up to 256."""

_Numbers: TypeAlias = torch.Tensor
"""Whole numbers, one axis: which places of a parameter's axis stand there, in this order."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The place of a rank's part of one Hugging Face parameter.

    Attributes:
        part: the rank's part of the parameter.
        parameter: vLLM's own, two axes (one column for a vector), transposed where vLLM has it the
            other way round; a view, to be written in place.
        rows: rows of `parameter`, in the order of the part's rows.
        columns: columns of `parameter`, in the order of the part's columns.
    """

    part: Part
    parameter: torch.Tensor
    rows: Places
    columns: Places

    def read(self) -> torch.Tensor:
        """Return the part as a new tensor (rows, columns) on the CPU, in its own dtype."""
        return self.parameter[self.rows][:, self.columns].detach().to("cpu", copy=True)

    def write(self, values: torch.Tensor) -> None:
        """Write the part, cast to the parameter's dtype, in place: graphs hold pointers.

        Args:
            values: the elements, in C order.
        """
        values = values.to(self.parameter.device, self.parameter.dtype)
        values = values.view(self.part.rows[1] - self.part.rows[0], -1)
        if isinstance(self.columns, slice):
            self.parameter[self.rows, self.columns] = values
        elif isinstance(self.rows, slice):
            self.parameter[self.rows][:, self.columns] = values
        else:
            self.parameter[self.rows[:, None], self.columns] = values


def find_placements(
    model: torch.nn.Module,
    infos: Sequence[ParameterInfo],
    wanted: Collection[str],
    as_stored: AsStored,
) -> dict[str, Placement]:
    """Ask the model's loader where it puts parameters; leaves every bit as it was.

    Args:
        model: vLLM's, loaded, not quantised, its linear weights not repacked.
        infos: the Hugging Face model's parameters, tied ones once.
        wanted: names of those that are looked for.
        as_stored: checkpoint's form of a parameter; the loader knows checkpoints.

    Returns:
        This rank's parts of them, by name, in the order of `infos`.

    Raises:
        ModelError: One of them lies in the model in a way that is not rows and columns.
    """
    is_t = [info.transposed for info in infos]
    with _without_lora(model):
        probe = _Probe(model, infos, as_stored)
        saved = [parameter.to("cpu", copy=True) for parameter in probe.parameters]
        try:
            probe.ask_where()
            names = probe.ask(0, lambda i, rows, columns: torch.full_like(rows, i))
            # Where each row and each column of vLLM's is from; a transposed parameter has them the
            # other way round.
            rows = probe.ask(0, lambda i, rows, columns: columns if is_t[i] else rows)
            columns = probe.ask(1, lambda i, rows, columns: rows if is_t[i] else columns)
        finally:
            for parameter, values in zip(probe.parameters, saved, strict=True):
                parameter.copy_(values)
    found: dict[int, Placement] = {}
    for p, parameter in enumerate(probe.parameters):
        rows_here, columns_here = (
            probe.rows_here[p].nonzero().flatten().cpu(),  # the answers are on the CPU
            probe.columns_here[p].nonzero().flatten().cpu(),
        )
        for i in cast(list[int], names[p][rows_here].unique().tolist()):
            if infos[i].name not in wanted:
                continue
            if i in found or p in probe.not_a_grid or p in probe.not_computed_with:
                raise _unknown(infos[i])
            own_rows = rows_here[names[p][rows_here] == i]
            own_rows, row_range = _in_order(infos[i], own_rows, rows[p][own_rows])
            own_columns, column_range = _in_order(infos[i], columns_here, columns[p][columns_here])
            own = own_rows, own_columns
            if is_t[i]:
                row_range, column_range, own = column_range, row_range, (own_columns, own_rows)
            part = Part(row_range, column_range, Part.whole(infos[i].shape).width)
            here = parameter.T if is_t[i] else parameter
            found[i] = Placement(part, here, *map(_as_slice, own))
    return {infos[i].name: found[i] for i in sorted(found)}


def find_slots(model: torch.nn.Module) -> list[Slots]:
    """Return the LoRA slots of a model, one entry for each Hugging Face linear weight.

    Args:
        model: vLLM's, loaded with LoRA.
    """
    packed = cast(dict[str, list[str]], getattr(model, "packed_modules_mapping", None) or {})
    found: list[Slots] = []
    unused = _not_computed_with(model)
    for name, module in model.named_modules():
        if not hasattr(module, "lora_a_stacked"):
            continue
        if any(id(parameter) in unused for parameter in module.parameters()):
            continue
        layer = cast(Any, module)  # vLLM's LoRA layers have no common type
        if isinstance(layer.lora_a_stacked, torch.Tensor):
            if layer.lora_a_stacked.dim() == 4:  # the logits', whole on every rank; 3: a table's
                a, b = layer.lora_a_stacked[:, 0], layer.lora_b_stacked[:, 0]
                rows, columns = slice(0, b.shape[1]), slice(0, a.shape[2])
                found.append(Slots("lm_head.weight", a, b, rows, columns))
            continue
        parent, _, last = name.rpartition(".")
        members = packed.get(last, [last])
        stacked = list(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True))
        if len(members) != len(stacked):  # fused by vLLM in a way its LoRA does not tell apart
            continue
        rows, columns = _slices_of(module, len(members))
        for member, (a, b), row, column in zip(members, stacked, rows, columns, strict=True):
            whole_name = ".".join(filter(None, (parent, member, "weight")))
            places = _as_slice(row), _as_slice(column)
            found.append(Slots(whole_name, a[:, 0], b[:, 0], *places))
    return found


def _slices_of(module: torch.nn.Module, count: int) -> tuple[list[_Numbers], list[_Numbers]]:
    """Return the rows and columns that this rank has of each of a LoRA layer's weights."""
    layer = cast(Any, module)
    sizes_a = [a.shape[-1] for a in layer.lora_a_stacked]
    sizes_b = [b.shape[-2] for b in layer.lora_b_stacked]
    if layer.tp_size == 1:
        return [torch.arange(n) for n in sizes_b], [torch.arange(n) for n in sizes_a]
    # Longer than any rank's share; replicated heads make some of them shorter than this.
    a = [torch.arange(n * layer.tp_size)[None, :] for n in sizes_a]
    b = [torch.arange(n * layer.tp_size)[:, None] for n in sizes_b]
    if count == 1:
        cut_a, cut_b = [layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])]
    else:
        cut_a, cut_b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    # An axis that ranks do not share comes back as it was.
    columns = [c.flatten()[:n] for c, n in zip(cut_a, sizes_a, strict=True)]
    return [r.flatten()[:n] for r, n in zip(cut_b, sizes_b, strict=True)], columns


class _Probe:
    """Loads tensors whose elements encode their origin, and reads where they end up.

    They are made on the model's device: a model of billions is loaded ten times over.

    Attributes:
        parameters: the model's, with two axes each; they share its memory.
        rows_here: rows of each that the loader fills.
        columns_here: columns of each that it fills.
        not_a_grid: parameters in which it does not fill all these rows and columns, or not in the
            same order all along.
        not_computed_with: parameters that the model has converted to something else.
    """

    def __init__(
        self, model: torch.nn.Module, infos: Sequence[ParameterInfo], as_stored: AsStored
    ) -> None:
        self.parameters = [_matrix(parameter) for parameter in model.parameters()]
        self.rows_here: list[torch.Tensor] = []
        self.columns_here: list[torch.Tensor] = []
        self.not_a_grid: set[int] = set()
        unused = _not_computed_with(model)
        self.not_computed_with = {i for i, p in enumerate(model.parameters()) if id(p) in unused}
        self._model = model
        self._infos = infos
        self._as_stored = as_stored
        self._most = max(max(*Part.whole(i.shape).rows, Part.whole(i.shape).width) for i in infos)

    def ask_where(self) -> None:
        """Find out which rows and columns are filled at all."""
        self._load(lambda i, rows, columns: torch.ones_like(rows))
        for p, parameter in enumerate(self.parameters):
            there = parameter > 0
            self.rows_here.append(there.any(1))
            self.columns_here.append(there.any(0))
            if not torch.equal(there, self.rows_here[p][:, None] & self.columns_here[p]):
                self.not_a_grid.add(p)

    def ask(
        self, axis: int, value_of: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> list[_Numbers]:
        """Return `value_of` (parameter, rows, columns) along an axis, for each of `parameters`."""
        answers = [torch.zeros(p.shape[axis], dtype=torch.int64) for p in self.parameters]
        scale = 1
        while scale <= max(self._most, len(self._infos)):
            self._load(lambda i, r, c, scale=scale: value_of(i, r, c) // scale % _BASE)
            for p, parameter in enumerate(self.parameters):
                line = parameter.amax(1 - axis)
                there = self.rows_here[p][:, None] & self.columns_here[p]
                if not torch.equal(there * line.unsqueeze(1 - axis), parameter):
                    self.not_a_grid.add(p)
                answers[p] += line.cpu().to(torch.int64) * scale
            scale *= _BASE
        return answers

    def _load(self, value_of: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        def tensor(i: int) -> torch.Tensor:
            whole, device = Part.whole(self._infos[i].shape), self.parameters[0].device
            rows = torch.arange(whole.rows[1], device=device)[:, None]
            columns = torch.arange(whole.width, device=device)
            values = value_of(i, rows, columns).to(torch.float32)
            return values.expand(whole.rows[1], whole.width).reshape(self._infos[i].shape)

        def tensors() -> Generator[tuple[str, torch.Tensor]]:
            members = [(i, *split_member(info.name)) for i, info in enumerate(self._infos)]
            for parameter, group in itertools.groupby(members, lambda member: member[1]):
                found = [(tensor(i), expert) for i, _, expert in group]
                whole, expert = found[0]
                if expert is not None:
                    whole = torch.stack([tensor for tensor, _ in found])
                yield from self._as_stored(parameter, whole).items()

        for parameter in self.parameters:
            parameter.zero_()
        try:
            cast(Any, self._model).load_weights(tensors())
        except Exception as error:  # of many kinds: it expects to run before weights are processed
            raise ModelError(
                "vLLM's loader does not take this model's parameters a second time "
                f"({first_line(error)}); use engine=torch"
            ) from error


def _not_computed_with(model: torch.nn.Module) -> set[int]:
    """Return the identities of parameters that vLLM converts once, to use the result.

    Latent attention (MLA) absorbs a projection into others, and some kernels want experts shuffled.
    """
    found: set[int] = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        backend = getattr(method, "unquantized_backend", None)
        if hasattr(module, "is_amx_bmm_enabled"):
            absorbed = cast(torch.nn.Module, module.kv_b_proj)
            found |= {id(parameter) for parameter in absorbed.parameters()}
        elif backend is not None and backend.name not in _BACKENDS_AS_LOADED:
            found |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return found


def _matrix(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view with two axes that shares the memory, experts' rows below each other."""
    data = parameter.detach()
    return data.view(-1, 1) if data.dim() < 2 else data.view(-1, data.shape[-1])


def _in_order(
    info: ParameterInfo, places: _Numbers, of_whole: _Numbers
) -> tuple[_Numbers, tuple[int, int]]:
    """Sort places by their contents, which have to be neighbours."""
    of_whole, order = of_whole.sort()
    first = int(of_whole[0])
    if not torch.equal(of_whole, torch.arange(first, first + len(of_whole))):
        raise _unknown(info)
    return places[order], (first, first + len(of_whole))


def _as_slice(places: _Numbers) -> Places:
    first = int(places[0])
    neighbours = torch.equal(places, torch.arange(first, first + len(places)))
    return slice(first, first + len(places)) if neighbours else places


def _unknown(info: ParameterInfo) -> ModelError:
    return ModelError(
        f"vLLM keeps {info.name} in another way than rows and columns, which es_cookbook does not "
        "know; leave it out (search_space.exclude), or use engine=torch"
    )


@contextmanager
def _without_lora(model: torch.nn.Module) -> Generator[None]:
    """Take LoRA layers out of the model while the block runs: loaders do not know them."""
    wrapped: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            base = getattr(child, "base_layer", None)
            if isinstance(base, torch.nn.Module):
                wrapped.append((parent, name, child))
                setattr(parent, name, base)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)
