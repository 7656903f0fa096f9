"""Forms of an exported centre: a model directory, or a PEFT adapter.

Weights that the run moved, or its merged adapter, make a whole model. Its adapter alone is a PEFT
adapter, and so is the nearest of a rank to the change of the weights: per weight a truncated
singular value decomposition of centre - base. Each is written into an existing, empty directory,
tensor by tensor.
"""

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from es_cookbook.checkpoints.linear_weights import named_weights, split_member
from es_cookbook.checkpoints.model_files import hub_repository, model_directory
from es_cookbook.checkpoints.models import (
    base_parameters,
    load_architecture,
    load_causal_lm,
    load_tokenizer,
)
from es_cookbook.checkpoints.peft import write_adapter, write_prompt
from es_cookbook.checkpoints.quantised import is_quantised, quantised_checkpoint
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.errors import ModelError
from es_cookbook.common.terminal import plural
from es_cookbook.engines.vllm.ranks import LORA_RANKS
from es_cookbook.evolution.spaces.base import NO_WEIGHTS, ParameterInfo
from es_cookbook.evolution.spaces.factors import AdapterFactors, LoRA
from es_cookbook.runs.centre.replay import Replay
from es_cookbook.runs.export.biases import with_biases
from es_cookbook.runs.export.loading import VECTORS, Lines, of_adapter, of_model, of_vectors
from es_cookbook.runs.export.model_directory import BaseFiles

_FULL_UP_TO = 512
"""Sides; a full decomposition of a smaller matrix costs less than a fifth of a second."""
_ROUNDS = 4
_BASE = "base"
"""Folder of an adapter with its base model, if loaders would not find that."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Description of an export.

    Attributes:
        kind: kind of the export, in words.
        library: the Hub's name of the library that loads it.
        relation: the Hub's name of its relation to the base.
        loading: code that loads it.
        said: the error of an approximation, a line each.
        notes: further facts for its users, a line each.
    """

    kind: str
    library: str
    relation: str
    loading: tuple[Lines, ...]
    said: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CentreFiles:
    """A centre, and the choice of its form.

    Attributes:
        merge: write a whole model in plain numbers, an adapter merged.
        rank: write an adapter of this rank; exact: of the rank that holds the whole change.
    """

    replay: Replay
    merge: bool = False
    rank: int | Literal["exact"] | None = None

    def write(self, directory: Path, final: Path | None) -> Written:
        """Fill a directory that becomes `final`; None for one that is converted further."""
        replay, rank = self.replay, self.rank
        if replay.space.vectors is not None:
            if rank is not None:
                raise ModelError(NO_WEIGHTS)
            if final is not None and not self.merge:
                return _write_vectors(directory, replay, _place(directory, final.resolve(), replay))
        if rank is None and (replay.space.adapter is None or self.merge):
            return write_model(directory, replay, final, plain=self.merge or final is None)
        place = _Place(final.resolve() if final else directory, replay.model_name)
        if final is not None:
            place = _place(directory, place.final, replay)
        if rank is None:
            return _write_own_adapter(directory, replay, place)
        rank = exact_rank(replay) if rank == "exact" else rank
        return _write_fitted_adapter(directory, replay, rank, place)


@dataclasses.dataclass(frozen=True)
class _Place:
    """An adapter's destination, and its base: a directory, or a name on the Hub."""

    final: Path
    base: str
    notes: tuple[str, ...] = ()


def _place(directory: Path, final: Path, replay: Replay) -> _Place:
    """Return where an adapter goes and which base it names, in a directory that becomes `final`.

    A base that loaders would not find by its name (a GGUF file, a run) is copied into it. So is a
    quantised base, dequantised: PEFT adapts layers with weights, and transformers needs further
    packages for some formats.
    """
    model_name = replay.model_name
    base, named = model_directory(model_name), Path(model_name).resolve()
    if is_quantised(model_name):
        plain_base(replay, directory)
    elif hub_repository(model_name) == model_name:
        return _Place(final, model_name)
    elif base.resolve() == named:
        return _Place(final, str(named))
    else:
        shutil.copytree(base, directory / _BASE)
    note = f"its base, made of {model_name}, is beside it: {final / _BASE}"
    return _Place(final, str(final / _BASE), (note,))


def plain_base(replay: Replay, parent: Path) -> Path:
    """Return the base as a model directory; a quantised one is dequantised into `parent`."""
    if not is_quantised(replay.model_name):
        return model_directory(replay.model_name)
    (directory := parent / _BASE).mkdir()
    BaseFiles(replay.model_name, replay.dtype).write_changed(directory)
    return directory


def write_model(
    directory: Path, replay: Replay, final: Path | None = None, plain: bool = False
) -> Written:
    """Write the base with the weights that the run moved, or with its adapter or vectors merged.

    The directory becomes `final`, if given. A quantised checkpoint whose own numbers moved stays
    quantised unless `plain`.
    """
    adapter, final = replay.space.adapter, (final or directory).resolve()
    if replay.space.vectors is not None:
        return _write_biased(directory, replay, final)
    if replay.search_space.moves_quantised:
        return (_write_dequantised if plain else _write_quantised)(directory, replay, final)
    kind = f"a Hugging Face model directory in {dtype_name(replay.dtype)}"
    shapes, changed = replay.space.shapes, replay.centre_tensors()
    if adapter is not None:
        kind += ", the adapter merged"
        shapes = {info.name: info.shape for info in replay.infos if info.name in adapter.targets}
        changed = _merged(replay, adapter)
    base = BaseFiles(replay.model_name, replay.dtype)
    if base.have(shapes):
        base.write_changed(directory, set(shapes), changed)
    else:
        _save_whole(directory, replay, changed)
    return _model(kind, replay, final)


def _write_quantised(directory: Path, replay: Replay, final: Path) -> Written:
    """Write the quantised checkpoint in its own format, with the numbers that the run moved."""
    checkpoint = quantised_checkpoint(replay.model_name)
    assert checkpoint is not None, "the space moves what it is made of"
    checkpoint.write(directory, replay.centre_tensors())
    load_tokenizer(replay.model_name).save_pretrained(directory)
    kind = "a quantised Hugging Face model directory, in the base's own format"
    notes = (
        f"transformers loads it with {checkpoint.packages} installed; vLLM and engine=torch need "
        "nothing more",
        "where the checkpoint asks for rounded activations (W8A8), transformers and vLLM round "
        "them, and the run did not; merge=true writes the model in plain numbers",
    )
    return dataclasses.replace(_model(kind, replay, final, checkpoint.packages), notes=notes)


def _write_dequantised(directory: Path, replay: Replay, final: Path) -> Written:
    """Write the checkpoint that the run moved, dequantised."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as quantised:
        _write_quantised(Path(quantised), replay, final)
        BaseFiles(quantised, replay.dtype).write_changed(directory)
    kind = f"a Hugging Face model directory in {dtype_name(replay.dtype)}, dequantised"
    return _model(kind, replay, final)


def _write_biased(directory: Path, replay: Replay, final: Path) -> Written:
    """Write the base with vectors added to the biases at the end of layers."""
    if replay.space.num_virtual:
        raise ModelError(NO_WEIGHTS)
    model, bias_of = with_biases(replay)
    own, names = {info.name: info.shape for info in replay.infos}, set(bias_of.values())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    new = {name: shape for name, shape in shapes.items() if name not in own}
    architecture, dtype = load_architecture(replay.model_name), dtype_name(replay.dtype)
    there, _ = base_parameters(replay.model_name, architecture, names & own.keys(), dtype)
    vectors = ((bias_of[name], vector) for name, vector in replay.centre_tensors())
    changed = ((b, v if b in new else v + there[b].float()) for b, v in vectors)
    base = BaseFiles(replay.model_name, replay.dtype, new, model.config if new else None)
    modules = [name.removesuffix("bias") for name in names]
    if base.have({name: shapes[name] for m in modules for name in (f"{m}bias", f"{m}weight")}):
        base.write_changed(directory, names, changed)
    elif not new:
        _save_whole(directory, replay, changed)
    else:
        raise ModelError(f"{replay.model_name} has its weights under names that take no biases")
    kind = f"a Hugging Face model directory in {dtype}, with the steering vectors as biases"
    notes = ("the last bits of its outputs may differ: it adds the vectors one sum earlier",)
    before, after = type(architecture).__name__, type(model).__name__
    if before != after:
        notes += (f"it is a {after}, because a {before} has no biases there",)
    return dataclasses.replace(_model(kind, replay, final), notes=notes)


def _merged(replay: Replay, adapter: AdapterFactors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each adapted weight with its adapter added."""
    architecture = load_architecture(replay.model_name)
    names, dtype = set(adapter.targets), dtype_name(replay.dtype)
    base, _ = base_parameters(replay.model_name, architecture, names, dtype)
    for name, a, b in _factors(replay, adapter):
        yield name, adapter.merged(name, base[name], a, b)


def _factors(
    replay: Replay, adapter: AdapterFactors
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each adapted weight's name, A and B, as soon as the parameters of both are rebuilt."""
    names_of: dict[str, list[str]] = {}
    for name, pair in adapter.targets.items():
        for part in {*pair}:
            names_of.setdefault(part, []).append(name)
    pending = {part: len(names) for part, names in names_of.items()}
    held: dict[str, torch.Tensor] = {}
    for part, tensor in replay.centre_tensors():
        held[part] = tensor
        for name in names_of[part]:
            if held.keys() >= {*adapter.targets[name]}:
                ((a, b),) = adapter.factors(name, [held.__getitem__])
                yield name, a, b
                for used in {*adapter.targets[name]}:
                    pending[used] -= 1
        held = {part: tensor for part, tensor in held.items() if pending[part]}


def _save_whole(
    directory: Path, replay: Replay, changed: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a model whose files have other tensors than its parameters, as transformers does it.

    It takes the memory of the whole model.
    """
    model = load_causal_lm(replay.model_name, dtype_name(replay.dtype), torch.device("cpu"))
    parameters = dict(named_weights(model))
    for name, tensor in changed:
        parameters[name].copy_(tensor)
    model.save_pretrained(directory)
    load_tokenizer(replay.model_name).save_pretrained(directory)


def _write_own_adapter(directory: Path, replay: Replay, place: _Place) -> Written:
    """Write the adapter of a run over an adapter."""
    adapter = replay.space.adapter
    assert adapter is not None
    factors, rank = _factors(replay, adapter), adapter.lora.rank
    adapted = [info for info in replay.infos if info.name in adapter.targets]
    weights = {info.name: info.out_in for info in adapted}
    write_adapter(directory, adapter.lora, weights, factors, replay.model_name, place.base)
    return _adapter(f"a PEFT adapter of rank {rank}", rank, replay, adapted, place)


def _write_vectors(directory: Path, replay: Replay, place: _Place) -> Written:
    """Write a soft prompt as a PEFT adapter, or vectors of layers by the layer's name."""
    vectors, tensors = replay.space.vectors, dict(replay.centre_tensors())
    assert vectors is not None
    if replay.space.num_virtual:
        (prompt,) = tensors.values()
        write_prompt(directory, prompt, place.base)
        kind = f"a PEFT soft prompt of {plural(len(prompt), 'virtual token')}"
        return _adapter(kind, 0, replay, (), place)
    by_module = {module: tensors[name].contiguous() for name, module in vectors.items()}
    save_file(by_module, directory / VECTORS)
    loading = of_vectors(place.final, place.base, dtype_name(replay.dtype))
    kind = f"steering vectors of {plural(len(by_module), 'layer')}"
    return Written(kind, "transformers", "adapter", loading, notes=place.notes)


def _write_fitted_adapter(directory: Path, replay: Replay, rank: int, place: _Place) -> Written:
    """Write the nearest adapter of a rank to the change of a run over linear weights."""
    infos = {info.name: info for info in replay.infos if info.name in replay.space.shapes}
    left, whole = 0.0, 0.0

    def factors() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        nonlocal left, whole
        for name, weight in replay.centre_tensors():
            change = weight - replay.base[name].float()
            change = change.T if infos[name].transposed else change
            a, b = fit(change, rank)
            left += float((change - b @ a).double().square().sum())
            whole += float(change.double().square().sum())
            yield name, a, b

    weights = {name: info.out_in for name, info in infos.items()}
    lora = LoRA(rank, rank)
    write_adapter(directory, lora, weights, factors(), replay.model_name, place.base)
    kind = f"a PEFT adapter of rank {rank}, the nearest to it"
    said = _nearness(rank, replay, math.sqrt(left / whole) if whole else 0.0)
    return dataclasses.replace(_adapter(kind, rank, replay, infos.values(), place), said=(said,))


def fit(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two thin matrices whose product B A is nearest to a matrix.

    Their shapes are A (rank, columns) and B (rows, rank).

    The best approximation in the Frobenius norm keeps the largest singular values (Eckart and Young
    1936), here shared evenly between B and A. Small matrices get a full singular value
    decomposition, large ones a randomised one (Halko, Martinsson and Tropp 2011, arXiv:0909.4061)
    with 2 r + 10 directions and four rounds of subspace iteration: on sums of hundreds of noise
    terms, whose singular values hardly decay, its error was within 0.2 % of the best possible one,
    in a tenth of the time or less. A rank above the matrix's own sides is filled with zeros.

    Args:
        matrix: (rows, columns), float32.
        rank: at least 1.
    """
    rows, columns = matrix.shape
    kept = min(rank, rows, columns)
    if min(rows, columns) <= max(_FULL_UP_TO, 2 * kept + 10):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):  # The same weights give the same adapter.
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(matrix, 2 * kept + 10, niter=_ROUNDS)
        vh = v.T
    a, b = torch.zeros(rank, columns), torch.zeros(rows, rank)
    root = s[:kept].sqrt()
    torch.mul(root[:, None], vh[:kept], out=a[:kept])
    b[:, :kept] = u[:, :kept] * root
    return a, b


def _nearness(rank: int, replay: Replay, error: float) -> str:
    """Describe the relative error of an adapter of this rank."""
    exact = exact_rank(replay)
    if rank >= exact:
        return (
            f"this adapter holds all of what the run changed (at most rank {exact} of a weight), "
            f"and only rounding is left out: relative error {error:.4g}"
        )
    return (
        f"an approximation: {error:.0%} of what the run changed is left out (relative error "
        f"{error:.4g}); an adapter of rank {exact} would hold all of it: rank=exact"
    )


def exact_rank(replay: Replay) -> int:
    """Return the smallest rank whose adapter is certain to hold the whole change of a run.

    A sum of terms has at most their ranks together; an update by a rule may have any rank.
    """
    seeds = len({term.seed for step in replay.steps for term in step.terms})
    moved = seeds and seeds * (replay.space.rank or math.inf)
    if any(step.rule is not None for step in replay.steps):
        moved = math.inf
    most = max(min(moved, *shape) for shape in replay.space.shapes.values())
    return max(int(most), 1)


def _model(kind: str, replay: Replay, final: Path, packages: str | None = None) -> Written:
    loading = of_model(final, dtype_name(replay.dtype), packages)
    return Written(kind, "transformers", "finetune", loading)


def _adapter(
    kind: str, rank: int, replay: Replay, adapted: Collection[ParameterInfo], place: _Place
) -> Written:
    # vLLM itself takes no adapters of GPT-2, nor PEFT's of experts, nor soft prompts.
    in_vllm = 0 < rank <= LORA_RANKS[-1] and not any(
        info.transposed or split_member(info.name)[1] is not None for info in adapted
    )
    loading = of_adapter(place.final, place.base, dtype_name(replay.dtype), rank, in_vllm)
    return Written(kind, "peft", "adapter", loading, notes=place.notes)
